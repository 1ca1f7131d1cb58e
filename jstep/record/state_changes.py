"""What replaced the state of a run between two calls: the body of the loop, or a hook; at which steps, which leaves."""

from typing import Any

from jstep.core import trees
from jstep.core.checks import truncate, truncate_path
from jstep.core.trees import Tree

_MAX_KINDS, _MAX_LEAVES, _MAX_STEPS, _MAX_TEXT = 6, 4, 10, 80
"""The maximum number of kinds of changes, of paths of one, of its first and of its newest steps, and of characters: the
file of a start is written each second."""
_OTHERS = "the body or a hook", ("other leaves",)


class StateChanges:
    """The changes of a state by code of the user, of bounded size.

    A leaf counts as changed if it is another array. None is read, as the one before may have been donated.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, Any], dict[str, Any]] = {}

    def add(self, step: int, by: str, before: Tree, after: Tree) -> None:
        pairs = zip(trees.flatten(before)[0], trees.flatten(after)[0], strict=True)
        changed = tuple(i for i, (old, new) in enumerate(pairs) if old is not new)
        if not changed:
            return
        key: tuple[str, Any] = (by, changed)
        if key not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            key = _OTHERS
        kind = self._kinds.get(key)
        if kind is None:
            paths = _subtrees(trees.leaf_paths(after), changed) if key is not _OTHERS else [*_OTHERS[1]]
            shown = [truncate_path(path, _MAX_TEXT) for path in paths[:_MAX_LEAVES]]
            by = truncate(key[0], _MAX_TEXT)
            kind = {"by": by, "leaves": shown, "leaves_left_out": len(paths) - len(shown), "count": 0, "steps": []}
        steps = kind["steps"]
        if step not in steps[-1:]:  # replaced twice at one step
            steps = [*steps, step]
            newest = steps[max(_MAX_STEPS, len(steps) - _MAX_STEPS) :]
            kind = {**kind, "count": kind["count"] + 1, "steps": [*steps[:_MAX_STEPS], *newest]}
        self._kinds = {**self._kinds, key: kind}  # not in place: another thread may be writing the record

    def as_record(self) -> list[dict[str, Any]]:
        """Return the changes as `schema.StateChange`."""
        return [*self._kinds.values()]


def _subtrees(paths: list[str], changed: tuple[int, ...]) -> list[str]:
    """Return the paths of the largest subtrees of which each leaf has changed."""
    unchanged = {part for i in {*range(len(paths))}.difference(changed) for part in _prefixes(paths[i])}
    found = (next((part for part in _prefixes(paths[i]) if part not in unchanged), paths[i]) for i in changed)
    return list(dict.fromkeys(found))


def _prefixes(path: str) -> list[str]:
    """Return `a`, `a/b` and `a/b/c` for `a/b/c`."""
    parts = path.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
