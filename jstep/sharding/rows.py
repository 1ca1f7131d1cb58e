"""The rows of each process, as one global array."""

from typing import Any

import jax
import numpy as np


def place_rows(rows: Any, sharding: Any) -> jax.Array:
    """An array where a sharding says: of rows of this process its part of a global one, of all processes together.

    Args:
        rows: This process's own rows; or a global array, which is laid out anew.
        sharding: Any sharding. Where it lies on this process alone, the rows are all there are.
    """
    is_global = isinstance(rows, jax.Array) and not rows.is_fully_addressable
    if is_global or getattr(sharding, "is_fully_addressable", True):
        return jax.device_put(rows, sharding)
    # Also of an array on this process's device: device_put would take it for the whole, the same on all processes.
    return jax.make_array_from_process_local_data(sharding, np.asarray(rows))
