"""Conversion of values for devices: arrays with strong dtypes, numbers and keys.

While 64-bit types are off, JAX truncates integers that do not fit 32 bits: they are rejected here.
"""

import contextvars
import operator
from collections.abc import Callable, Iterable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jstep.core import trees
from jstep.core.checks import Bounds, as_number, describe_type, format_value
from jstep.core.exceptions import setting
from jstep.core.meshes import copy_to_host, internal_transfers
from jstep.core.new_arrays import copy_as, copy_of
from jstep.core.placement import NO_MESH


def as_leaf(leaf: Any, path: str, *, copy: bool, argument: str) -> trees.Array:
    """Convert a leaf to an array with a strong dtype, or reject it."""
    if not trees.is_array_or_number(leaf):
        raise trees.not_an_array(leaf, path, argument, trees.keep_arrays(argument))
    leaf = trees.native(leaf, path, argument)
    _refuse_wide(leaf, path, argument)
    if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
        raise TypeError(
            f"{argument}: the leaf at {trees.quote_path(path)} is complex "
            f"({jnp.result_type(leaf)}); jstep trains real parameters: keep its real and imaginary "
            "parts as two leaves."
        )
    if trees.is_key(leaf):
        return copy_of(leaf) if copy else leaf
    # A weak type would become strong in the first step, and cause a recompilation.
    dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    return copy_as(leaf, dtype) if copy else jnp.asarray(leaf, dtype=dtype)


def host_leaf(leaf: object, path: str, argument: str) -> Any:
    leaf = trees.native(leaf, path, argument)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
        _refuse_wide(leaf, path, argument)
        return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return as_leaf(leaf, path, copy=False, argument=argument)


def number(value: object, what: str) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(value, jax.dtypes.canonicalize_dtype(jnp.result_type(value)))
    except OverflowError:
        raise ValueError(
            f"{what} is {value:.3g}, which int32 cannot hold; pass an array of another dtype, or "
            "enable jax_enable_x64"
        ) from None


def prepare_for_device(tree: trees.Tree, argument: str) -> Any:
    """Convert host arrays to native byte order; reject what does not fit a device."""
    if are_plain(jax.tree.leaves(tree)):
        return tree
    tree = trees.all_native(tree, argument)
    for path, leaf in trees.leaves_with_paths(tree):
        _refuse_wide(leaf, path, argument)
    return tree


def as_array(value: object, argument: str) -> jax.Array:
    return jnp.asarray(prepare_for_device(value, argument))


def prepare_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if are_plain(jax.tree.leaves(args)):
        return args
    batch = prepare_for_device(trees.args_to_batch(args), "batch")
    return (batch,) if len(args) == 1 else batch


_NEVER_CONVERTED: set[type] = set()
"""The types of device arrays seen so far: `isinstance` takes a microsecond."""
# The bits that any of the integers has, in a third of the time of their minimum and maximum.
_any_bits = np.bitwise_or.reduce


def are_plain(leaves: Iterable[Any]) -> bool:
    """Whether no leaf needs a conversion for a device. It runs at each step."""
    for leaf in leaves:
        kind = type(leaf)
        if kind in _NEVER_CONVERTED:
            continue
        if kind is np.ndarray:
            dtype = leaf.dtype
            is_number = dtype.isnative and dtype.kind in "biufc"
            is_wide = (
                dtype.itemsize == 8
                and dtype.kind in "iu"
                and not 0 <= _any_bits(leaf, axis=None) < 2**31
            )
        elif issubclass(kind, jax.Array):  # not a tracer, whose instances may be something else
            _NEVER_CONVERTED.add(kind)
            continue
        else:
            is_number = isinstance(leaf, jax.Array | float | int)
            is_wide = isinstance(leaf, int)
        if not is_number or (is_wide and first_wide(leaf) is not None):
            return False
    return True


_type_of_array = operator.attrgetter("aval")


def flat_batch_types(batch: Any) -> Any:
    """Return a key of the types of a batch of device arrays: one, or a plain tuple or dict of them.

    None for any other batch. It runs at each step, and takes a third of the time of
    flattening, comparing and rebuilding the batch.
    """
    kind = type(batch)
    names = None
    leaves: Iterable[Any] = (batch,)
    if kind is tuple:
        leaves = batch
    elif kind is dict:
        names = list(batch)
        leaves = batch.values()
    try:
        return kind, names, list(map(_type_of_array, leaves))
    except AttributeError:
        return None


def _refuse_wide(leaf: object, path: str, argument: str) -> None:
    if not isinstance(leaf, np.ndarray | np.generic | int):
        return
    wide = first_wide(leaf)
    if wide is None:
        return
    value, dtype = wide
    raise OverflowError(
        f"{argument}: {trees.leaf_at(path)} must hold integers that fit {dtype.name} while 64-bit "
        f"types are off, got {value}; map them to smaller ones on the host, see docs: "
        "help/errors#integers"
    )


