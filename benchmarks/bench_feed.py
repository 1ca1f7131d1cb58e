"""Overhead of feeding in `train`, beside a bare `for` loop of the same step and batches.

    python benchmarks/bench_feed.py

`train` logs, writes summaries and saves checkpoints, and decides for itself whether a thread reads
the batches ahead. Batches are two NumPy arrays, 32 × 64 floats and 32 labels: from a generator,
from a function of the step, and from `jstep.batches`. They are read while nothing else runs, and
while another process is busy on each core but one.

The loader takes 10 ms per batch, but has the first ones at hand; its steps wait 10 ms for something
else. Reading ahead can halve their time, as a thread with a queue of two batches does in the loop
that it is compared with. `train` starts its thread after it has waited for a second, so the first
150 steps are not timed.
"""

import contextlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
from _timing import Timer, format_log_lines_unseen, in_turn, report
from bench_step import init_params, loss_fn
from bounds import BOUNDS

import jstep

SECS, UNTIMED, UNTIMED_OF_LOADER = 0.01, 4, 150
ROWS = np.random.default_rng(0).normal(size=(6400, 64)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 10, 6400)


def generator(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield rng.normal(size=(32, 64)).astype(np.float32), rng.integers(0, 10, 32)


def function(count):
    def batch(step):
        rows = slice(32 * step % len(ROWS), 32 * step % len(ROWS) + 32)
        return ROWS[rows], LABELS[rows]

    return batch


def own_batches(count):
    return jstep.batches((ROWS, LABELS), 32)


def loader(count):
    for n, batch in enumerate(generator(count)):
        time.sleep(SECS * (n >= 8))
        yield batch


def one_by_one(batches, count):
    """What a bare loop goes through."""
    if hasattr(batches, "__next__"):
        return batches
    return map(batches if callable(batches) else batches.__getitem__, range(count))


def read_ahead(batches):
    """The batches, which a thread reads: what one would write by hand."""
    ready, end = queue.Queue(2), object()

    def read():
        for batch in batches:
            ready.put(batch)
        ready.put(end)

    threading.Thread(target=read, daemon=True).start()
    return iter(ready.get, end)


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
    format_log_lines_unseen()
    optimizer = jstep.adam(1e-3)
    train_step = jstep.minimize(loss_fn, optimizer)

    def fresh():
        return jstep.TrainState.create(init_params(), optimizer)

    def timer_of(calls, pause):
        return Timer(min(UNTIMED_OF_LOADER, calls // 2) if pause else UNTIMED, pause)

    def bare(source, pause):
        def run(calls):
            batches, timer, state = (
                one_by_one(source(calls), calls),
                timer_of(calls, pause),
                fresh(),
            )
            batches = read_ahead(batches) if pause else batches
            for step, batch in enumerate(batches, 1):
                state, _ = train_step(state, *batch)
                if pause or step == timer.untimed:
                    timer.after_step(step, state, None)
            timer.end(step, state)
            return timer.taken

        return run

    def looped(source, pause):
        def run(calls):
            directory, timer = tempfile.mkdtemp(), timer_of(calls, pause)
            jstep.train(
                train_step, fresh(), source(calls), calls, hooks=[timer],
                checkpoint_dir=directory + "/checkpoints", logdir=directory + "/logs",
            )  # fmt: skip
            shutil.rmtree(directory)
            return timer.taken

        return run

    def compare(title, sources, calls, rounds, pause=0, unit=1e6, peer="bare loop"):
        if os.environ.get("JSTEP_QUICK_BENCHMARKS"):
            calls //= 5
        contenders = {}
        for name, source in sources.items():
            contenders |= {
                f"{peer}, {name}": bare(source, pause),
                f"train, {name}": looped(source, pause),
            }
        times = in_turn(contenders, calls, rounds, 50)
        return report(
            title,
            times,
            {pair: bound for pair, bound in BOUNDS["feed"].items() if pair[0] in times},
            unit,
        )

    sources = {"generator": generator, "function": function, "jstep.batches": own_batches}
    good = compare("Small batches of NumPy arrays", sources, 5_000, 21)
    with busy_processes():
        busy = {f"{name}, busy": source for name, source in sources.items()}
        good &= compare("The same, other processes busy", busy, 5_000, 21)
    title, sources = "A loader whose first batches are at hand", {"loader of 10 ms": loader}
    return good & compare(title, sources, 450, 5, SECS, 1e3, "a thread by hand")


if __name__ == "__main__":
    sys.exit(not main())
