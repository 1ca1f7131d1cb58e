"""Overhead of `train` with its default hooks, compared with a bare `for` loop of the same calls.

    python benchmarks/bench_loop.py

The batch lies on the device, and steps take about 35 µs (those of bench_step.py), so the loop dominates the
measurement; steps of 8 layers take about a millisecond, and those of the transformer more than ten. bench_feed.py has
batches of NumPy arrays. `train` counts steps, logs, writes summaries and saves checkpoints; each run resumes where the
previous one ended. A loop of 100 steps per call stacks its batches by one compiled call, as `train` does. `train` uses
threads, so on a busy machine the medians are unreliable: compare the minima.
"""

import shutil
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
from _timing import Timer, format_log_lines_unseen, in_turn, report
from bench_step import NETWORKS
from bounds import BOUNDS

import jstep

CALLS, ROUNDS, K = 5_000, 41, 100
LARGER = {"8 layers": (200, 11), "transformer": (50, 7)}
"""Larger networks of bench_step.py → the steps of a run, and the rounds."""


class Loops:
    """Loops over one network, each with a state of its own, from which its next run continues."""

    def __init__(self, network):
        self.network = network
        schedule = jstep.exponential_decay(1e-3, 1000, 0.96, staircase=True)
        self.optimizer = jstep.adam(schedule)
        self.step = jstep.minimize(network.loss, self.optimizer)
        self.several = jstep.scan_steps(self.step)
        self.stack = jax.jit(lambda *batches: jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches))
        self.held = {}

    def state(self, name):
        """The state that a loop continues from."""
        if name not in self.held:
            self.held[name] = jstep.TrainState.create(self.network.init(jax.random.key(0)), self.optimizer)
        return self.held[name]

    def batches(self, step):
        """The batch of a step."""
        return self.network.batch

    def bare(self, calls):
        """Return the seconds of a loop of single steps."""
        state = self.state("bare")
        start = jstep.global_step(state)
        started = time.perf_counter()
        for n in range(start, start + calls):
            state, _ = self.step(state, *self.batches(n))
        jax.block_until_ready(state)
        taken = time.perf_counter() - started
        self.held["bare"] = state
        return taken

    def bare_several(self, calls):
        """Return the seconds of a loop of K steps per call."""
        state = self.state("bare, several")
        start = jstep.global_step(state)
        started = time.perf_counter()
        for n in range(start, start + calls, K):
            state, _ = self.several(state, *self.stack(*map(self.batches, range(n, n + K))))
        jax.block_until_ready(state)
        taken = time.perf_counter() - started
        self.held["bare, several"] = state
        return taken

    def train(self, name, calls, steps_per_call=1, *hooks):
        """Return the seconds of as many steps of `train`."""
        directory, hook, state = tempfile.mkdtemp(), Timer(), self.state(name)
        self.held[name] = jstep.train(
            self.step, state, self.batches, jstep.global_step(state) + calls, hooks=[hook, *hooks],
            checkpoint_dir=directory + "/checkpoints", logdir=directory + "/logs", steps_per_call=steps_per_call,
        )  # fmt: skip
        shutil.rmtree(directory)
        return hook.taken * calls

    def own(self, name, calls, *, makes_batches=False):
        """Return the seconds of as many steps of a loop of one's own, which takes its batches or makes them."""
        directory, hook, state = tempfile.mkdtemp(), Timer(), self.state(name)
        with jstep.Run(
            self.step, state, None if makes_batches else self.batches, jstep.global_step(state) + calls,
            hooks=[hook], checkpoint_dir=directory + "/checkpoints", logdir=directory + "/logs",
        ) as run:  # fmt: skip
            for step in run:
                if makes_batches:
                    run.train_step(*self.batches(step))
        self.held[name] = run.state
        shutil.rmtree(directory)
        return hook.taken * calls


def write(step, values):
    """Take what a MetricsHook gives."""


def measured(contenders, calls, rounds):
    """Return the seconds a step of each contender, one value per round."""
    times = in_turn(contenders, calls, rounds, max(calls // 5, K))
    return {name: [one / calls for one in taken] for name, taken in times.items()}


def main():
    format_log_lines_unseen()
    small = Loops(NETWORKS["2 layers"])
    contenders = {
        "bare loop": small.bare,
        f"bare loop, {K} per call": small.bare_several,
        "train, four hooks": lambda calls: small.train("train", calls),
        "for step in run": lambda calls: small.own("own", calls),
        "run.train_step": lambda calls: small.own("made", calls, makes_batches=True),
        "train, not watched": lambda calls: small.train("unwatched", calls, 1, jstep.StallHook(warn_secs=None)),
        "train, MetricsHook": lambda calls: small.train("metrics", calls, 1, jstep.MetricsHook(write)),
        "train, MetricsHook, mean": lambda calls: small.train("mean", calls, 1, jstep.MetricsHook(write, mean=True)),
        f"train, steps_per_call={K}": lambda calls: small.train("several", calls, K),
        "train, steps_per_call=auto": lambda calls: small.train("auto", calls, "auto"),
    }
    title = "counter, logging, summaries, checkpoints; per step"
    times = measured(contenders, CALLS, ROUNDS)
    good = report(f"{CALLS} steps of 2 layers: {title}", times, pairs(times))
    times = {name: times[name] for name in ("bare loop", "train, steps_per_call=auto")}
    two_features = {("train, steps_per_call=auto", "bare loop"): None}
    report("Two features, many steps per call compared with one: steps of 2 layers", times, two_features)
    for name, (calls, rounds) in LARGER.items():
        loops = Loops(NETWORKS[name])
        both = {f"bare loop, {name}": loops.bare, f"train, {name}": lambda calls, loops=loops: loops.train("t", calls)}
        times = measured(both, calls, rounds)
        good &= report(f"{calls} steps of {name}: {title}", times, pairs(times), 1e3)
    return good


def pairs(times):
    """The bounds of those that were measured."""
    return {pair: bound for pair, bound in BOUNDS["loop"].items() if pair[0] in times}


if __name__ == "__main__":
    sys.exit(not main())
