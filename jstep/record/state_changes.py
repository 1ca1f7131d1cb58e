"""Changes of a run's state by the loop body or a hook: which leaves they replaced, and when."""

from typing import Any

from jstep.core import trees
from jstep.core.checks import truncate, truncate_path
from jstep.core.trees import Tree

# Bounds: the file of a start is written each second.

_MAX_KINDS = 6
"""The maximum number of kinds of changes."""
_MAX_LEAVES = 4
"""The maximum number of paths of a kind."""
_MAX_STEPS = 10
"""The maximum number of its first steps, and of its newest ones."""
_MAX_TEXT = 80
"""The maximum number of characters of a path, and of a name."""
_OTHER_LEAVES = "other leaves"
_OTHERS = "the body or a hook", (_OTHER_LEAVES,)
"""The kind of all changes beyond `_MAX_KINDS`."""


class StateChanges:
    """The changes of a state by the user's code, of bounded size.

    A leaf counts as changed if it is another array. Values are not compared, because the old array
    may have been donated.
    """

    def __init__(self) -> None:
        # A kind is the name of what changes, with the numbers of the leaves.
        self._kinds: dict[tuple[str, Any], dict[str, Any]] = {}

    def add(self, step: int, caller: str, old_state: Tree, new_state: Tree) -> None:
        pairs = zip(trees.flatten(old_state)[0], trees.flatten(new_state)[0], strict=True)
        changed = tuple(i for i, (old, new) in enumerate(pairs) if old is not new)
        if not changed:
            return
        key: tuple[str, Any] = (caller, changed)
        if key not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            key = _OTHERS
        kind = self._kinds.get(key)
        if kind is None:
            if key is _OTHERS:
                paths = [_OTHER_LEAVES]
            else:
                paths = _subtrees(trees.leaf_paths(new_state), changed)
            shown = [truncate_path(path, _MAX_TEXT) for path in paths[:_MAX_LEAVES]]
            kind = {
                "by": truncate(key[0], _MAX_TEXT),
                "leaves": shown,
                "leaves_left_out": len(paths) - len(shown),
                "count": 0,
                "steps": [],
            }
        # A state that is replaced twice at one step counts once.
        if step not in kind["steps"][-1:]:
            steps = [*kind["steps"], step]
            first_steps = steps[:_MAX_STEPS]
            newest_steps = steps[max(_MAX_STEPS, len(steps) - _MAX_STEPS) :]
            kind = {
                **kind,
                "count": kind["count"] + 1,
                "steps": [*first_steps, *newest_steps],
            }
        # Not in place: another thread may be writing the record.
        self._kinds = {**self._kinds, key: kind}

    def as_record(self) -> list[dict[str, Any]]:
        """Return the changes as `schema.StateChange`."""
        return [*self._kinds.values()]


def _subtrees(paths: list[str], changed: tuple[int, ...]) -> list[str]:
    """Return the paths of the largest subtrees of which each leaf has changed."""
    partly_unchanged: set[str] = set()
    for i in {*range(len(paths))}.difference(changed):
        partly_unchanged.update(_prefixes(paths[i]))
    subtrees: dict[str, None] = {}  # an ordered set
    for i in changed:
        whole = [prefix for prefix in _prefixes(paths[i]) if prefix not in partly_unchanged]
        # Two leaves may have one path, such as those of the keys 1 and "1".
        subtrees[whole[0] if whole else paths[i]] = None
    return list(subtrees)


def _prefixes(path: str) -> list[str]:
    """Return `a`, `a/b` and `a/b/c` for `a/b/c`."""
    parts = path.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
