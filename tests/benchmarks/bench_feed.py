"""Overhead of feeding in `train`, compared with a bare `for` loop over the same batches.

    python tests/benchmarks/bench_feed.py

`train` runs with its default hooks, and decides for itself whether a thread reads the batches ahead. Small batches are
two NumPy arrays from a generator; they are read while nothing else runs, and while other processes keep all cores but
one busy. All threads of `train` wait for the cores then, so compare it with `train` in which no thread reads.

The loader takes 10 ms per batch, but has the first ones at hand; its steps wait 10 ms for something else. Reading ahead
can halve their time.
"""

import contextlib
import io
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from _timing import report
from bench_step import init_params, loss_fn

import jstep
from jstep.loop import read_ahead

SECS = 0.01


def small_batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield rng.normal(size=(32, 64)).astype(np.float32), rng.integers(0, 10, 32)


def loader(count):
    for n, batch in enumerate(small_batches(count)):
        time.sleep(SECS * (n >= 8))
        yield batch


@contextlib.contextmanager
def busy_processes():
    """Keep all cores but one busy."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(max(1, os.cpu_count() - 1))]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main():
    logger = logging.getLogger("jstep")  # lines are formatted but not shown
    logger.addHandler(logging.StreamHandler(io.StringIO()))
    logger.setLevel(logging.INFO)
    logger.propagate = False
    optimizer = jstep.adam(1e-3)
    train_step = jstep.minimize(loss_fn, optimizer)

    def fresh():
        return jstep.TrainState.create(init_params(), optimizer)

    def bare(source, pause):
        def run(calls):
            batches, timer = source(calls), Timer()
            state, _ = train_step(fresh(), *next(batches))
            timer.start()
            for batch in batches:
                state, _ = train_step(state, *batch)
                if pause:
                    time.sleep(pause)
            return timer.stop(state) / (calls - 1)

        return run

    class Timer(jstep.Hook):
        """Times all steps but the first, excluding opening and closing files at both ends."""

        def __init__(self, pause=0):
            self.pause, self.started = pause, None

        def start(self):
            self.started = time.perf_counter()

        def stop(self, state):
            jax.block_until_ready(state)
            return time.perf_counter() - self.started

        def after_step(self, step, state, metrics):
            if self.started is None:
                self.start()
            elif self.pause:
                time.sleep(self.pause)

        def end(self, step, state):
            self.taken = self.stop(state) / (step - 1)

        def next_due(self, step):
            return step + 1 if self.pause or self.started is None else 2**62

    def looped(source, pause, decide=read_ahead.decide):
        def run(calls):
            read_ahead.decide = decide
            directory, timer = tempfile.mkdtemp(), Timer(pause)
            jstep.train(
                train_step, fresh(), source(calls), calls, hooks=[timer],
                checkpoint_dir=directory + "/checkpoints", logdir=directory + "/logs",
            )  # fmt: skip
            shutil.rmtree(directory)
            return timer.taken

        return run

    def compare(title, source, calls, pause, rounds, of_bare, of_direct):
        if os.environ.get("JSTEP_QUICK_BENCHMARKS"):
            rounds = 3
        contenders = {
            "train": looped(source, pause),
            "train, no thread reads": looped(source, pause, lambda choice, calls: read_ahead.Choice(calls=64)),
            "bare loop": bare(source, pause),
        }
        times = {name: [] for name in contenders}
        for _, (name, run) in itertools.product(range(rounds), contenders.items()):
            times[name].append(run(calls))
        bounds = {("train", "bare loop"): of_bare, ("train", "train, no thread reads"): of_direct}
        return report(title, times, bounds, 1e3)

    good = compare("Small batches from a generator", small_batches, 5_000, 0, 15, 1.15, 1.05)
    with busy_processes():
        good &= compare("The same, other processes busy", small_batches, 5_000, 0, 15, 1.5, 1.1)
    good &= compare("A loader of 10 ms, the first batches at hand", loader, 300, SECS, 5, 0.6, 0.6)
    return good


if __name__ == "__main__":
    sys.exit(not main())
