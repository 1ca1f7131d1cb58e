"""Detection of fresh slots that a partial restore leaves with an old age."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jstep.checkpoint.format import counts
from jstep.checkpoint.format.match import keys_of
from jstep.core import trees
from jstep.core.slot_roles import AGES, Roles, roles_in

_AGE = "start_step"


def warning(target: Any, values: Sequence[Any], left: Sequence[int]) -> str:
    """Return a warning about slots that stayed fresh while their state was restored to an old age; "" if none did.

    An optimizer corrects its slots by their age, global_step + 1 − start_step: fresh zeros that count as 10 000
    steps old make its first updates several times too large.

    Args:
        target: The tree that was restored into.
        values: Its leaves after the restore.
        left: The indices of the leaves that were left unchanged.
    """
    leaves = jax.tree_util.tree_leaves_with_path(target)
    keys = [keys_of(path) for path, _ in leaves]
    before = dict(zip(keys, (leaf for _, leaf in leaves), strict=True))
    after = dict(zip(keys, values, strict=True))
    roles = roles_in(target)
    starts = [key[1] for key in keys if len(key) == 2 and key[0] == "slots" and _is_age(key[1], roles)]
    stale: dict[str, list[str]] = {}
    for index in left:
        key = keys[index]
        if len(key) < 2 or key[0] != "slots" or key[1] in starts or counts.is_ageless(key, leaves[index][1], roles):
            continue
        start = max((s for s in starts if key[1].startswith(_scope(s))), key=len, default=None)
        if start is not None and (_age(after, start) or 0) > 0 and _age(before, start) != _age(after, start):
            stale.setdefault(start, []).append("/".join(key))
    return " ".join(_text(start, paths, after) for start, paths in stale.items())


def _is_age(slot: str, roles: Roles) -> bool:
    return roles[slot] in AGES if slot in roles else slot.split("/")[-1] == _AGE


def _age(values: dict[tuple[str, ...], Any], start: str) -> int | None:
    step, born = _number(values.get(("global_step",))), _number(values.get(("slots", start)))
    return None if step is None or born is None else step - born


def _number(leaf: Any) -> int | None:
    if isinstance(leaf, jax.Array) and not trees.is_traced(leaf) and not leaf.is_deleted() and not leaf.ndim:
        return int(np.asarray(leaf.addressable_data(0)))
    return int(leaf) if isinstance(leaf, np.ndarray | np.generic | int) and not np.ndim(leaf) else None


def _scope(slot: str) -> str:
    return slot[: slot.rfind("/") + 1]


def _text(start: str, paths: Sequence[str], values: dict[tuple[str, ...], Any]) -> str:
    age, step = _age(values, start), _number(values["global_step",])
    shown = ", ".join(map(repr, paths[:5])) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
    return (
        f"Fresh slots meet an old age: {shown} were left as they were, and slots/{start} makes them {age} steps old, "
        "so that the bias correction does not treat them as fresh and their first updates are too large. Give them "
        'their own age: use the optimizer partition({"old": …, "new": …}, labels), which keeps a start_step for '
        f"each label, and a target from TrainState.create(params, optimizer, global_step={step}); names= maps "
        "leaves that were saved under other slots."
    )
