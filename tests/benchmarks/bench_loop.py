"""Overhead of `train` with its default hooks, compared with a bare `for` loop.

    python tests/benchmarks/bench_loop.py

The batch lies on the device, and steps take about 35 µs (those of bench_step.py), so the loop dominates the
measurement; bench_feed.py has batches of NumPy arrays. `train` counts steps, logs,
writes summaries and saves checkpoints; each run resumes where the previous one ended. `train` uses threads, so on a
busy machine the medians are unreliable: compare the minima.
"""

import io
import itertools
import logging
import shutil
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from _timing import report
from bench_step import init_params, loss_fn
from bounds import BOUNDS

import jstep

CALLS, ROUNDS, K = 5_000, 41, 100


def main():
    logger = logging.getLogger("jstep")  # lines are formatted but not shown
    logger.addHandler(logging.StreamHandler(io.StringIO()))
    logger.setLevel(logging.INFO)
    logger.propagate = False
    optimizer = jstep.adam(jstep.exponential_decay(1e-3, 1000, 0.96, staircase=True))
    train_step = jstep.minimize(loss_fn, optimizer)
    rng = np.random.default_rng(0)
    batch = jnp.asarray(rng.normal(size=(32, 64)), jnp.float32), jnp.asarray(rng.integers(0, 10, 32))

    def batches(step):
        return batch

    def fresh():
        return jstep.TrainState.create(init_params(), optimizer)

    held = {}

    def bare(name, calls):
        state = held.get(name) or fresh()
        start = jstep.global_step(state)
        started = time.perf_counter()
        for n in range(start, start + calls):
            state, _ = train_step(state, *batches(n))
        jax.block_until_ready(state)
        taken = time.perf_counter() - started
        held[name] = state
        return taken

    class Time(jstep.Hook):
        """Times the steps, excluding opening and closing files at both ends."""

        def begin(self, state):
            self.started = None

        def after_step(self, step, state, metrics):
            if self.started is None:  # the first call, which compiles, is excluded
                self.started, self.first = time.perf_counter(), step

        def end(self, step, state):
            jax.block_until_ready(state)
            self.taken = (time.perf_counter() - self.started) / (step - self.first)

        def next_due(self, step):
            return step + 1 if self.started is None else 2**62

    def looped(name, calls, steps_per_call, *hooks):
        directory = tempfile.mkdtemp()
        state = held.get(name) or fresh()
        hook = Time()
        held[name] = jstep.train(
            train_step, state, batches, jstep.global_step(state) + calls, hooks=[hook, *hooks],
            checkpoint_dir=directory + "/checkpoints", logdir=directory + "/logs", steps_per_call=steps_per_call,
        )  # fmt: skip
        shutil.rmtree(directory)
        return hook.taken * calls

    def write(step, values):
        pass

    contenders = {
        "bare loop": lambda calls: bare("bare", calls),
        "train, four hooks": lambda calls: looped("train", calls, 1),
        "train, not watched": lambda calls: looped("unwatched", calls, 1, jstep.StallHook(warn_secs=None)),
        "train, MetricsHook": lambda calls: looped("metrics", calls, 1, jstep.MetricsHook(write)),
        "train, MetricsHook, mean": lambda calls: looped("mean", calls, 1, jstep.MetricsHook(write, mean=True)),
        f"train, steps_per_call={K}": lambda calls: looped("several", calls, K),
        "train, steps_per_call=auto": lambda calls: looped("auto", calls, "auto"),
    }
    for run in contenders.values():
        run(1000)
    times = {name: [] for name in contenders}
    for _, (name, run) in itertools.product(range(ROUNDS), contenders.items()):
        times[name].append(run(CALLS) / CALLS)
    return report(
        f"{CALLS} steps: counter, logging, summaries, checkpoints; per step",
        times,
        BOUNDS["loop"],
    )


if __name__ == "__main__":
    sys.exit(not main())
