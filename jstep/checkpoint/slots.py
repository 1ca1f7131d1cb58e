"""Slots in checkpoints: steps, guards, copies of parameters, and fresh slots that meet an old age."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.checks import listed
from jstep.core.slot_roles import AGES, COPIES, Role, Roles, roles_in
from jstep.state.slots import owners
from jstep.state.train_state import TrainState

GLOBAL_STEP = "global_step"
PARAMS = "params"
SLOTS = "slots"
_WIDTHS = {"int32", "int64"}
_GUARDS = (Role.LAST_FINITE, Role.LOSS_SCALE, Role.SCALE_SINCE)
_AVERAGING = "with_moving_average"

Keys = tuple[str, ...]
Kind = tuple[tuple[int, ...], str]


def keys_of(path: Any) -> Keys:
    """Return the keys of a leaf as strings."""
    return tuple(trees.path_str((key,)) for key in path)


def converts(keys: Keys, saved: Kind, wanted: Kind, steps: Sequence[int]) -> bool:
    """Return whether a leaf is a step count, which may convert between 32 and 64 bits.

    These are the global step and integer scalars among the slots, never parameters.

    Args:
        keys: The keys of the leaf in the target.
        saved: Its shape and dtype in the checkpoint.
        wanted: Its shape and dtype in the target.
        steps: The shape of the target's global step: a population has a step for each of its members.
    """
    if saved[0] != wanted[0] or {saved[1], wanted[1]} != _WIDTHS or PARAMS in keys:
        return False
    return keys[-1] == GLOBAL_STEP or (keys[0] == SLOTS and saved[0] in ((), tuple(steps)))


def is_of_guard(keys: Keys, roles: Roles) -> bool:
    """Return whether a leaf of a target is a slot of `skip_nonfinite` or `dynamic_loss_scale`."""
    return len(keys) == 2 and keys[0] == SLOTS and roles.get(keys[1]) in _GUARDS


def halves_in(tree: Any) -> dict[int, int]:
    """Return the leaves that `compact` stores in two → those with their other halves: indices among all leaves."""
    found: dict[int, int] = {}
    for state, numbers in _states_in(tree):
        roles = roles_in(state)
        pairs = [(numbers.slots.get(name), numbers.slots.get(half)) for name, half in roles.halves.items()]
        own = (name for name in roles.of(Role.REMAINDER) if name not in roles.halves.values())
        for both in [*pairs, *((numbers.params, numbers.slots.get(name)) for name in own)]:
            if all(trees.is_like(state.params, one) for one in both):
                places = zip(*(trees.flatten_like(state.params, one, SLOTS) for one in both), strict=True)
                found |= {place: half for place, half in places if place is not None and half is not None}
    return found


def copied(target: Any) -> dict[int, list[int]]:
    """Return the leaves of slots that begin as copies → the leaves they are copies of, in order of preference.

    A slot inside `master_weights` begins as a copy of the master, or without one in the checkpoint, of the parameter.
    Both are indices among the leaves of the target. Only a `TrainState` knows the roles of its slots.
    """
    found: dict[int, list[int]] = {}
    for state, numbers in _states_in(target):
        params, roles = jax.tree.leaves(numbers.params), roles_in(state)
        mine = [
            (roles[name], place, number)
            for name in roles.of(*COPIES)
            if name in state.slots
            for place, number in zip(
                owners(name, state.slots[name], state.params, roles), jax.tree.leaves(numbers.slots[name]), strict=True
            )
            if place is not None
        ]
        masters = {place: number for role, place, number in mine if role is Role.MASTER}
        for role, place, number in mine:
            inside = [masters[place]] if role is Role.MASTER_COPY and place in masters else []
            found[number] = [*inside, params[place]]
    return found


def _states_in(tree: Any) -> list[tuple[TrainState, TrainState]]:
    """Return each state in a tree, with a copy whose leaves are their indices among all leaves of the tree."""
    both = tree, numbers_of_leaves(tree)
    nodes = (jax.tree.leaves(one, is_leaf=lambda node: isinstance(node, TrainState)) for one in both)
    return [both for both in zip(*nodes, strict=True) if isinstance(both[0], TrainState)]


def numbers_of_leaves(tree: Any) -> Any:
    """Return a tree with the numbers of its leaves in their places."""
    return jax.tree.unflatten(trees.structure(tree), range(len(jax.tree.leaves(tree))))


def is_ageless(keys: Keys, leaf: Any, roles: Roles) -> bool:
    """Return whether a slot is not subject to bias correction: a count, a guard's scalar or a held value."""
    if keys[1] in roles:
        return roles.has_one_value(keys[1]) and roles[keys[1]] is not Role.SHARED
    return str(getattr(leaf, "dtype", "")) in _WIDTHS and not getattr(leaf, "shape", (0,))


def stale_warning(target: Any, values: Sequence[Any], left: Sequence[int]) -> str:
    """Return a warning about slots that stayed fresh while their state was restored to an old age; "" if none did.

    An optimizer corrects its slots by their age, global_step + 1 − start_step: fresh zeros that count as 10 000
    steps old make its first updates several times too large.

    Args:
        target: The tree that was restored into.
        values: Its leaves after the restore.
        left: The indices of the leaves that nothing was restored into.
    """
    leaves = jax.tree_util.tree_leaves_with_path(target)
    keys = [keys_of(path) for path, _ in leaves]
    before = dict(zip(keys, (leaf for _, leaf in leaves), strict=True))
    after = dict(zip(keys, values, strict=True))
    roles = roles_in(target)
    names = [key[1] for key in keys if len(key) == 2 and key[0] == SLOTS]
    starts = [name for name in names if roles.get(name) in AGES]
    stale: dict[str, list[str]] = {}
    for index in left:
        key = keys[index]
        if len(key) < 2 or key[0] != "slots" or key[1] in starts or is_ageless(key, leaves[index][1], roles):
            continue
        of_scope = max((s for s in starts if key[1].startswith(_scope(s))), key=len, default=None)
        averaging = f"{_scope(key[1])}{_AVERAGING}/"
        own = f"{averaging}{key[1].rpartition('/')[2]}/"
        role = roles.get(key[1])
        first = [s for s in starts if s.startswith(own) or (role is Role.AVERAGE and s.startswith(averaging))]
        # A copy has no bias correction, but by an age of its own.
        start = min(
            first, default=None if role in (*COPIES, Role.REMAINDER) else of_scope, key=lambda s: not s.startswith(own)
        )
        if start is not None and (_age(after, start) or 0) > 0 and _age(before, start) != _age(after, start):
            stale.setdefault(start, []).append("/".join(key))
    return " ".join(_text(start, paths, after) for start, paths in stale.items())


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
    shown = listed(list(map(repr, paths)), 5)
    return (
        f"Fresh slots meet an old age: {shown} were left as they were, and slots/{start} makes them {age} steps old, "
        "so that the bias correction does not treat them as fresh and their first updates are too large. Give them "
        'their own age: use the optimizer partition({"old": …, "new": …}, labels), which keeps a start_step for '
        f"each label, and a target from TrainState.create(params, optimizer, global_step={step}); names= maps "
        "leaves that were saved under other slots."
    )
