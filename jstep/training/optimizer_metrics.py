"""What the metrics of a step show of its optimizer: hyperparameters, held values and scales, and skipped updates."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core.indexed_slices import IndexedSlices, is_slices
from jstep.core.placement import on_devices
from jstep.core.slot_roles import Role, Roles
from jstep.core.trees import Array, Slots, Updates
from jstep.optimizers.hyperparameters import shown_name

SKIPPED = "skipped"


def values_used(reported: Mapping[str, Any], roles: Roles, slots: Slots) -> dict[str, Any]:
    """The hyperparameters that an update uses: schedules that depend on a count in the slots are evaluated at it.

    Args:
        reported: The hyperparameters at the global step.
        roles: The roles of the slots.
        slots: The slots before the update.
    """
    found = dict(reported)
    for one in roles.counted:
        mine = {f"{one.prefix}{name}": name for name in one.names}
        if found.keys().isdisjoint(mine):
            continue  # someone else reports them
        slot = one.slot()
        values = {} if slot is None else one.at(on_devices(slots[f"{one.prefix}{slot}"]))
        known = {name: values[inner] for name, inner in mine.items() if inner in values}
        found = {name: known.get(name, value) for name, value in found.items() if name in known or name not in mine}
    return found


def shown_slots(roles: Roles, slots: Slots) -> dict[str, Array]:
    """The current held hyperparameters and loss scale, by name with the prefixes of scopes and labels."""
    held = {str(shown_name(name)): slots[name] for name in roles.of(Role.HELD)}
    return held | {name: slots[name] for name in roles.of(Role.LOSS_SCALE)}


def skips(left_out: dict[str, Array], unscalable: Array | None, roles: Roles) -> dict[str, Array]:
    """Whether each guard skipped the update, by the name of its metric: `skipped` with its prefix.

    Args:
        left_out: For each guard's slot, whether that guard, or one around it, skipped the update.
        unscalable: Whether the gradients were not finite; None without a loss scale.
        roles: The roles of the slots.
    """
    found = {_metric_name(name): value for name, value in left_out.items()}
    for name in roles.of(Role.LOSS_SCALE):
        if unscalable is not None:
            key = _metric_name(name)
            found[key] = found[key] | unscalable if key in found else unscalable
    return found


def _metric_name(slot: str) -> str:
    return "/".join([*slot.split("/")[:-1], SKIPPED])


def became_nonfinite(updates: Updates, before: Slots, after: Slots, roles: Roles) -> Array:
    """Whether an update contains values that are not finite, or made a finite value of a slot not finite."""
    values = [u.values if isinstance(u, IndexedSlices) else u for u in jax.tree.leaves(updates, is_leaf=is_slices)]
    bad = [jnp.any(~jnp.isfinite(u)) for u in values]
    for name, tree in after.items():
        if name not in roles or not roles.has_one_value(name):
            both = on_devices((before[name], tree))
            pairs = zip(*map(jax.tree.leaves, both), strict=True)
            inexact = [(old, new) for old, new in pairs if jnp.issubdtype(new.dtype, jnp.inexact)]
            bad += [jnp.any(jnp.isfinite(old) & ~jnp.isfinite(new)) for old, new in inexact]
    return functools.reduce(jnp.logical_or, bad, jnp.asarray(False))
