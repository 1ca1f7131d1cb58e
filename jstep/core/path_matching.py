"""Matching by path: the source of each leaf, the leaves without one, and the sources left over.

The leaves of a target are matched to leaves of a checkpoint (`checkpoint/match.py`) or to tensors
(`weights/matching_tensors.py`), and the leaves of a tree to those that it had before
(`slots/matching.py`). These modules decide whether a source fits its leaf, and write the messages.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from jstep.core import trees
from jstep.core.checks import describe_type, format_value

Source = TypeVar("Source")


class PathMatch(NamedTuple, Generic[Source]):
    """The result of `match_paths`.

    Attributes:
        found: The source of each name; None for one without a source.
        missing: The names that no source has, in their order.
        unused: The names of the other sources, in the order of the sources.
    """

    found: list[Source | None]
    missing: list[str]
    unused: list[str]


def match_paths(names: Sequence[str | None], sources: Mapping[str, Source]) -> PathMatch[Source]:
    """Match names to sources.

    Args:
        names: The name that the source of each leaf has, mostly its path; None for a leaf that
            wants no source.
        sources: Name → source.
    """
    found: list[Source | None] = []
    missing: list[str] = []
    for name in names:
        if name is None:
            found.append(None)
            continue
        found.append(sources.get(name))
        if name not in sources:
            missing.append(name)
    used = set(names)
    return PathMatch(found, missing, [name for name in sources if name not in used])


def names_by_path(names: object, paths: Sequence[str], what: str, form: str) -> dict[str, Any]:
    """Return the entries of a `names` argument by the paths of leaves; other leaves have none.

    Args:
        names: A mapping by path, or a function of it.
        what: The tree that has the paths, for errors.
        form: The form of the argument, for errors.
    """
    if names is None:
        return {}
    if isinstance(names, Mapping):
        for path in names:
            if path not in paths:
                near = trees.suggest_names(str(path), paths)
                raise ValueError(f"names: {what} has no leaf at {format_value(path)}{near}")
        return dict(names)
    if not callable(names):
        raise TypeError(f"names={format_value(names)}: must be {form}, got {describe_type(names)}")
    return {path: names(path) for path in paths}
