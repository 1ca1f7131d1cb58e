"""One update of the state: params + updates, new slots, global_step + 1. The only place that counts."""

import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import as_bool
from jstep.core.contexts import own_transfers
from jstep.core.meshes import in_auto_axes, like
from jstep.core.types import Optimizer, Slots, Updates, require_optimizer
from jstep.optimizers.apply_updates import apply_updates
from jstep.optimizers.matched import matched_gradients
from jstep.state import MODEL_STATE, TrainState, is_start_step, require_alive, require_state, step_of
from jstep.state.global_step import later_step


def apply_gradients(
    state: TrainState, grads: Updates, optimizer: Optimizer, *, increment_global_step: bool = True
) -> TrainState:
    """The next state: params + updates, new slots, global_step + 1. Pure; it neither compiles nor donates.

    Args:
        state: The state before the update.
        grads: A tree like `state.params`; a leaf is an array, an `IndexedSlices`, or None to stay as it is.
        optimizer: The one the state was created with.
        increment_global_step: Whether the update counts.

    Raises:
        TypeError: A gradient is not floating point.
        ValueError: All gradients are None, structures or shapes do not fit (names the path), or the slots of
            the state are not the optimizer's.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer)
        >>> print(state.params["w"], state.global_step)
        0.5 1

    Source: `tf.train.Optimizer.apply_gradients`.
    """
    as_bool(increment_global_step, "increment_global_step")
    with own_transfers():
        return applied(state, grads, optimizer, increment_global_step)[0]


def applied(state: TrainState, grads: Updates, optimizer: Optimizer, increment: bool) -> tuple[TrainState, Updates]:
    """The next state, and the updates as they were added."""
    require_optimizer("optimizer", optimizer)
    require_alive(require_state(state))
    place = like((state, state.params))
    return in_auto_axes(lambda state, grads: _applied(state, grads, optimizer, increment), state, grads, place=place)


def _applied(state: TrainState, grads: Updates, optimizer: Optimizer, increment: bool) -> tuple[TrainState, Updates]:
    step = step_of(state)
    matched_gradients(grads, state.params)  # also where no element of a chain looks at them
    held = {name: tree for name, tree in state.slots.items() if name != MODEL_STATE}
    updates, own = optimizer.update(grads, held, state.params, step)
    _check_slots(held, own)
    if not increment:
        # A skipped update moves start_step along with the step; where the step stays, so does the age.
        own = {name: held[name] if is_start_step(name) else tree for name, tree in own.items()}
    params = apply_updates(state.params, updates)
    new = state.replace(params=params, slots={**state.slots, **own})
    return (new.replace(global_step=later_step(step)) if increment else new), updates


def _check_slots(held: Slots, own: Slots) -> None:
    if held.keys() != own.keys():
        raise ValueError(
            f"the optimizer's slots are not those of the state: missing in the state "
            f"{sorted(own.keys() - held.keys())}, unknown to the optimizer {sorted(held.keys() - own.keys())}. "
            "Use the optimizer the state was created with, "
            "or make new slots with TrainState.create(params, optimizer, global_step=state.global_step)."
        )
    for name in held:
        before, after = (trees.flatten(tree) for tree in (held[name], own[name]))
        kinds = [[(leaf.shape, leaf.dtype) for leaf in map(jnp.asarray, leaves)] for leaves, _ in (before, after)]
        if before[1] != after[1] or kinds[0] != kinds[1]:
            raise ValueError(
                f"slot {name!r}: the optimizer returned a tree of another structure, shape or dtype than the state "
                "holds; slots keep theirs from step to step"
            )
