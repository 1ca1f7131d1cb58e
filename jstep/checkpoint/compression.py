"""Whether compression of a checkpoint is worthwhile."""

import zlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jstep.core.placement import is_on_cpus

_ARRAYS = 64  # number of arrays to sample, of all sizes
_SAMPLE = 1024  # bytes from the middle of each array
_WORTH_IT = 0.6


def is_worthwhile(arrays: Iterable[Any]) -> bool:
    """Return whether compression about halves the bytes, by a sample that takes a millisecond or two.

    Only arrays on the CPU are sampled. Always False on several processes, which would have to agree.
    """
    by_size = sorted(arrays, key=lambda array: int(array.nbytes))
    looked_into = by_size[-1 :: -max(1, len(by_size) // _ARRAYS)]  # the largest among them
    if jax.process_count() > 1 or not all(isinstance(array, np.ndarray) or is_on_cpus(array) for array in looked_into):
        return False
    before, after = 0, 0.0
    for array in looked_into:
        part = array if isinstance(array, np.ndarray) else np.asarray(array.addressable_shards[0].data)
        start = part.size // 2
        sample = part.ravel("K")[start : start + _SAMPLE // part.itemsize].tobytes()
        before += array.nbytes
        after += array.nbytes * min(1.0, len(zlib.compress(sample, 1)) / max(len(sample), 1))
    return after < _WORTH_IT * before
