"""Values as a device holds them: leaves as arrays of strong dtypes, numbers and keys, some of which may be traced.

While 64-bit types are off, JAX keeps the low bits of integers that 32 bits cannot hold, without an error: they are
refused here.
"""

import contextvars
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.checks import Bounds, as_number, kind, shown
from jstep.core.exceptions import setting
from jstep.core.meshes import internal_transfers, on_host
from jstep.core.placement import NO_MESH


def as_leaf(leaf: Any, path: str, *, copy: bool, argument: str) -> trees.Array:
    """Convert a leaf of params, or of another argument, to an array with a strong dtype.

    Raises:
        TypeError: The leaf is neither an array nor a number, or is complex; names the path and what to do.
        OverflowError: The leaf has an integer that its dtype on a device cannot hold; names the path and the integer.
    """
    if not trees.is_array_or_number(leaf):
        raise trees.not_an_array(leaf, path, argument, trees.keep_arrays(argument))
    leaf = trees.native(leaf, path, argument)
    _refuse_wide(leaf, path, argument)
    if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
        raise TypeError(
            f"{argument}: the leaf at {trees.quoted(path)} is complex ({jnp.result_type(leaf)}); "
            "jstep trains real parameters: keep its real and imaginary parts as two leaves."
        )
    if trees.is_key(leaf):
        return jnp.copy(leaf) if copy else leaf  # leaf.copy() fails where a program is traced
    # A weak type would become strong in the first step, and cause a second compilation.
    dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    return jnp.array(leaf, dtype=dtype, copy=True) if copy else jnp.asarray(leaf, dtype=dtype)


def host_leaf(leaf: object, path: str, argument: str) -> Any:
    """As `as_leaf`, but arrays in host memory stay there, so that no device must hold the whole array."""
    leaf = trees.native(leaf, path, argument)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
        _refuse_wide(leaf, path, argument)
        return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return as_leaf(leaf, path, copy=False, argument=argument)


def number(value: object, what: str) -> np.ndarray[Any, Any]:
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


def from_host(tree: Tree, argument: str) -> Any:
    """Return a tree whose leaves in host memory a device can hold: arrays in the byte order of this machine.

    Args:
        tree: The tree.
        argument: Its name, for the error.

    Raises:
        TypeError: A leaf is a masked array; names its path.
        OverflowError: A leaf has an integer that does not fit the dtype that it gets on a device; names its path and
            the first one.
    """
    if all(map(_is_as_on_device, jax.tree.leaves(tree))):
        return tree

    def converted(keys: Any, leaf: Any) -> Any:
        leaf = trees.native(leaf, trees.path_str(keys), argument)
        _refuse_wide(leaf, trees.path_str(keys), argument)
        return leaf

    return jax.tree_util.tree_map_with_path(converted, tree)


def as_array(value: object, argument: str) -> jax.Array:
    """Return a value as a JAX array; `from_host` has the errors."""
    return jnp.asarray(from_host(value, argument))


def arguments_from_host(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """As `from_host`, for the arguments of a step, which are a batch."""
    batch = from_host(trees.batch_of(args), "batch")
    return (batch,) if len(args) == 1 else batch


def _is_as_on_device(leaf: object) -> bool:
    if isinstance(leaf, np.ndarray) and not (leaf.dtype.isnative and trees.is_array(leaf)):
        return False
    return not isinstance(leaf, _OF_HOST) or first_wide(leaf) is None


def _refuse_wide(leaf: object, path: str, argument: str) -> None:
    if isinstance(leaf, _OF_HOST) and (found := first_wide(leaf)) is not None:
        raise OverflowError(
            f"{argument}: {trees.leaf_at(path)} must hold integers that fit {found[1].name} while 64-bit types are "
            f"off, got {found[0]}; map them to smaller integers on the host, such as ids % num_buckets, or set "
            "jax_enable_x64"
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


# Arguments that may be traced: numbers, PRNG keys, and checks that wait for values.


def as_scalar(
    value: Any, argument: str, *, integer: bool = False, expected: str = "", meaning: str = "", **bounds: Unpack[Bounds]
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
    wanted = expected or ("an integer" if integer else "a number")
    plain, dtypes = (int, [jnp.integer]) if integer else (float, [jnp.integer, jnp.floating])
    if isinstance(value, bool | np.bool_) or not (isinstance(value, int | plain) or trees.is_array(value)):
        raise TypeError(f"{argument}={shown(value)}: must be {wanted}, got {kind(value)}{hint}")
    if np.ndim(value):
        raise ValueError(
            f"{argument}: must be a scalar, got shape {np.shape(value)}; map over several values with jax.vmap"
        )
    if trees.is_array(value) and not any(jnp.issubdtype(value.dtype, one) for one in dtypes):
        raise TypeError(f"{argument}={shown(value)}: must be {wanted}, got dtype {value.dtype}{hint}")
    on_mesh = on_host(value)
    with internal_transfers():
        known = trees.concrete(value) if on_mesh is None else on_mesh
    if known is None:
        return value
    number = as_number(known.item(), argument, expected=wanted, meaning=meaning, **bounds)
    if isinstance(value, jax.Array) and on_mesh is None:
        return value
    return int(known) if integer else number


def as_key(value: Any, argument: str) -> Any:
    """Validate a single PRNG key, typed (`jax.random.key`) or raw (`jax.random.PRNGKey`), traced or not.

    A key on a mesh, such as one created while a mesh was set, is copied off the mesh, so that it works with any state.

    Raises:
        TypeError: The value is not a key.
        ValueError: The value is an array of several keys.
    """
    dtype = getattr(value, "dtype", None)
    typed = trees.is_key(value)
    if not typed and not (dtype == np.uint32 and np.ndim(value) > 0):
        raise TypeError(f"{argument}={shown(value)}: must be a key, such as jax.random.key(0), got {kind(value)}")
    if np.ndim(value) != (0 if typed else 1):
        raise ValueError(f"{argument}: must be one key, got keys of shape {np.shape(value)}; select one of them")
    data = None if not isinstance(value, jax.Array) or trees.is_traced(value) else on_host(trees.key_data(value))
    if data is None:
        return value
    with internal_transfers(), jax.set_mesh(NO_MESH):
        array = jnp.asarray(data)
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(value)) if typed else array


Check: TypeAlias = Callable[..., None]
Waiting: TypeAlias = dict[tuple[str, Check, tuple[Hashable, ...]], None]
_WAITING: contextvars.ContextVar[Waiting | None] = contextvars.ContextVar("jstep_when_concrete", default=None)


def when_concrete(path: str, check: Check, *args: Hashable) -> None:
    """Defer `check(path, leaf, *args)` until the leaf of params at `path` is concrete; see `with_checks`.

    Parameters are still traced while slots are created by a compiled function.

    Args:
        path: The path among the state's parameters.
        check: A module-level function, so that equal checks of several traces run once.
        *args: Additional arguments of `check`.
    """
    waiting = _WAITING.get()
    if waiting is not None:
        waiting[path, check, args] = None


def with_checks(make: Callable[..., Any], *args: Any) -> Any:
    """Return the state `make(*args)` after the checks that `when_concrete` deferred; they skip traced parameters."""
    waiting = Waiting()
    with setting(_WAITING, waiting):
        state = make(*args)
    leaves = dict(trees.leaves_with_paths(state.params)) if waiting else {}
    with internal_transfers():
        for path, check, args in waiting:
            if path in leaves:
                check(path, leaves[path], *args)
    return state
