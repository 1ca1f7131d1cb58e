"""Lookup of leaves by path or glob."""

import fnmatch
from typing import Any

import jax
from jax.tree_util import GetAttrKey

from jstep.core import trees

_BOXED = GetAttrKey("value")


def names_of(tree: Any) -> list[tuple[str, ...]]:
    """Return the names of each leaf: its path, and for a boxed variable (Flax NNX) also the path of the box.

    The leaf `fc/kernel/value`, the attribute `value` of a variable, can also be looked up as `fc/kernel`.
    """
    found: list[tuple[str, ...]] = []
    for keys, _ in jax.tree_util.tree_leaves_with_path(tree):
        boxed = len(keys) > 1 and keys[-1] == _BOXED
        found.append((trees.path_str(keys), trees.path_str(keys[:-1])) if boxed else (trees.path_str(keys),))
    return found


def matches(names: tuple[str, ...], entry: str) -> bool:
    """Whether a path or glob matches a leaf with these names."""
    return any(name == entry or fnmatch.fnmatchcase(name, entry) for name in names)


def index_of(tree: Any, path: str, what: str) -> int | None:
    """Return the index of the leaf at a path among the leaves of a tree; None if there is no such leaf.

    Args:
        tree: Any tree.
        path: The full path of a leaf, or of its box.
        what: The name of the caller, for the error.

    Raises:
        ValueError: Several leaves share the path.
    """
    everything = names_of(tree)
    for depth in (0, 1):
        indices = [i for i, names in enumerate(everything) if len(names) > depth and names[depth] == path]
        if len(indices) > 1:
            raise ValueError(ambiguous(what, path, len(indices)))
        if indices:
            return indices[0]
    return None


def ambiguous(what: str, path: str, leaves: int) -> str:
    """Format the error message for a path that several leaves share."""
    return (
        f"{what}: {leaves} leaves share the path {path!r}, because a key of the tree contains a slash; rename the key "
        "to make paths unique"
    )
