"""Update only at every k-th step, optionally with accumulated gradients."""

from typing import Any

import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import as_bool, as_int
from jstep.core.trees import (
    Array,
    IndexedSlices,
    Optimizer,
    Slots,
    Step,
    Updates,
    combined,
    require_optimizer,
    rows_in_order,
)
from jstep.optimizers.leafwise import Slot, fresh_slot
from jstep.optimizers.match_gradients import match_gradients, slot_leaves
from jstep.optimizers.offloading import per_leaf
from jstep.optimizers.wrap_optimizer import Own, StepInputs, wrap_optimizer
from jstep.optimizers.wrappers.skip_nonfinite import conditional_update

GRADIENT_SUM, GRADIENT_COUNT = "gradient_sum", "gradient_count"
NOTHING = -0.0
"""The sum of no gradients, the identity of addition in floating point: −0 + x = x for every x."""


def update_every(k: int, optimizer: Optimizer, *, phase: int = 0, accumulate: bool = False) -> Optimizer:
    """Update at every k-th step, when (N − phase) mod k = k − 1, where N is the global step.

    At the other steps the update is zero and the slots stay unchanged, even if the gradients are NaN. Schedules are
    evaluated at the global step. Ages, and thus bias corrections, count the optimizer's own updates, as does the period
    of `lookahead` inside it. Averages inside it follow its own updates; those with `every` only the ones at their
    global steps, so give `every` a multiple of k, and a `start_step` of phase modulo k. Averages around it follow every
    step.

    Args:
        k: The number of steps from one update to the next, ≥ 1; 1 updates at every step.
        optimizer: The optimizer. If no leaf has a gradient, it skips the step, whether an update was due or not: it
            does not age, and the update is not made up for later.
        phase: The number of steps by which updates are delayed, 0 ≤ phase < k.
        accumulate: Whether a leaf's update uses the mean of its gradients since its last update. A leaf without a
            gradient at the step of an update keeps its mean until the next one. The mean of `IndexedSlices` names
            the rows that any of them named. Otherwise an update uses only the gradient of its own step. In both cases
            an optimizer with `takes_context` sees only the loss of its own step.

    Returns:
        An `Optimizer` with the same hyperparameters and slots. With accumulate there are two more slots:
        `gradient_sum`, in at least float32, and `gradient_count`, the number of gradients in the sum of each leaf. A
        row that none of them named is −0 in the sum.

    Raises:
        TypeError: k or phase is not an integer, or accumulate is not a bool.
        ValueError: k or phase is out of its range, or the optimizer already has such a slot.

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
        raise ValueError(f"phase={offset}: must be below k={every}; phase + k updates at the same steps as phase")
    as_bool(accumulate, "accumulate")
    require_optimizer("optimizer", optimizer)

    def due_at(step: Step) -> Array:
        return (jnp.asarray(step) - offset) % every == every - 1

    def of_one_step(updates: Updates, inner: Slots, own: Slots, at: StepInputs) -> tuple[Updates, Slots, Slots]:
        return *conditional_update(due_at(at.step), optimizer, updates, inner, at), own

    def of_the_mean(updates: Updates, inner: Slots, own: Slots, at: StepInputs) -> tuple[Updates, Slots, Slots]:
        due, params, treedef = due_at(at.step), at.params, trees.structure(at.params)
        gradients = match_gradients(updates, params)
        mine = {
            GRADIENT_SUM: slot_leaves(own, GRADIENT_SUM, params),
            GRADIENT_COUNT: slot_leaves(own, GRADIENT_COUNT, params, _scalar),
        }
        means: list[Any] = [None] * len(gradients)
        for i, (path, g) in enumerate(zip(trees.paths_of(params), gradients, strict=True)):
            if g is not None:
                of_leaf = {name: leaves[i] for name, leaves in mine.items()}
                means[i], new = per_leaf(_mean_and_rest, path, of_leaf, g, due)
                for name, leaf in new.items():
                    mine[name][i] = leaf
        updates, inner = conditional_update(due, optimizer, treedef.unflatten(means), inner, at)
        return updates, inner, {name: treedef.unflatten(leaves) for name, leaves in mine.items()}

    added = {
        GRADIENT_SUM: lambda params, step: fresh_slot(GRADIENT_SUM, Slot(NOTHING), params, step),
        GRADIENT_COUNT: lambda params, step: fresh_slot(GRADIENT_COUNT, Slot(shape=_scalar), params, step),
    }
    return wrap_optimizer(
        optimizer,
        "update_every",
        of_the_mean if accumulate else of_one_step,
        Own(added if accumulate else {}),
        guarded=False if accumulate else None,
        inner_roles=lambda roles: roles.of_own_age().without_scale(),
    )


def _scalar(path: str, leaf: Any) -> tuple[int, ...]:
    return ()


def _mean_and_rest(own: Slots, gradient: Any, due: Array) -> tuple[Any, Slots]:
    """The mean of a leaf's gradients including a new one, and their sum and number, which begin again if it is used."""
    total, count = _added(own[GRADIENT_SUM], gradient), own[GRADIENT_COUNT] + 1
    mean: Any = total * (1 / count)  # XLA would store a quotient in memory
    if isinstance(gradient, IndexedSlices):
        mean = rows_in_order(mean, _named(total))
    rest = jnp.where(due, jnp.full_like(total, NOTHING), total), jnp.where(due, jnp.zeros_like(count), count)
    return mean, dict(zip((GRADIENT_SUM, GRADIENT_COUNT), rest, strict=True))


def _named(total: Array) -> Array:
    """Whether any gradient in the sum named each row."""
    return jnp.any(~(jnp.signbit(total) & (total == 0)), axis=tuple(range(1, total.ndim)))


def _added(total: Array, gradient: Any) -> Array:
    """Add a gradient to the sum."""
    if not isinstance(gradient, IndexedSlices):
        return total + _named_zeros(gradient.astype(total.dtype))
    rows = combined(gradient)
    return total.at[rows.indices].add(_named_zeros(rows.values.astype(total.dtype)), mode="drop")


def _named_zeros(values: Array) -> Array:
    """Values without −0, so that a sum with them is not −0 either."""
    return jnp.where(values == 0, jnp.zeros_like(values), values)
