"""Leaves of a state that are not weights: step counts, and the scalars of guards."""

from collections.abc import Mapping, Sequence
from typing import Any

from jstep.core.slot_roles import Role, Roles

GLOBAL_STEP = "global_step"
_PARAMS = "params"
SLOTS = "slots"
_LAST_FINITE_STEP, _LOSS_SCALE, _SCALE_SINCE = "last_finite_step", "loss_scale", "scale_since"
_WIDTHS = {"int32", "int64"}
_GUARDS = (Role.LAST_FINITE, Role.LOSS_SCALE, Role.SCALE_SINCE)

Keys = tuple[str, ...]
Kind = tuple[tuple[int, ...], str]


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


def is_ageless(keys: Keys, leaf: Any, roles: Roles) -> bool:
    """Return whether a slot is not subject to bias correction: a count, a guard's scalar or a held value."""
    if keys[1] in roles:
        return roles.has_one_value(keys[1]) and roles[keys[1]] is not Role.SHARED
    names = keys[1].split("/")
    count = str(getattr(leaf, "dtype", "")) in _WIDTHS and not getattr(leaf, "shape", (0,))
    return count or names[-1] in (_LAST_FINITE_STEP, _LOSS_SCALE, _SCALE_SINCE) or "held" in names
