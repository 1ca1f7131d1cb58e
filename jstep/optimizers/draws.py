"""Random numbers that differ between the updates of one step: `drawn`, which counts them.

The i-th update of step N draws with the number i. An optimizer that draws has two scalar slots,
`drawn/step`, the step of its latest update, and `drawn/count`, the number of its updates in that
step. All optimizers below one label or scope have the same two: each computes the same new values
from the same old ones.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.trees import Array, Slots, Step
from jstep.slots.matching import as_slots
from jstep.slots.roles import Role, Roles

DRAWN_STEP = "drawn/step"
DRAWN_COUNT = "drawn/count"
ROLES = Roles({DRAWN_STEP: Role.DRAWN, DRAWN_COUNT: Role.DRAWN})


def fresh_draws() -> Slots:
    return {name: jnp.zeros((), trees.default_int()) for name in ROLES}


def number_in_step(slots: Slots, step: Step) -> Array:
    """The number of the update from `step` to step + 1 among those of the step: 0 for the first."""
    drawn = as_slots(ROLES, slots)
    is_same_step = drawn[DRAWN_STEP] == jnp.asarray(step).astype(drawn[DRAWN_STEP].dtype)
    return jnp.where(is_same_step, drawn[DRAWN_COUNT], 0)


def next_draws(slots: Slots, step: Step) -> Slots:
    old = slots[DRAWN_STEP]
    return {
        DRAWN_STEP: jnp.asarray(step).astype(old.dtype),
        DRAWN_COUNT: number_in_step(slots, step) + 1,
    }


def numbered_key(key: Any, number: Array) -> Any:
    """The key of an update's random numbers: `key` itself for the first update of a step."""
    # A step with one update draws what it drew before `drawn` existed.
    return jnp.where(number == 0, key, jax.random.fold_in(key, number))


def shared_names(roles: Iterable[Roles]) -> set[str]:
    """The names of slots that several optimizers may have, because all count draws there."""
    names: set[str] = set()
    others: set[str] = set()
    for slot_roles in roles:
        drawn = set(slot_roles.names_with(Role.DRAWN))
        names |= drawn
        others |= slot_roles.keys() - drawn
    return names - others


def join_draws(names: Iterable[str], old: Slots, first: Slots, second: Slots) -> Slots:
    """Shared slots after two elements of a chain: one that made no update left them unchanged."""
    return {name: jnp.where(second[name] == old[name], first[name], second[name]) for name in names}
