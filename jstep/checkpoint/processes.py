"""Agreement between processes through JAX collectives; a single process communicates nothing.

The caller's transfer guards do not apply.
"""

from typing import Any

import jax
import numpy as np

from jstep.core.contexts import internal_transfers

_SMALLEST = 1024  # minimum number of bytes to exchange


def broadcast_first(number: int) -> int:
    """Return the number of the first process."""
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    with internal_transfers():
        mine = np.int32(number) if abs(number) < 2**31 else np.int64(number)
        agreed: Any = multihost_utils.broadcast_one_to_all(mine)
        return int(agreed)


def any_process(true: bool) -> bool:
    """Return whether the value is true on any process."""
    return true if jax.process_count() == 1 else bool(np.any(_gathered(np.array([true]))))


def gather_texts(text: str) -> list[str]:
    """Return the string of each process, in process order."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = np.ravel(_gathered(np.array([data.size], np.int32)))
    # Few sizes, so that a string that grows by one digit does not compile another program.
    room = max(_SMALLEST, 1 << (int(lengths.max()) - 1).bit_length())
    padded = np.zeros(room, np.uint8)
    padded[: data.size] = data
    rows = _gathered(padded)
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def _gathered(mine: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the arrays of all processes, stacked; exempt from the caller's transfer guards."""
    from jax.experimental import multihost_utils

    with internal_transfers():
        return np.asarray(multihost_utils.process_allgather(mine))
