"""What processes have to agree on, by JAX's own means; nothing to do where there is one."""

from typing import Any

import jax
import numpy as np


def of_the_first(number: int) -> int:
    """The number that the first process has."""
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    agreed: Any = multihost_utils.broadcast_one_to_all(np.int32(number) if abs(number) < 2**31 else np.int64(number))
    return int(agreed)


def on_any(true: bool) -> bool:
    """Whether it is true on any process."""
    if jax.process_count() == 1:
        return true
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.array([true]))))
