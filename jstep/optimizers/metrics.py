"""What a step's metrics show of its slots."""

import functools

import jax
import jax.numpy as jnp

from jstep.core.indexed_slices import IndexedSlices, is_slices
from jstep.core.memory import on_devices
from jstep.core.types import Array, Slots, Updates
from jstep.optimizers.held import shown_name
from jstep.optimizers.names import Role, Roles

SKIPPED = "skipped"


def shown_slots(roles: Roles, slots: Slots) -> dict[str, Array]:
    """The held hyperparameters and the loss scale in force, by name, with the prefixes of scopes and labels."""
    held = {str(shown_name(name)): slots[name] for name in roles.of(Role.HELD)}
    return held | {name: slots[name] for name in roles.of(Role.LOSS_SCALE)}


def skips(left_out: dict[str, Array], unscalable: Array | None, roles: Roles) -> dict[str, Array]:
    """Whether each guard left the update out, by the name of its metric: `skipped` with its prefix.

    Args:
        left_out: For each guard's slot, whether that guard, or one around it, left the update out.
        unscalable: Whether the gradients were not finite, if there is a loss scale.
        roles: The roles of the slots.
    """
    found = {_beside(name): value for name, value in left_out.items()}
    for name in roles.of(Role.LOSS_SCALE):
        if unscalable is not None:
            key = _beside(name)
            found[key] = found[key] | unscalable if key in found else unscalable
    return found


def _beside(slot: str) -> str:
    return "/".join([*slot.split("/")[:-1], SKIPPED])


def spoiled(updates: Updates, before: Slots, after: Slots, roles: Roles) -> Array:
    """Whether an update added something that is not finite to the parameters, or put it into a slot."""
    values = [u.values if isinstance(u, IndexedSlices) else u for u in jax.tree.leaves(updates, is_leaf=is_slices)]
    bad = [jnp.any(~jnp.isfinite(u)) for u in values]
    for name, tree in after.items():
        if roles.get(name) is None:
            both = on_devices((before[name], tree))
            pairs = zip(*map(jax.tree.leaves, both), strict=True)
            inexact = [(old, new) for old, new in pairs if jnp.issubdtype(new.dtype, jnp.inexact)]
            bad += [jnp.any(jnp.isfinite(old) & ~jnp.isfinite(new)) for old, new in inexact]
    return functools.reduce(jnp.logical_or, bad, jnp.asarray(False))
