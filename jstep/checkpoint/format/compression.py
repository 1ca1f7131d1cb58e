"""A heuristic for compressing arrays: trained floats hardly shrink, the zeros of a fresh state almost vanish."""

import zlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

_ARRAYS = 64  # number of arrays to sample, of all sizes
_SAMPLE = 1024  # bytes from the middle of each array
_WORTH_IT = 0.6


def is_worthwhile(arrays: Iterable[Any]) -> bool:
    """Return whether compression about halves the bytes, by a sample that takes a millisecond or two.

    Only arrays on the CPU are sampled. Always False on several processes, which would have to agree.
    """
    by_size = sorted(arrays, key=lambda array: int(array.nbytes))
    looked_into = by_size[-1 :: -max(1, len(by_size) // _ARRAYS)]  # the largest among them
    if jax.process_count() > 1 or not all(_is_on_cpu(array) for array in looked_into):
        return False
    before = sum(array.nbytes for array in looked_into)
    after = sum(array.nbytes * _ratio(array) for array in looked_into)
    return bool(after < _WORTH_IT * before)


def _is_on_cpu(array: Any) -> bool:
    return isinstance(array, np.ndarray) or all(device.platform == "cpu" for device in array.sharding.device_set)


def _ratio(array: Any) -> float:
    part = array if isinstance(array, np.ndarray) else np.asarray(array.addressable_shards[0].data)
    start = part.size // 2
    sample = part.ravel("K")[start : start + _SAMPLE // part.itemsize].tobytes()
    return min(1.0, len(zlib.compress(sample, 1)) / max(len(sample), 1))
