"""Scalar summaries, and the fraction of zeros in an array."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.checks import kind, shown
from jstep.core.contexts import internal_transfers
from jstep.core.trees import is_array, is_traced
from jstep.core.types import Array
from jstep.summary.collected import DEFAULT, register
from jstep.summary.values import Scalars, Summary, check_tag, keep


def scalar(tags: Any, values: Any, collections: Sequence[str] | None = DEFAULT) -> Summary:
    """Return a summary of one number, or of an array of numbers with one tag each.

    An eager call with an array on the device does not wait for it: the value is copied there and read when the summary
    is written.

    Args:
        tags: A string, or a list or array of strings.
        values: A real number, or an array or list of numbers with the shape of `tags`.
        collections: The collections to add the summary to; None for the default one, () for none.

    Returns:
        A `Summary`, a pytree whose tags are static.

    Raises:
        ValueError: The shapes differ, or a tag is empty or given twice.
        TypeError: A tag is not a string, or a value is not a real number.

    Example:
        >>> import jstep.summary
        >>> jstep.summary.scalar("loss", 0.25)
        Summary('loss')
        >>> jstep.summary.scalar(["accuracy/train", "accuracy/test"], [0.9, 0.8])
        Summary('accuracy/train', 'accuracy/test')

    Source: TensorFlow's `scalar_summary`.
    """
    if type(tags) is str and tags and type(values) is float:
        part = Scalars((tags,), 0, values)
        register(part, collections)
        return Summary((part,))
    parts = (_one(tags, values),) if isinstance(tags, str) else _many(tags, values)
    for part in parts:
        register(part, collections)
    return Summary(parts)


def _one(tag: str, value: Any) -> Scalars:
    check_tag(tag, "scalar")
    value = _number(value, tag, ())
    if isinstance(value, jax.Array):
        return Scalars((tag,), 0, value)
    try:
        return Scalars((tag,), 0, float(value))
    except OverflowError as error:
        raise ValueError(f"scalar {tag!r}: {error}") from error


def _many(tags: Any, values: Any) -> tuple[Scalars, ...]:
    if not isinstance(tags, list | tuple | np.ndarray):
        raise TypeError(
            f"scalar(tags, values): tags must be a str, or a list or array of them, not {type(tags).__name__} {tags!r}"
        )
    try:
        names = np.asarray(tags, dtype=object)
        flat = tuple(check_tag(tag, "scalar") for tag in names.ravel().tolist())
    except (ValueError, TypeError) as error:
        raise type(error)(f"scalar: tags {tags!r}: {error}") from error
    for i, tag in enumerate(flat):
        if tag in flat[:i]:
            raise ValueError(f"scalar: duplicate tag {tag!r} in {tags!r}")
    if is_array(values):
        return (Scalars(flat, names.ndim, _number(values, flat[0] if flat else "", names.shape)),) if flat else ()
    # A list may hold arrays, traced ones included. They are kept separate, to wait for none of them.
    is_list = isinstance(values, list | tuple)
    entries = jax.tree.leaves(values, is_leaf=lambda x: not isinstance(x, list | tuple)) if is_list else []
    if not is_list or _nesting(values) != names.shape or len(entries) != len(flat):
        raise _shape_error(flat[0] if flat else "", names.shape, _nesting(values) if is_list else np.shape(values))
    return tuple(_one(tag, x) for tag, x in zip(flat, entries, strict=True))


def _nesting(values: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = ()
    while isinstance(values, list | tuple):
        shape = (*shape, len(values))
        values = values[0] if values else None
    return shape


def _number(value: Any, tag: str, shape: tuple[int, ...]) -> Any:
    if is_array(value):
        is_real = getattr(value.dtype, "kind", "V") in "fiub" or jnp.issubdtype(value.dtype, jnp.floating)
        if not is_real:
            raise TypeError(f"scalar {tag!r}: values must be real numbers, not {value.dtype}")
        given = value.shape
    elif isinstance(value, bool | int | float):
        given = ()
    else:
        if isinstance(value, list | tuple):
            raise _shape_error(tag, shape, np.shape(value))
        raise TypeError(f"scalar {tag!r}: values must be real numbers, not {type(value).__name__} {value!r}")
    if given != shape:
        raise _shape_error(tag, shape, given)
    return keep(value)


def _shape_error(tag: str, tags: tuple[int, ...], values: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"scalar {tag!r}: tags and values not the same shape: {list(tags)} != {list(values)}. "
        "Give one tag for each value, or reduce the values (jnp.mean) to one number."
    )


def zero_fraction(value: Any) -> Array:
    """Return the fraction of zeros in an array (its sparsity).

    zero_fraction(x) = (number of i with x_i = 0) / (number of elements), NaN for an empty array, as in
    TensorFlow.

    Args:
        value: Any array or number.

    Returns:
        A float32 scalar.

    Raises:
        TypeError: `value` is not an array of numbers.

    Example:
        >>> import jax, jax.numpy as jnp, jstep.summary
        >>> print(jstep.summary.zero_fraction(jax.nn.relu(jnp.array([-1.0, -2.0, 0.0, 3.0]))))
        0.75

    Source: TensorFlow's `tf.nn.zero_fraction`. Zeros are counted as integers, so the count is exact.
    """
    if not is_traced(value) and not isinstance(value, jax.Array):
        value = _as_numbers(value)
    with internal_transfers():
        value = jnp.asarray(value)
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise TypeError(f"value={shown(value)}: must be an array of numbers, got {kind(value)}")
        zeros = jnp.sum(value == jnp.zeros((), value.dtype), dtype=jnp.int32).astype(jnp.float32)
        return zeros / jnp.float32(value.size)


def _as_numbers(value: Any) -> Any:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise TypeError(f"value={shown(value)}: must be an array of numbers, got {kind(value)}: {error}") from None
    if array.dtype.kind in "OSUMm":
        raise TypeError(f"value={shown(value)}: must be an array of numbers, got {kind(value)}")
    return value
