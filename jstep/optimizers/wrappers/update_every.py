"""An optimizer that updates at every k-th step."""

from typing import Any

import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import as_bool, as_int
from jstep.core.indexed_slices import IndexedSlices, combined
from jstep.core.types import Array, Context, Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.optimizers.conditional_update import conditional_update
from jstep.optimizers.hyper import Hyper
from jstep.optimizers.leafwise import Slot, fresh_slot
from jstep.optimizers.match_gradients import match_gradients, slot_leaves
from jstep.optimizers.names import Roles
from jstep.optimizers.wrap_optimizer import wrap_optimizer

GRADIENT_SUM, GRADIENT_COUNT = "gradient_sum", "gradient_count"


def update_every(k: int, optimizer: Optimizer, *, phase: int = 0, accumulate: bool = False) -> Optimizer:
    """The same optimizer, which updates at every k-th step: where (N − phase) mod k = k − 1, N the global step.

    At the other steps the update is zero and the slots stay as they are, whatever the gradients of these steps are
    (NaN too). Schedules are read at the global step. Ages, and with them bias corrections, count the optimizer's own
    updates, as do the periods of `lookahead` and averages inside it; averages around it follow every step.

    Args:
        k: From one update to the next, ≥ 1; 1 updates at every step.
        optimizer: What updates. If no leaf has a gradient, it sits the step out, whether an update was due or not: it
            does not age, and makes up for nothing later.
        phase: By how many steps the updates come later, 0 ≤ phase < k.
        accumulate: Whether a leaf's update uses the mean of the gradients that it has had since its last one. A leaf
            without a gradient at the step of an update waits, its mean with it. `IndexedSlices` become dense.
            Otherwise an update uses the gradient of its own step alone. What an optimizer with `takes_context` learns
            of the loss is of its own step either way.

    Returns:
        An `Optimizer` with the same hyperparameters and slots. If it accumulates there are two more: `gradient_sum`,
        in float32 at least, and `gradient_count`, the number of gradients in the sum of each leaf.

    Raises:
        TypeError: k or phase is not an integer, or accumulate not a bool.
        ValueError: k or phase is out of its range, or the optimizer has a slot of such a name.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.update_every(2, jstep.gradient_descent(1.0), accumulate=True)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> for g in (1.0, 3.0):
        ...     state = jstep.apply_gradients(state, {"w": jnp.float32(g)}, optimizer)
        ...     print(state.params["w"])
        0.0
        -2.0

    Source: n_critic in Arjovsky et al., "Wasserstein GAN" (2017), algorithm 1; `optax.MultiSteps` to accumulate.
    """
    every = as_int(k, "k", at_least=1)
    offset = as_int(phase, "phase", at_least=0)
    if offset >= every:
        raise ValueError(f"phase={offset}: must be below k={every}; the updates at phase + k are those at phase")
    as_bool(accumulate, "accumulate")
    require_optimizer("optimizer", optimizer)

    def due_at(step: Step) -> Array:
        return (jnp.asarray(step) - offset) % every == every - 1

    def of_one_step(
        updates: Updates, inner: Slots, own: Slots, params: Params, step: Step, h: Hyper, context: Context
    ) -> tuple[Updates, Slots, Slots]:
        return *conditional_update(due_at(step), optimizer, updates, inner, params, step, context), own

    def of_the_mean(
        updates: Updates, inner: Slots, own: Slots, params: Params, step: Step, h: Hyper, context: Context
    ) -> tuple[Updates, Slots, Slots]:
        due, treedef = due_at(step), trees.structure(params)
        gradients = match_gradients(updates, params)
        sums = slot_leaves(own, GRADIENT_SUM, params)
        counts = slot_leaves(own, GRADIENT_COUNT, params, _scalar)
        means: list[Any] = [None] * len(gradients)
        for i, g in enumerate(gradients):
            if g is not None:
                sums[i], counts[i] = _added(sums[i], g), counts[i] + 1
                means[i] = sums[i] * (1 / counts[i])  # a quotient XLA would keep in memory
        updates, inner = conditional_update(due, optimizer, treedef.unflatten(means), inner, params, step, context)
        for i, g in enumerate(gradients):
            if g is not None:
                sums[i], counts[i] = (jnp.where(due, jnp.zeros_like(x), x) for x in (sums[i], counts[i]))
        return updates, inner, {GRADIENT_SUM: treedef.unflatten(sums), GRADIENT_COUNT: treedef.unflatten(counts)}

    count = Slot(shape=_scalar)
    added = {
        GRADIENT_SUM: lambda params, step: fresh_slot(GRADIENT_SUM, Slot(), params, step),
        GRADIENT_COUNT: lambda params, step: fresh_slot(GRADIENT_COUNT, count, params, step),
    }
    return wrap_optimizer(
        optimizer,
        "update_every",
        of_the_mean if accumulate else of_one_step,
        added=added if accumulate else None,
        guarded=False if accumulate else None,
        inner_roles=Roles.at_some_steps,
    )


def _scalar(path: str, leaf: Any) -> tuple[int, ...]:
    return ()


def _added(total: Array, gradient: Any) -> Array:
    """The sum with one more gradient."""
    if not isinstance(gradient, IndexedSlices):
        return total + gradient.astype(total.dtype)
    rows = combined(gradient)
    return total.at[rows.indices].add(rows.values.astype(total.dtype), mode="drop")
