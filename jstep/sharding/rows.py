"""Assembly of global arrays from the rows of each process."""

from typing import Any

import jax
import numpy as np


def place_rows(rows: Any, sharding: Any) -> jax.Array:
    """Assemble a global array with a sharding from the local rows of each process.

    Args:
        rows: The rows of this process, or a global array, which is resharded.
        sharding: Any sharding. If all its devices belong to this process, the rows are the whole array.
    """
    is_global = isinstance(rows, jax.Array) and not rows.is_fully_addressable
    if is_global or getattr(sharding, "is_fully_addressable", True):
        return jax.device_put(rows, sharding)
    # Also for an array on a device of this process: device_put would assume the same whole array on all processes.
    return jax.make_array_from_process_local_data(sharding, np.asarray(rows))
