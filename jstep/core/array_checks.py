"""Validation of arguments that may be arrays, concrete or traced: numbers and PRNG keys."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import Bounds, kind, out_of_range, shown
from jstep.core.contexts import internal_transfers
from jstep.core.meshes import on_host


def as_scalar(
    value: Any,
    argument: str,
    *,
    integer: bool = False,
    expected: str = "",
    meaning: str = "",
    **bounds: Unpack[Bounds],
) -> Any:
    """Check a number or a scalar array, which may be traced; its range is checked if it is concrete.

    Args:
        value: The user's value.
        argument: The name of the argument, for the error.
        integer: Whether it must be an integer.
        expected: What the value must be, for the error; "a number" or "an integer" by default.
        meaning: What to do, for the error.
        **bounds: The valid range.

    Returns:
        A float (or int) for a Python or NumPy number, and for an array on a mesh, so that it can be used on any other;
        any other JAX array as it is.

    Raises:
        TypeError: The value is not a real number, or not an integer; names the argument.
        ValueError: The value is not a scalar, or out of range.
    """
    hint = f"; {meaning}" if meaning else ""
    wanted = f"must be {expected or ('an integer' if integer else 'a number')}"
    plain, dtypes = (int, [jnp.integer]) if integer else (float, [jnp.integer, jnp.floating])
    if isinstance(value, bool | np.bool_) or not (isinstance(value, int | plain) or trees.is_array(value)):
        raise TypeError(f"{argument}={shown(value)}: {wanted}, got {kind(value)}{hint}")
    if np.ndim(value):
        raise ValueError(
            f"{argument}: must be a scalar, got shape {np.shape(value)}; map over several values with jax.vmap"
        )
    if trees.is_array(value) and not any(jnp.issubdtype(value.dtype, one) for one in dtypes):
        raise TypeError(f"{argument}={shown(value)}: {wanted}, got dtype {value.dtype}{hint}")
    on_mesh = on_host(value)
    with internal_transfers():
        known = trees.concrete(value) if on_mesh is None else on_mesh
    if known is None:
        return value
    try:
        number = plain(known)
    except OverflowError:
        raise ValueError(f"{argument}={shown(value)}: {wanted} that fits in a float{hint}") from None
    problem = out_of_range(number, **bounds)
    if problem:
        raise ValueError(f"{argument}={known.item()}: {problem}{hint}")
    return value if isinstance(value, jax.Array) and on_mesh is None else number
