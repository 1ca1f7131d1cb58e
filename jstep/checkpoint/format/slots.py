"""Slots in checkpoints: steps, guards, former names, copies of parameters, and fresh slots that meet an old age."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.slot_roles import AGES, COPIES, Role, Roles, roles_in
from jstep.state.train_state import TrainState, owners

GLOBAL_STEP = "global_step"
_PARAMS = "params"
SLOTS = "slots"
_LAST_FINITE_STEP, _LOSS_SCALE, _SCALE_SINCE = "last_finite_step", "loss_scale", "scale_since"
_WIDTHS = {"int32", "int64"}
_CODES = {"int8", "int16", "uint8"}
_GUARDS = (Role.LAST_FINITE, Role.LOSS_SCALE, Role.SCALE_SINCE)
_AGE = "start_step"
_AVERAGING, _LOOKAHEAD = "with_moving_average", "lookahead"
_WITH_AGES = (_AVERAGING, _LOOKAHEAD)
"""The wrappers that shared the age of a guard inside them before jstep 0.3, and of all labels until then."""
_OF_ADADELTA = {"accum": "accumulator", "accum_update": "accumulator_update"}
"""The slots of `adadelta`, and their names in jstep 0.2."""

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
    if saved[0] != wanted[0] or {saved[1], wanted[1]} != _WIDTHS or _PARAMS in keys:
        return False
    return keys[-1] == GLOBAL_STEP or (keys[0] == SLOTS and saved[0] in ((), tuple(steps)))


def guards(missing: Mapping[Keys, Kind], steps: Sequence[int], roles: Roles) -> set[Keys]:
    """Return those slots missing in a checkpoint that belong to `skip_nonfinite` or `dynamic_loss_scale`.

    They are recognized by their roles in the target, or by name, shape and dtype below any scope or label; the two
    slots of a loss scale must both be missing.

    Args:
        missing: The leaves that the checkpoint lacks: keys → shape and dtype in the target.
        steps: The shape of the target's global step.
        roles: The roles of the target's slots, as far as they are known.
    """
    found: set[Keys] = set()
    for keys, (shape, dtype) in missing.items():
        if len(keys) != 2 or keys[0] != SLOTS or tuple(shape) != tuple(steps):
            continue
        if keys[1] in roles and roles[keys[1]] not in _GUARDS:
            continue
        scope, _, name = keys[1].rpartition("/")
        scope += "/" if scope else ""
        pair = {(SLOTS, scope + _LOSS_SCALE), (SLOTS, scope + _SCALE_SINCE)}
        if (name == _LAST_FINITE_STEP and dtype in _WIDTHS) or (
            keys in pair and pair <= missing.keys() and dtype in ({"float32"} if name == _LOSS_SCALE else _WIDTHS)
        ):
            found.add(keys)
    return found


def copied(target: Any) -> dict[int, list[int]]:
    """Return the leaves of slots that begin as copies → the leaves they are copies of, in order of preference.

    A slot inside `master_weights` begins as a copy of the master, or without one in the checkpoint, of the parameter.
    Both are indices among the leaves of the target. Only a `TrainState` knows the roles of its slots.
    """
    indices = jax.tree.unflatten(trees.structure(target), range(len(jax.tree.leaves(target))))
    found: dict[int, list[int]] = {}
    for state, numbers in zip(*(jax.tree.leaves(one, is_leaf=_is_state) for one in (target, indices)), strict=True):
        if not _is_state(state):
            continue
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


def _is_state(node: Any) -> bool:
    return isinstance(node, TrainState)


def is_ageless(keys: Keys, leaf: Any, roles: Roles) -> bool:
    """Return whether a slot is not subject to bias correction: a count, a guard's scalar or a held value."""
    if keys[1] in roles:
        return roles.has_one_value(keys[1]) and roles[keys[1]] is not Role.SHARED
    names = keys[1].split("/")
    count = str(getattr(leaf, "dtype", "")) in _WIDTHS and not getattr(leaf, "shape", (0,))
    return count or names[-1] in (_LAST_FINITE_STEP, _LOSS_SCALE, _SCALE_SINCE) or "held" in names


