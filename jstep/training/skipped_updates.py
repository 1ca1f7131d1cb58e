"""Skipped updates of a step that jstep did not make, found in the state that it returns.

A guard that skips an update leaves its slot `last_finite_step` unchanged. So does a step that makes
no update, such as the other branch of a `lax.cond`. To tell them apart, we replace the slot by a
mark before the step. A guard that skips changes it to another mark, in any scan, cond or vmap; an
update that is not skipped replaces it by a step. After the step, a remaining mark becomes the old
value again. The loss scale needs no mark, because it shrinks if an update is skipped.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jstep.core.meshes import internal_transfers
from jstep.core.placement import is_on_host
from jstep.core.trees import Array, Slots, Tree, is_array, is_trainable
from jstep.optimizers import guards
from jstep.slots.roles import Role, roles_in
from jstep.state.train_state import TrainState
from jstep.training.metrics import SKIPPED


class GuardSlots(NamedTuple):
    """The slots of guards before a step, and those that were given to the step, by name."""

    last_finite: Slots
    marked: Slots
    scales: Slots


def mark_guards(state: Tree, *, may_be_donated: bool = False) -> tuple[Any, GuardSlots | None]:
    """Return the state with marks in the slots of its guards, and these slots (None: no guards)."""
    roles = roles_in(state)
    last_names = [
        name for name in roles.names_with(Role.LAST_FINITE) if is_array(state.slots.get(name))
    ]
    scale_names = [
        name for name in roles.names_with(Role.LOSS_SCALE) if is_array(state.slots.get(name))
    ]
    if not last_names and not scale_names:
        return state, None
    with internal_transfers():
        last_finite = {name: state.slots[name] for name in last_names}
        marked = {
            name: jnp.full_like(last, guards.NOT_REACHED) for name, last in last_finite.items()
        }
        scales = {name: state.slots[name] for name in scale_names}
        if may_be_donated:
            # They are compared with the new scales. `last_finite` is not passed to the step.
            scales = {name: jnp.copy(scale) for name, scale in scales.items()}
    new = TrainState(state.params, {**state.slots, **marked}, state.global_step, roles=roles)
    return new, GuardSlots(last_finite, marked, scales)


def restore_guards(slots: GuardSlots | None, new: Any, metrics: Any) -> tuple[Any, Any]:
    """Return a step's state without marks, and its metrics with `skipped`."""
    if slots is None or not isinstance(new, TrainState) or not isinstance(new.slots, Mapping):
        return new, metrics
    marks = {name: new.slots[name] for name in slots.last_finite if is_array(new.slots.get(name))}
    scales = {name: new.slots[name] for name in slots.scales if is_array(new.slots.get(name))}
    if any(jnp.shape(marks[name]) != jnp.shape(slots.last_finite[name]) for name in marks):
        return new, metrics  # `keep_kind` rejects the state
    # A step that makes no update returns the very slots that it was given.
    has_other_mark = any(marks[name] is not slots.marked[name] for name in marks)
    has_other_scale = any(scales[name] is not slots.scales[name] for name in scales)
    makes_updates = has_other_mark or has_other_scale
    params = [
        leaf for leaf in jax.tree.leaves(new.params) if is_trainable(leaf) and not is_on_host(leaf)
    ]
    with internal_transfers():
        last_finite, is_skipped = _read_marks(slots, marks, scales, params)
    restored = TrainState(
        new.params, {**new.slots, **last_finite}, new.global_step, roles=roles_in(new)
    )
    if not makes_updates or not isinstance(metrics, dict):
        return restored, metrics
    if SKIPPED in metrics:
        is_skipped = jnp.maximum(is_skipped, jnp.asarray(metrics[SKIPPED], jnp.float32))
    return restored, {**metrics, SKIPPED: is_skipped}


@jax.jit
def _read_marks(
    slots: GuardSlots, marks: Slots, scales: Slots, params: list[Array]
) -> tuple[Slots, Array]:
    """Return the slots without marks, and 1.0 if the update was skipped."""
    last_finite: Slots = {}
    skips: list[Array] = []
    for name, mark in marks.items():
        last_finite[name] = jnp.where(mark < 0, slots.last_finite[name], mark)
        skips.append(mark == guards.SKIPPED_MARK)
    skips += [scale < slots.scales[name] for name, scale in scales.items()]
    # In a population, an update counts as skipped if it was in each member.
    is_skipped = functools.reduce(
        jnp.logical_or, [jnp.all(skip) for skip in skips], jnp.asarray(False)
    )
    # Another optimizer of the step, such as that of the other player of a GAN, may have applied
    # what a guard skipped.
    is_skipped = jax.lax.cond(is_skipped, _are_finite, lambda params: False, params)
    return last_finite, is_skipped.astype(jnp.float32)


def _are_finite(params: list[Array]) -> Array:
    return functools.reduce(
        jnp.logical_and, [jnp.all(jnp.isfinite(p)) for p in params], jnp.asarray(True)
    )
