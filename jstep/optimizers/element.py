"""Chain elements whose only slots are held hyperparameters."""

from collections.abc import Callable, Mapping
from typing import Any

from jstep.core.checks import as_function
from jstep.core.slot_roles import Init, Role, Roles
from jstep.core.types import Optimizer, Params, Slots, Step, Updates
from jstep.optimizers.held import held_names, held_slots
from jstep.optimizers.hyper import Hyper, report, values_at
from jstep.optimizers.match_gradients import missing_slot


def element(
    fn: Callable[[Updates, Params, Step, Hyper], Updates], hyper: Mapping[str, Any], *, finished: bool = False
) -> Optimizer:
    """A chain element from `fn(updates, params, step, h) -> updates` and its hyperparameters.

    Args:
        fn: The transformation; it must handle None leaves and `IndexedSlices` itself.
        hyper: Name → the value returned by `checked`.
        finished: Whether the updates include −learning_rate.
    """
    held = held_names(hyper)

    def update(updates: Updates, slots: Slots, params: Params, step: Step, /) -> tuple[Updates, Slots]:
        for name in held:
            if name not in slots:
                raise missing_slot(name, slots)
        return fn(updates, params, step, values_at(hyper, step, slots)), {name: slots[name] for name in held}

    def init(params: Params, step: Step) -> Slots:
        return held_slots(hyper)

    roles = Roles(dict.fromkeys(held, Role.HELD))
    return Optimizer(Init(init, lambda params: roles, finished), update, report(hyper))


def stateless(fn: Callable[[Updates, Params, Step], Updates]) -> Optimizer:
    """A chain element from a pure function, without slots or hyperparameters.

    Args:
        fn: A pure function `fn(updates, params, step) -> updates`. Leaves of updates are arrays, `IndexedSlices` or
            None, which stays None; the step is the number of updates applied so far.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> signs = jstep.stateless(lambda updates, params, step: jax.tree.map(jnp.sign, updates))
        >>> optimizer = jstep.chain(signs, jstep.gradient_descent(0.5))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        0.5

    Source: `optax.stateless`.
    """
    as_function(fn, "fn", "(updates, params, step) -> updates")
    return element(lambda updates, params, step, h: fn(updates, params, step), {})
