"""Shuffled batches: `batches[N]` beside NumPy by a precomputed permutation, indexed and taken.

`np.take` into an array that is used again is the quickest way in NumPy; `batches[N]` also computes
the permutation.

The bound applies to rows of up to about a kilobyte, for which np.take is much faster than fancy
indexing. Both are memory-bound for longer rows, which are shown without a bound.

python benchmarks/bench_data.py
"""

import itertools
import sys

import numpy as np
from _timing import interleaved, report

import jstep


def fancy(arrays, permutation, batch_size):
    starts = itertools.cycle(range(0, len(permutation) - batch_size + 1, batch_size))

    def run(calls):
        for start in itertools.islice(starts, calls):
            rows = permutation[start : start + batch_size]
            for array in arrays:
                array[rows]

    return run


def take(arrays, permutation, batch_size):
    starts = itertools.cycle(range(0, len(permutation) - batch_size + 1, batch_size))
    outs = [np.empty((batch_size, *array.shape[1:]), array.dtype) for array in arrays]

    def run(calls):
        for start in itertools.islice(starts, calls):
            rows = permutation[start : start + batch_size]
            for array, out in zip(arrays, outs, strict=True):
                np.take(array, rows, axis=0, out=out, mode="clip")

    return run


def ours(arrays, batch_size):
    data = jstep.batches(arrays, batch_size)
    steps = itertools.count()

    def run(calls):
        for step in itertools.islice(steps, calls):
            data[step]

    return run


def main():
    rng = np.random.default_rng(0)
    good = True
    sources = [
        (1_000_000, 16, np.float32),
        (1_000_000, 64, np.float32),
        (60_000, 784, np.uint8),
        (60_000, 784, np.float32),
    ]
    for rows, width, dtype in sources:
        x = rng.integers(0, 255, size=(rows, width)).astype(dtype)
        y = rng.integers(0, 10, size=rows).astype(np.int32)
        for batch_size in (128, 512, 2048):
            times = interleaved(
                {
                    "fancy indexing": fancy((x, y), rng.permutation(rows), batch_size),
                    "np.take": take((x, y), rng.permutation(rows), batch_size),
                    "batches[N]": ours((x, y), batch_size),
                },
                max(100_000 // batch_size, 50),
            )
            title = (
                f"A batch of {batch_size} from {rows} rows of {width} {np.dtype(dtype)}, and labels"
            )
            bound = 0.8 if x[0].nbytes <= 1024 else float("inf")
            good &= report(
                title,
                times,
                {("batches[N]", "np.take"): None, ("batches[N]", "fancy indexing"): bound},
            )
    return good


if __name__ == "__main__":
    sys.exit(not main())
