"""Finding leaves by what users write: a path, or a glob."""

import fnmatch
from typing import Any

import jax
from jax.tree_util import GetAttrKey

from jstep.core import trees

_BOXED = GetAttrKey("value")


def names_of(tree: Any) -> list[tuple[str, ...]]:
    """For each leaf the names it answers to: its path, and of a variable in a box (Flax NNX) that of the box.

    The leaf `fc/kernel/value`, the attribute `value` of a variable, is found as `fc/kernel`, too.
    """
    found: list[tuple[str, ...]] = []
    for keys, _ in jax.tree_util.tree_leaves_with_path(tree):
        boxed = len(keys) > 1 and keys[-1] == _BOXED
        found.append((trees.path_str(keys), trees.path_str(keys[:-1])) if boxed else (trees.path_str(keys),))
    return found


def matches(names: tuple[str, ...], entry: str) -> bool:
    """Whether a path or glob means a leaf of these names."""
    return any(name == entry or fnmatch.fnmatchcase(name, entry) for name in names)


def index_of(tree: Any, path: str, what: str) -> int | None:
    """The place, among the leaves of a tree, of the one at a path; None where there is none.

    Args:
        tree: Any tree.
        path: The whole path of a leaf, or that of its box.
        what: Who asks, for the error.

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
    """What is said of a path that several leaves share."""
    return (
        f"{what}: {leaves} leaves share the path {path!r}, since a key of the tree holds a slash; rename it, so that a "
        "path means one leaf"
    )
