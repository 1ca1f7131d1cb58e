"""Matching of the leaves of a target to named sources: the leaves of a checkpoint, or the tensors of a file."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax

from jstep.core import trees
from jstep.core.checks import kind, shown

Key = TypeVar("Key", bound=Hashable)
Source = TypeVar("Source")


@dataclasses.dataclass(frozen=True)
class Assignment(Generic[Key, Source]):
    """The sources of the leaves of a target.

    Attributes:
        sources: The source of each leaf; None if it has none that fits.
        missing: The indices of the leaves whose key names no source.
        differing: Descriptions of leaves whose source does not fit.
        unused: The keys of the sources that no leaf uses.
    """

    sources: list[Source | None]
    missing: list[int]
    differing: list[str]
    unused: list[Key]


def assign(
    keys: Sequence[Key | None], sources: Mapping[Key, Source], difference: Callable[[int, Source], str]
) -> Assignment[Key, Source]:
    """Find the source of each leaf.

    Args:
        keys: The key of each leaf's source; None for a leaf without one.
        sources: The sources.
        difference: Describes why a source does not fit the leaf of an index; the empty string if it fits.
    """
    found: list[Source | None] = [None if key is None else sources.get(key) for key in keys]
    missing = [i for i, (key, source) in enumerate(zip(keys, found, strict=True)) if source is None and key is not None]
    texts = ["" if source is None else difference(i, source) for i, source in enumerate(found)]
    fitting = [None if text else source for text, source in zip(texts, found, strict=True)]
    used = set(keys)
    return Assignment(fitting, missing, list(filter(None, texts)), [key for key in sources if key not in used])


def entries(names: Any, known: Sequence[tuple[str, ...]], what: str, form: str) -> dict[str, Any]:
    """Return the entries of the `names` argument by the paths of leaves; other leaves have none.

    Args:
        names: The user's argument: a mapping by path, a function of the path, or None.
        known: The names of each leaf, its path first, as `paths.names_of` returns them.
        what: The name of the tree's argument, for errors.
        form: What `names` must be, for errors.

    Raises:
        TypeError: `names` is neither a mapping nor a function.
        ValueError: `names` has a path that is not in the tree, or has a leaf twice.
    """
    if names is None:
        return {}
    if not isinstance(names, Mapping):
        if not callable(names):
            raise TypeError(f"names={shown(names)}: must be {form}, got {kind(names)}")
        return {path: names(path) for path, *_ in known}
    # The full path of a leaf takes precedence over the path of another leaf's container.
    path_of = {other: path for path, *others in known for other in others} | {path: path for path, *_ in known}
    found: dict[str, Any] = {}
    named: dict[str, str] = {}
    for name, entry in names.items():
        path = path_of.get(name)
        if path is None:
            near = trees.nearest(str(name), [path for path, *_ in known])
            raise ValueError(f"names: {what} has no leaf at {shown(name)}{near}")
        if path in found:
            raise ValueError(f"names: {named[path]!r} and {name!r} are the same leaf of {what}; keep one of them")
        found[path], named[path] = entry, name
    return found


def has_value(leaf: Any) -> bool:
    """Return whether a leaf of a target is an array or number that can be read."""
    return not (isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, jax.Array) and leaf.is_deleted()))
