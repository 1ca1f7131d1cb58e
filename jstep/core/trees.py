"""Walking trees: paths, leaves, and the errors that name them.

The path of a leaf is its keys joined by `/`, the same in predicates, slots, checkpoints and summaries.
"""

import difflib
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.types import Array


def path_str(keys: Sequence[Any]) -> str:
    """The path of a leaf from JAX's key path: `dense/kernel`, `layers/0/w`."""
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """`jax.tree.flatten`, whose treedef has no type that checkers know."""
    return jax.tree.flatten(tree)


def structure(tree: Any) -> Any:
    """`jax.tree.structure`, likewise."""
    return jax.tree.structure(tree)


def quoted(path: str) -> str:
    """A path as error messages show it; the root of a tree that is one bare leaf has no keys."""
    return repr(path) if path else "the tree itself (a single leaf)"


def leaves_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """All leaves with their paths, in JAX's order; None is no leaf."""
    return [(path_str(keys), leaf) for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def paths_of(tree: Any) -> list[str]:
    """The paths of all leaves, in JAX's order."""
    return [path for path, _ in leaves_with_paths(tree)]


def is_none(x: Any) -> bool:
    """Whether a subtree stands for nothing: None, or the float0 that JAX gives integer inputs."""
    return x is None or (isinstance(x, np.ndarray) and x.dtype == jax.dtypes.float0)


def is_trainable(leaf: Any) -> bool:
    """Whether an array can be trained: real floating point of any width."""
    return is_floating(leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf))


@functools.cache
def is_floating(dtype: Any) -> bool:
    """Whether a dtype is real floating point; remembered, since every leaf asks."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def is_array(x: Any) -> bool:
    """Whether x is an array, traced or not (a NumPy scalar is one)."""
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def is_function(x: Any) -> bool:
    """Whether x is to be called: a model that is a tree of arrays may have a `__call__` and is no function."""
    return callable(x) and (isinstance(x, jax.tree_util.Partial) or jax.tree_util.all_leaves([x]))


def is_traced(x: Any) -> bool:
    """Whether x has no concrete value yet."""
    return isinstance(x, jax.core.Tracer)


def donated_leaf(tree: Any) -> str | None:
    """The path of the first leaf whose memory a compiled step has taken over; None where all are there."""
    for path, leaf in leaves_with_paths(tree):
        if isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.is_deleted():
            return path
    return None


def concrete(x: Any) -> np.ndarray[Any, Any] | None:
    """The value of x on the host, or None where it is traced or lies on other hosts."""
    if is_traced(x) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    return np.asarray(x)


@functools.cache
def compute_dtype(dtype: Any) -> Any:
    """The dtype arithmetic on a leaf is done in: its own, and float32 at least."""
    return dtype if np.dtype(dtype).itemsize > 4 else np.dtype(np.float32)


def with_leaves(leaves: Sequence[Any], indices: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """The leaves, with others at some places."""
    changed = list(leaves)
    for place, value in zip(indices, values, strict=True):
        changed[place] = value
    return changed


def default_float() -> Any:
    """float32, or float64 under `jax_enable_x64`."""
    return jax.dtypes.canonicalize_dtype(np.float64)


def default_int() -> Any:
    """int32, or int64 under `jax_enable_x64`: the dtype of steps."""
    return jax.dtypes.canonicalize_dtype(np.int64)


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint of what may have been meant: 'nearest: …', or all names where few, or nothing."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if not close and len(names) <= 6:
        close = names
    return f"; nearest: {', '.join(map(repr, close))}" if close else ""


def as_leaf(leaf: Any, path: str, *, copy: bool) -> Array:
    """A leaf of params as an array with a dtype of its own.

    Raises:
        TypeError: The leaf is no array and no number, or is complex; names the path and the way out.
    """
    if not (is_array(leaf) or isinstance(leaf, bool | int | float | complex)) or (
        isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "biufcV"
    ):
        raise TypeError(
            f"params: the leaf at {quoted(path)} is {type(leaf).__name__} {_short(leaf)}, which is no array "
            "or number. Keep only arrays in params and close over the rest, for instance: "
            "`arrays, static = equinox.partition(model, equinox.is_array)` or `flax.nnx.split(model)`."
        )
    if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
        raise TypeError(
            f"params: the leaf at {quoted(path)} is complex ({jnp.result_type(leaf)}); "
            "jstep trains real parameters: keep its real and imaginary parts as two leaves."
        )
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.copy() if copy and not is_traced(leaf) else leaf
    # A weak type would become strong in the first step and compile it a second time.
    dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))
    return jnp.array(leaf, dtype=dtype, copy=True) if copy else jnp.asarray(leaf, dtype=dtype)


def host_leaf(keys: Any, leaf: Any) -> Any:
    """As `as_leaf`, but what is in host memory stays there: no device need hold the whole of it."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
        return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return as_leaf(leaf, path_str(keys), copy=False)


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 60 else text[:57] + "..."


def is_like(params: Any, tree: Any) -> bool:
    """Whether a tree has the structure of params; None may stand in the place of a leaf."""
    try:
        flatten_like(params, tree, "tree")
    except ValueError:
        return False
    return True


def flatten_like(params: Any, tree: Any, what: str, *, is_leaf: Any = None) -> list[Any]:
    """The subtrees of `tree` at the leaves of `params`: arrays, `is_leaf` nodes or None.

    Args:
        params: The tree whose structure counts.
        tree: The tree to take apart; None may stand in the place of a leaf.
        what: What `tree` is, for the error.
        is_leaf: Which nodes of `tree`, besides arrays, may stand for a leaf.

    Raises:
        ValueError: The structures differ; the message names the paths that do.
    """
    treedef = structure(params)
    try:
        found = treedef.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise ValueError(_mismatch(params, tree, what, is_leaf)) from error
    for i, sub in enumerate(found):
        if not (sub is None or is_array(sub) or (is_leaf and is_leaf(sub)) or jax.tree_util.all_leaves([sub])):
            raise ValueError(
                f"{what}: at {quoted(paths_of(params)[i])}, where params has an array, stands a {type(sub).__name__} "
                f"with {len(jax.tree.leaves(sub))} leaves. Give {what} the structure of params, "
                "with None for a leaf to leave out."
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
    if missing:
        lines.append("missing: " + ", ".join(map(repr, missing[:20])))
    if extra:
        lines.append("extra: " + ", ".join(map(repr, extra[:20])))
    if not missing and not extra:
        lines.append(f"same paths, other containers: {type(params).__name__} and {type(tree).__name__}, or ")
        lines[-1] += f"{structure(tree)} instead of {structure(params)}"
    return "; ".join(lines) + f". Give {what} the structure of params, with None for a leaf to leave out."