def first_wide(leaf: Any) -> tuple[int, np.dtype[Any]] | None:
    """Return the first integer that JAX would truncate and the dtype it does not fit, or None."""
    dtype = np.dtype(np.int64) if isinstance(leaf, int) else leaf.dtype
    if dtype.itemsize < 8 or dtype.kind not in "iu":
        return None
    # Not from the dtype itself, whose byte order may differ.
    narrow = np.dtype(jax.dtypes.canonicalize_dtype(np.uint64 if dtype.kind == "u" else np.int64))
    values = np.asarray(leaf)
    if narrow.itemsize == 8 or not values.size:
        return None
    limits = np.iinfo(narrow)
    low = int(limits.min)
    high = int(limits.max)
    if low <= values.min() and values.max() <= high:
        return None
    return int(values[(values < low) | (values > high)][0]), narrow


# Arguments that may be traced: numbers, PRNG keys, and checks deferred until values are concrete.


def as_scalar(
    value: Any,
    argument: str,
    *,
    integer: bool = False,
    expected: str = "",
    meaning: str = "",
    **bounds: Unpack[Bounds],
) -> Any:
    """Check a number or scalar array, and its range if it is concrete."""
    hint = f"; {meaning}" if meaning else ""
    wanted = expected or ("an integer" if integer else "a number")
    types: Any = int if integer else int | float
    dtypes = [jnp.integer] if integer else [jnp.integer, jnp.floating]
    is_numeric_array = trees.is_array(value) and any(
        jnp.issubdtype(value.dtype, dtype) for dtype in dtypes
    )
    if isinstance(value, bool) or not (is_numeric_array or isinstance(value, types)):
        raise TypeError(
            f"{argument}={format_value(value)}: must be {wanted}, got {describe_type(value)}{hint}"
        )
    if np.ndim(value):
        remedy = "map over several values with jax.vmap"
        raise ValueError(f"{argument}: must be a scalar, got shape {np.shape(value)}; {remedy}")
    concrete = copy_to_host(value)
    is_on_mesh = concrete is not None
    if not is_on_mesh:
        with internal_transfers():
            concrete = trees.concrete(value)
    if concrete is None:
        return value
    number = as_number(concrete.item(), argument, expected=wanted, meaning=meaning, **bounds)
    # An array on a mesh becomes a number, which fits arrays anywhere.
    if isinstance(value, jax.Array) and not is_on_mesh:
        return value
    return int(concrete) if integer else number


def floating_dtype(dtype: DTypeLike, argument: str, min_bytes: int = 1) -> Any:
    try:
        result = None if dtype is None else np.dtype(dtype)  # `np.dtype(None)` is float64
    except TypeError:
        result = None
    if result is None or not trees.is_floating(result) or result.itemsize < min_bytes:
        size = f" of at least {8 * min_bytes} bits" if min_bytes > 1 else ""
        raise TypeError(
            f"{argument}={format_value(dtype)}: must be a floating dtype{size}, such as jnp.float32"
        )
    return result


def as_key(value: Any, argument: str) -> Any:
    """Validate one PRNG key, typed or raw; one on a mesh is copied off it."""
    if type(value).__module__.startswith("flax."):  # an nnx.Rngs; its own attributes are streams
        raise TypeError(
            f"{argument}: must be one key, such as jax.random.key(0), got flax's "
            f"{type(value).__name__}; rngs.params() draws one, from which jstep makes the key of "
            "each step"
        )
    dtype = getattr(value, "dtype", None)
    is_typed = trees.is_key(value)
    if not is_typed and not (dtype == np.uint32 and np.ndim(value) > 0):
        must_be = "must be one key, such as jax.random.key(0)"
        raise TypeError(f"{argument}={format_value(value)}: {must_be}, got {describe_type(value)}")
    # A raw key is an array of its words.
    if np.ndim(value) != (0 if is_typed else 1):
        raise ValueError(
            f"{argument}: must be one key, got keys of shape {np.shape(value)}; select one of them"
        )
    if not isinstance(value, jax.Array) or trees.is_traced(value):
        return value
    data = copy_to_host(trees.key_data(value))
    if data is None:
        return value
    with internal_transfers(), jax.set_mesh(NO_MESH):
        array = jnp.asarray(data)
        if not is_typed:
            return array
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(value))


_DEFERRED: contextvars.ContextVar[list[tuple[Any, ...]] | None] = contextvars.ContextVar(
    "jstep_deferred", default=None
)
"""The checks that wait for the values of a state; None if nobody will run them."""


def when_concrete(path: str, check: Callable[..., None], *args: object) -> None:
    """Defer `check(path, leaf, *args)` while a compiled function creates slots from tracers."""
    deferred = _DEFERRED.get()
    if deferred is not None:
        deferred.append((path, check, args))


def make_and_check(make: Callable[..., Any], *args: Any) -> Any:
    """Return the state `make(*args)`, after the checks that waited for its values."""
    deferred: list[tuple[Any, ...]] = []
    with setting(_DEFERRED, deferred):
        state = make(*args)
    leaves = dict(trees.leaves_with_paths(state.params)) if deferred else {}
    with internal_transfers():
        for path, check, args in deferred:
            if path in leaves:
                check(path, leaves[path], *args)
    return state
