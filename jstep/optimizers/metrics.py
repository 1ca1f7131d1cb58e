"""Slots and skipped updates in the metrics of a step."""

import functools

import jax
import jax.numpy as jnp

from jstep.core.placement import on_devices
from jstep.core.slot_roles import Role, Roles
from jstep.core.trees import Array, IndexedSlices, Slots, Updates, is_slices
from jstep.optimizers.held import shown_name

SKIPPED = "skipped"


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
