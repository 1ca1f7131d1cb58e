"""Values as a device holds them: leaves as arrays of strong dtypes, numbers, and integers of 64 bits.

While 64-bit types are off, JAX keeps the low bits of integers that 32 bits cannot hold, without an error: they are
refused here.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.trees import Array, is_array_or_number, is_key, keep_arrays, leaf_at, not_an_array, paths_of, quoted


def as_leaf(leaf: Any, path: str, *, copy: bool, argument: str) -> Array:
    """Convert a leaf of params, or of another argument, to an array with a strong dtype.

    Raises:
        TypeError: The leaf is neither an array nor a number, or is complex; names the path and what to do.
        OverflowError: The leaf has an integer that its dtype on a device cannot hold; names the path and the integer.
    """
    if not is_array_or_number(leaf):
        raise not_an_array(leaf, path, argument, keep_arrays(argument))
    _refuse_wide(leaf, path, argument)
    if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
        raise TypeError(
            f"{argument}: the leaf at {quoted(path)} is complex ({jnp.result_type(leaf)}); "
            "jstep trains real parameters: keep its real and imaginary parts as two leaves."
        )
    if is_key(leaf):
        return jnp.copy(leaf) if copy else leaf  # leaf.copy() fails where a program is traced
    # A weak type would become strong in the first step, and cause a second compilation.
    dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    return jnp.array(leaf, dtype=dtype, copy=True) if copy else jnp.asarray(leaf, dtype=dtype)


def host_leaf(leaf: Any, path: str, argument: str) -> Any:
    """As `as_leaf`, but arrays in host memory stay there, so that no device must hold the whole array."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
        _refuse_wide(leaf, path, argument)
        return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return as_leaf(leaf, path, copy=False, argument=argument)


def number(value: Any, what: str) -> np.ndarray[Any, Any]:
    """Return a Python number as an array of the dtype that JAX gives it.

    Args:
        value: The number.
        what: Its name, for the error.

    Raises:
        ValueError: The dtype cannot hold it.
    """
    try:
        return np.asarray(value, jax.dtypes.canonicalize_dtype(jnp.result_type(value)))
    except OverflowError:
        raise ValueError(
            f"{what} is {value:.3g}, which int32 cannot hold; pass an array of another dtype, or enable jax_enable_x64"
        ) from None


def refuse_wide(tree: Any, argument: str) -> None:
    """Refuse 64-bit integers in host memory that do not fit the dtype that they get on a device.

    Args:
        tree: The tree.
        argument: Its name, for the error.

    Raises:
        OverflowError: A leaf has such an integer; names its path and the first one.
    """
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        if isinstance(leaf, _OF_HOST) and first_wide(leaf) is not None:
            _refuse_wide(leaf, paths_of(tree)[i], argument)


def _refuse_wide(leaf: Any, path: str, argument: str) -> None:
    if isinstance(leaf, _OF_HOST) and (found := first_wide(leaf)) is not None:
        raise OverflowError(
            f"{argument}: {leaf_at(path)} must hold integers that fit {found[1].name} while 64-bit types are off, got "
            f"{found[0]}; map them to smaller integers on the host, such as ids % num_buckets, or set jax_enable_x64"
        )


def first_wide(leaf: Any) -> tuple[int, np.dtype[Any]] | None:
    """Return the first integer of a leaf that does not fit its dtype on a device, and that; None if all fit."""
    dtype = np.dtype(np.int64) if isinstance(leaf, int) else leaf.dtype
    if dtype.itemsize < 8 or dtype.kind not in "iu":
        return None
    # Not of the dtype itself, which may have another order of bytes.
    narrow = np.dtype(jax.dtypes.canonicalize_dtype(np.uint64 if dtype.kind == "u" else np.int64))
    values, limits = np.asarray(leaf), np.iinfo(narrow)
    if narrow.itemsize == 8 or not values.size or limits.min <= values.min() <= values.max() <= limits.max:
        return None
    return int(values[(values < limits.min) | (values > limits.max)][0]), narrow


_OF_HOST = (np.ndarray, np.generic, int)