def former_paths(targets: Mapping[str, Keys], saved: Collection[str]) -> dict[str, str]:
    """Return path in the target → path in the checkpoint, for slots that were saved under a former name.

    Other optimizers have slots of these names, too (`ftrl` an `accum`, `adagrad` an `accumulator`): a leaf is renamed
    only if the target has all slots of the optimizer for its parameter, and the checkpoint has all of them under their
    former names.

    Args:
        targets: The paths of the target, and their keys.
        saved: The paths of the checkpoint.
    """
    renamed: dict[str, str] = {}
    names = {keys[1] for keys in targets.values() if len(keys) > 1 and keys[0] == SLOTS}
    for path, keys in targets.items():
        if len(keys) < 2 or keys[0] != SLOTS or path in saved:
            continue
        name = keys[1].rpartition("/")[2]
        scope = f"{SLOTS}/{keys[1].removesuffix(name)}"
        leaf = path.removeprefix(scope + name)
        shared = _shared_age(keys[1], names, saved) if name == _AGE else None
        # A label with the name of a wrapper has other slots.
        if shared and all(other.endswith(f"/{_AGE}") for other in targets if other.startswith(scope)):
            renamed[path] = shared
        if name in _OF_ADADELTA and all(
            scope + new + leaf in targets and scope + old + leaf in saved for new, old in _OF_ADADELTA.items()
        ):
            renamed[path] = scope + _OF_ADADELTA[name] + leaf
    return renamed


def _shared_age(slot: str, slots: Collection[str], saved: Collection[str]) -> str | None:
    """Return the path in the checkpoint of the age that a wrapper once shared, for the slot of its own age.

    Args:
        slot: The slot: `with_moving_average/start_step`, with a label or the name of the averages before its last part.
        slots: The slots of the target.
        saved: The paths of the checkpoint.
    """
    parts = slot.split("/")
    wrapper = next((i for i in reversed(range(len(parts))) if parts[i] in _WITH_AGES), None)
    if wrapper is None:
        return None
    above, below = parts[:wrapper], parts[wrapper + 1 : -1]
    if below and "/".join([*above, below[0]]) in slots:  # averages with an age of their own, which labels shared
        above = parts[: wrapper + 2]
    path = "/".join([SLOTS, *above, _AGE])
    return path if path in saved and path != f"{SLOTS}/{slot}" else None


def is_of_untrained(keys: Keys, params: Collection[str], target: Any) -> bool:
    """Return whether a leaf that a slot of a target lacks is the average of a parameter that is never updated.

    Until jstep 0.3 averages and slow weights were kept for all parameters.

    Args:
        keys: The keys of the slot's leaf in the checkpoint.
        params: The paths of the target.
        target: The target.
    """
    roles = roles_in(target)
    if len(keys) < 2 or keys[0] != SLOTS or keys[1] not in roles or keys[1] not in target.slots:
        return False
    averaged = roles[keys[1]] in (Role.COPY, Role.MASTER_COPY, Role.AVERAGE)
    return averaged and "/".join((_PARAMS, *keys[2:])) in params


def is_in_other_format(target: Mapping[Keys, Kind], saved: Mapping[Keys, Kind], roles: Roles) -> bool:
    """Return whether a target and a checkpoint seem to have the same slots in different formats.

    Codes are small integers, and so is a remainder, which only one of the formats may have.

    Args:
        target: The leaves of the target: keys → shape and dtype.
        saved: Those of the checkpoint.
        roles: The roles of the target's slots, as far as they are known.
    """

    def differs(keys: Keys) -> bool:
        one, other = target.get(keys), saved.get(keys)
        scales = len(keys) > 1 and roles.get(keys[1]) is Role.SCALES
        return one != other and (scales or any(kind is not None and kind[1] in _CODES for kind in (one, other)))

    return any(keys[0] == SLOTS and differs(keys) for keys in {**target, **saved})


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
    starts = [key[1] for key in keys if len(key) == 2 and key[0] == "slots" and _is_age(key[1], roles)]
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
        start = min(first, default=None if role in COPIES else of_scope, key=lambda s: not s.startswith(own))
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
