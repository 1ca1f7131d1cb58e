"""Tree utilities: paths, leaves, stacks of trees, and errors that name leaves.

The path of a leaf is its keys joined by `/`, the same in predicates, slots, checkpoints and summaries.
"""

import difflib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.checks import kind, shown
from jstep.core.types import Array


def path_str(keys: Sequence[Any]) -> str:
    """Convert JAX's key path to the path of a leaf: `dense/kernel`, `layers/0/w`."""
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


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


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """`jax.tree.flatten`, with a treedef of type Any for type checkers."""
    return jax.tree.flatten(tree)


def structure(tree: Any) -> Any:
    """`jax.tree.structure`, with a treedef of type Any."""
    return jax.tree.structure(tree)


def quoted(path: str) -> str:
    """Format a path for error messages; it is empty if the tree is a single leaf."""
    return repr(path) if path else "the tree itself (a single leaf)"


def leaf_at(path: str) -> str:
    """Name a leaf by its path; a tree that is a single leaf is "the array"."""
    return f"the leaf at {path!r}" if path else "the array"


def leaves_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """Return all leaves with their paths, in JAX's order; None is not a leaf."""
    return [(path_str(keys), leaf) for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def paths_of(tree: Any) -> list[str]:
    """Return the paths of all leaves, in JAX's order."""
    return [path for path, _ in leaves_with_paths(tree)]


def is_plain_tuple(x: Any) -> bool:
    """Whether a value is a tuple without names: a NamedTuple is one object with fields."""
    return isinstance(x, tuple) and not hasattr(x, "_fields")


def arguments_of(batch: Any) -> tuple[Any, ...]:
    """Return the arguments that a batch stands for: those of a plain tuple, otherwise the batch alone."""
    return batch if is_plain_tuple(batch) else (batch,)


def is_none(x: Any) -> bool:
    """Whether a gradient is empty: None, or the float0 that JAX returns for integer inputs."""
    return x is None or (isinstance(x, np.ndarray) and x.dtype == jax.dtypes.float0)


def is_trainable(leaf: Any) -> bool:
    """Whether an array can be trained: real floating point of any width."""
    return is_floating(leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf))


@functools.cache
def is_floating(dtype: Any) -> bool:
    """Whether a dtype is real floating point; cached, because it is called for every leaf."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def is_array(x: Any) -> bool:
    """Whether x is an array, traced or not (a NumPy scalar is one)."""
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def is_array_or_number(x: Any) -> bool:
    """Whether x is an array, traced or not, or a Python number, so that it can be a leaf of a compiled program."""
    return is_array(x) or isinstance(x, bool | int | float | complex)


def is_key(x: Any) -> bool:
    """Whether x is an array of typed PRNG keys, traced or not, or the shape of one."""
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct) and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def key_data(leaf: Any) -> Any:
    """Return the data of typed PRNG keys, and any other leaf unchanged."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def is_function(x: Any) -> bool:
    """Whether x is a function; a model that is a tree of arrays is not one, even if it has a `__call__`."""
    return callable(x) and (isinstance(x, jax.tree_util.Partial) or jax.tree_util.all_leaves([x]))


def is_traced(x: Any) -> bool:
    """Whether x has no concrete value yet."""
    return isinstance(x, jax.core.Tracer)


def donated_leaf(tree: Any) -> str | None:
    """Return the path of the first donated leaf; None if no leaf is donated."""
    for path, leaf in leaves_with_paths(tree):
        if isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.is_deleted():
            return path
    return None


def concrete(x: Any) -> np.ndarray[Any, Any] | None:
    """Return the value of x on the host, or None if it is traced or on other hosts."""
    if is_traced(x) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    return np.asarray(x)


@functools.cache
def compute_dtype(dtype: Any) -> Any:
    """Return the dtype for arithmetic on a leaf: its own, or float32 if that is wider."""
    return dtype if np.dtype(dtype).itemsize > 4 else np.dtype(np.float32)


