"""The cost of positions: a step of `train` with a checkpoint_dir, compared with one without.

    python benchmarks/bench_positions.py

Replay buffers on the host of 1 and 100 MB, from which `from_state` draws batches, and loaders whose
positions take long to read: lists of 10,000 and 100,000 numbers, and an array of 8 MB. No
checkpoint is due but the last one, which is not timed: what is timed is how often positions are
read, and copied, in between.
"""

import os
import shutil
import sys
import tempfile

import jax.numpy as jnp
import numpy as np
from _timing import Timer, report
from bounds import BOUNDS

import jstep

FLOATS = 25


class Buffer:
    """A replay buffer of so many bytes."""

    def __init__(self, size):
        self.rows, self.at = np.zeros((size // (4 * FLOATS), FLOATS), np.float32), 0
        self.rng = np.random.default_rng(0)

    def __call__(self, step, state):
        self.rows[self.at % len(self.rows)] = self.rng.normal(size=FLOATS)
        self.at += 1
        return self.rows[self.rng.integers(0, len(self.rows), 64)]

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, position):
        vars(self).update(position)


class Loader:
    """A loader that keeps something in its position."""

    def __init__(self, kept):
        self.kept, self.at = kept, 0
        self.rows = np.random.default_rng(0).normal(size=(64, FLOATS)).astype(np.float32)

    def __iter__(self):
        while True:
            self.at += 1
            yield self.rows

    def state_dict(self):
        return {"at": self.at, "kept": self.kept}

    def load_state_dict(self, position):
        self.at, self.kept = position["at"], position["kept"]


SOURCES = {
    "buffer of 1 MB": lambda: jstep.from_state(Buffer(10**6)),
    "buffer of 100 MB": lambda: jstep.from_state(Buffer(10**8)),
    "list of 10⁴": lambda: Loader(list(range(10**4))),
    "list of 10⁵": lambda: Loader(list(range(10**5))),
    "array of 8 MB": lambda: Loader(np.zeros(10**6)),
}


def main():
    optimizer = jstep.adamw(1e-3)
    train_step = jstep.minimize(lambda params, x: jnp.mean((x @ params["w"] - 1.0) ** 2), optimizer)

    def timed(source, directory, calls):
        timer, state = (
            Timer(untimed=4),
            jstep.TrainState.create({"w": jnp.zeros(FLOATS)}, optimizer),
        )
        jstep.train(
            train_step, state, source(), calls, hooks=[timer], checkpoint_dir=directory,
            save_checkpoint_secs=None, log_steps=None, progress=False,
        )  # fmt: skip
        return timer.taken

    def kept(source, calls):
        directory = tempfile.mkdtemp()
        try:
            return timed(source, directory, calls)
        finally:
            shutil.rmtree(directory)

    rounds, calls = (3, 500) if os.environ.get("JSTEP_QUICK_BENCHMARKS") else (15, 10_000)
    times = {}
    for name, source in SOURCES.items():
        with_one, without = times[f"with checkpoint_dir, {name}"], times[f"without, {name}"] = (
            [],
            [],
        )
        kept(source, 50)
        for _ in range(rounds):
            without.append(timed(source, None, calls))
            with_one.append(kept(source, calls))
    return report("Positions", times, BOUNDS["positions"])


if __name__ == "__main__":
    sys.exit(not main())