def with_leaves(leaves: Sequence[Any], indices: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Return the leaves with the values at some indices replaced."""
    changed = list(leaves)
    for place, value in zip(indices, values, strict=True):
        changed[place] = value
    return changed


def default_float() -> Any:
    """Return float32, or float64 under `jax_enable_x64`."""
    return jax.dtypes.canonicalize_dtype(np.float64)


def default_int() -> Any:
    """Return the dtype of steps: int32, or int64 under `jax_enable_x64`."""
    return jax.dtypes.canonicalize_dtype(np.int64)


def nearest(name: str, names: Iterable[str]) -> str:
    """Format a hint for a misspelled name: 'nearest: …', all names if there are few, or an empty string."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if not close and len(names) <= 6:
        close = names
    return f"; nearest: {', '.join(map(repr, close))}" if close else ""


def as_leaf(leaf: Any, path: str, *, copy: bool, argument: str = "params") -> Array:
    """Convert a leaf of params, or of another argument, to an array with a strong dtype.

    Raises:
        TypeError: The leaf is neither an array nor a number, or is complex; names the path and what to do.
    """
    if not is_array_or_number(leaf) or (isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "biufcV"):
        raise TypeError(
            f"{argument}: the leaf at {quoted(path)} is {type(leaf).__name__} {shown(leaf, 60)}, which is not an "
            f"array or number. Keep only arrays in {argument} and close over the rest, for instance: "
            "`arrays, static = equinox.partition(model, equinox.is_array)` or `flax.nnx.split(model)`."
        )
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


def host_leaf(keys: Any, leaf: Any) -> Any:
    """As `as_leaf`, but arrays in host memory stay there, so that no device must hold the whole array."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
        return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return as_leaf(leaf, path_str(keys), copy=False)


def is_like(params: Any, tree: Any) -> bool:
    """Whether a tree has the structure of params; leaves may be None."""
    try:
        flatten_like(params, tree, "tree")
    except ValueError:
        return False
    return True


def flatten_like(params: Any, tree: Any, what: str, *, is_leaf: Any = None, may_leave_out: bool = True) -> list[Any]:
    """Return the subtrees of `tree` at the leaves of `params`: arrays, `is_leaf` nodes or None.

    Args:
        params: The tree with the reference structure.
        tree: The tree to flatten; leaves may be None.
        what: The name of `tree`, for the error.
        is_leaf: Which nodes of `tree`, other than arrays, count as leaves.
        may_leave_out: Whether the caller accepts None at a leaf, for the error.

    Raises:
        ValueError: The structures differ; names the paths that differ.
    """
    treedef = structure(params)
    remedy = f"Give {what} the structure of params{', with None for a leaf to leave out' if may_leave_out else ''}."
    try:
        found = treedef.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{_mismatch(params, tree, what, is_leaf)}. {remedy}") from error
    for i, sub in enumerate(found):
        if not (sub is None or is_array(sub) or (is_leaf and is_leaf(sub)) or jax.tree_util.all_leaves([sub])):
            raise ValueError(
                f"{what}: at {quoted(paths_of(params)[i])}: must be an array, as in params, got a {type(sub).__name__} "
                f"with {len(jax.tree.leaves(sub))} leaves. {remedy}"
            )
    return found


def _mismatch(params: Any, tree: Any, what: str, is_leaf: Any) -> str:
    def leaf(x: Any) -> bool:
        return x is None or bool(is_leaf and is_leaf(x))

    def paths(t: Any) -> list[str]:
        return [path_str(k) for k, _ in jax.tree_util.tree_leaves_with_path(t, is_leaf=leaf)]

    want, have = paths(params), paths(tree)
    missing = [p for p in want if p not in set(have)]
    extra = [p for p in have if p not in set(want)]
    lines = [f"{what} does not have the structure of params"]
    if have == [""]:
        lines.append(f"got {kind(tree)}")
        extra = []
    if missing:
        lines.append("missing: " + ", ".join(map(repr, missing[:20])))
    if extra:
        lines.append("extra: " + ", ".join(map(repr, extra[:20])))
    if not missing and not extra:
        lines.append(f"same paths, other containers: {type(params).__name__} and {type(tree).__name__}, or ")
        lines[-1] += f"{structure(tree)} instead of {structure(params)}"
    for i, part in enumerate(tree if isinstance(tree, tuple) else ()):
        if paths(part) == want:  # (loss, gradients), (gradients, norm)
            lines.append(f"element {i} of this tuple has it: unpack the tuple")
    return "; ".join(lines)


def stack_trees(trees: Sequence[Any], what: str) -> Any:
    """Stack trees leaf by leaf on a new leading axis.

    Leaves become NumPy arrays; JAX arrays are stacked on their device.

    Args:
        trees: At least one tree; all must have the same structure, shapes and dtypes.
        what: The name of the caller, for the error.

    Raises:
        ValueError: Structures, shapes or dtypes differ; names the path and the two elements.
    """
    flat, treedef = flatten(trees[0])
    columns: list[list[Any]] = [[leaf] for leaf in flat]
    for i, tree in enumerate(trees[1:], 1):
        leaves, other = flatten(tree)
        if other != treedef:
            raise ValueError(
                f"{what}: element {i} has the structure {other}, element 0 has {treedef}. Elements must "
                "match to be stacked; dequeue or index them individually otherwise."
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    keys = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(trees[0])]
    return treedef.unflatten(
        [_stack_leaves(column, path_str(k), what) for column, k in zip(columns, keys, strict=True)]
    )


def no_rows(tree: Any) -> Any:
    """Return what `stack_trees` would return for no elements like `tree`, with shapes in place of JAX arrays."""

    def leaf_of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct((0, *leaf.shape), leaf.dtype)
        array = np.asarray(leaf)
        return np.empty((0, *array.shape), array.dtype)

    return jax.tree.map(leaf_of, tree)


def rows_of(tree: Any, what: str) -> list[Any]:
    """Return the rows of stacked trees, the inverse of `stack_trees`: copies, so that the arrays can be reused.

    Args:
        tree: A tree of arrays whose leading axes have the same size.
        what: The name of the tree, for the error.

    Raises:
        ValueError: A leaf has no leading axis, sizes differ, or there is no leaf; names the paths.
    """
    leaves, treedef = flatten(tree)
    arrays = [leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in leaves]
    sizes: dict[int, str] = {}
    for path, array in zip(paths_of(tree), arrays, strict=True):
        if not array.ndim:
            raise ValueError(
                f"{what}: {leaf_at(path)} has shape (): must have a leading axis, of the elements; stack them, for "
                "example with np.stack"
            )
        sizes.setdefault(array.shape[0], path)
    if len(sizes) != 1:
        each = ", ".join(f"{size} at {quoted(path)}" for size, path in sizes.items())
        found = f"leaves have leading axes of different sizes ({each})" if each else "the tree has no leaf"
        raise ValueError(f"{what}: {found}: must have arrays with a leading axis of one size, the number of elements")
    return [treedef.unflatten(row) for row in zip(*map(_rows, arrays), strict=True)]


def _rows(array: Any) -> list[Any]:
    """Return copies of the rows: a view would keep the whole array alive, and follow its changes."""
    return list(array) if isinstance(array, jax.Array) or array.ndim == 1 else [row.copy() for row in array]


def _stack_leaves(leaves: list[Any], path: str, what: str) -> Any:
    if all(isinstance(leaf, jax.Array) for leaf in leaves):
        _check_same(leaves, path, what)
        return jnp.stack(leaves)  # without blocking on the device
    arrays = [np.asarray(leaf) for leaf in leaves]
    first = arrays[0]
    if not all(a.dtype == first.dtype and a.shape == first.shape for a in arrays):
        _check_same(arrays, path, what)
        return np.stack(arrays)  # strings of different lengths
    if first.ndim == 0:
        return np.array(leaves, dtype=first.dtype)
    batch = np.empty((len(arrays), *first.shape), first.dtype)
    for i, array in enumerate(arrays):
        batch[i] = array
    return batch


def _check_same(arrays: Sequence[Any], path: str, what: str) -> None:
    def check(name: str, of: Callable[[Any], Any]) -> None:
        for i, array in enumerate(arrays):
            if of(array) != of(arrays[0]):
                raise ValueError(
                    f"{what}: {name}s differ at {quoted(path)}: {of(arrays[0])} in element 0, {of(array)} in "
                    f"element {i}. Elements must match to be stacked: pad, crop or cast them before."
                )

    check("shape", lambda a: a.shape)
    # Strings may have different lengths; the dtypes of PRNG keys have no kind.
    check("dtype", lambda a: a.dtype.kind if getattr(a.dtype, "kind", "V") in "SU" else a.dtype)
