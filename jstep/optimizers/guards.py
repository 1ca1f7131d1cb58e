"""Guards and constraints of updates: finiteness, loss and noise scales, k-th steps, projections."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import array_type, as_bool, as_function, as_int, as_number, describe_type
from jstep.core.exceptions import setting
from jstep.core.placement import is_on_host, move_to_devices
from jstep.core.recorded_calls import makes_optimizer
from jstep.core.trees import Array, Optimizer, OptimizerLike, Params, Slots, Step, Tree, Updates
from jstep.differentiate.clipping import global_norm
from jstep.optimizers import hyperparameters as hyper
from jstep.optimizers import nested
from jstep.optimizers.chains import trained_params
from jstep.optimizers.host_slots import only_if, update_leaves
from jstep.optimizers.nested import (
    CONDITIONS,
    Conditions,
    StepInputs,
    WrapperSlots,
    call_update,
    wrap_optimizer,
)
from jstep.optimizers.rules import Slot, fresh_slot, new_start_step, slot_leaves
from jstep.optimizers.updates import Replacement, apply_updates, map_updates, wide_updates
from jstep.slots.indexed_slices import (
    IndexedSlices,
    combine_rows,
    is_slices,
    map_table,
    rows_in_order,
)
from jstep.slots.matching import match_gradients
from jstep.slots.optax_transformations import as_first_optimizer, as_optimizer
from jstep.slots.roles import AGES, Role, Roles, roles_in, roles_of
from jstep.state.train_state import MODEL_STATE, TrainState, as_state

# Skipped updates for nonfinite gradients, and other conditional updates.

LAST_FINITE_STEP = "last_finite_step"
NOT_REACHED = -1
"""What a step writes to `last_finite_step` before an update; it stays if no guard is reached."""
SKIPPED_MARK = -2
"""The value that a guard writes there if it skips the update."""


@makes_optimizer(1)
def skip_nonfinite(optimizer: OptimizerLike) -> Optimizer:
    """Skip updates for which the norm of the gradients is NaN or infinite.

    They leave params and slots unchanged. In a step of `minimize`, the model_state that the loss
    returns is not used either.

    A skipped update still advances the global step, but not the age of the slots: `start_step`
    advances, too.

    Args:
        optimizer: The optimizer to guard. Put the guard outermost: around chains, clipping and
            moving averages.

    Returns:
        An `Optimizer` with the same hyperparameters and slots, and one more: the scalar
        `last_finite_step`, the global step after the last finite update. A train step's metrics
        show `skipped`, 1 or 0. While a run is in a custom step, the slot holds a mark instead,
        which is negative: by it the run finds out whether the step skips its update. Read it before
        or after the step.

    Raises:
        ValueError: The optimizer has a slot named `last_finite_step`, for example because it is
            already guarded.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.skip_nonfinite(jstep.adam(0.5))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.float32(jnp.nan)}, optimizer)
        >>> print(state.params["w"], state.global_step, state.slots["start_step"])
        1.0 1 1

    Source: dynamic loss scaling as in Micikevicius et al., "Mixed Precision Training" (2017),
    section 3.2.
    """
    optimizer = as_optimizer("optimizer", optimizer)

    def update(
        updates: Updates, inner: Slots, outer: Slots, inputs: StepInputs
    ) -> tuple[Updates, Slots, Slots]:
        finite = all_finite(updates, inputs.params)
        updates, inner = conditional_update(
            finite, optimizer, updates, inner, inputs, is_guard=True
        )
        last = outer[LAST_FINITE_STEP]
        next_step = jnp.asarray(inputs.step).astype(last.dtype) + 1
        return updates, inner, {LAST_FINITE_STEP: jnp.where(finite, next_step, _mark_skipped(last))}

    outer = WrapperSlots({LAST_FINITE_STEP: _fresh_step}, {LAST_FINITE_STEP: Role.LAST_FINITE})

    def inner_roles(roles: Roles) -> Roles:
        return roles.with_private_age().with_order()

    return wrap_optimizer(
        optimizer, "skip_nonfinite", update, outer, guarded=True, inner_roles=inner_roles
    )


def _fresh_step(params: Params, global_step: Step) -> Array:
    return new_start_step(global_step)


def _mark_skipped(last: Array) -> Array:
    return jnp.where(last == NOT_REACHED, jnp.asarray(SKIPPED_MARK, last.dtype), last)


def last_finite_step(old: Array, new: Array) -> Array:
    """Return the slot after an update: unchanged if it was not reached, or the update was skipped.

    If a step that jstep did not make is to note its skipped updates, the value before is a mark
    itself, of which only a skipped update makes the other one.
    """
    is_skipped_by_noting_step = (new == SKIPPED_MARK) & (old < 0)
    return jnp.where((new < 0) & ~is_skipped_by_noting_step, old, new)


def all_finite(gradients: Updates, params: Params) -> Array:
    """Whether the gradients and the sum of their squares are finite.

    A finite gradient whose square overflows would make slots infinite.
    """
    return jnp.isfinite(jnp.square(global_norm(match_gradients(gradients, params))))


def conditional_update(
    condition: Array,
    optimizer: Optimizer,
    updates: Updates,
    slots: Slots,
    inputs: StepInputs,
    *,
    is_guard: bool = False,
) -> tuple[Updates, Slots]:
    """Update if `condition` is true.

    Otherwise return zero updates and unchanged slots, with `start_step` advanced.
    """
    roles = roles_of(optimizer, inputs.params)
    nested.report_condition(nested.Condition(inputs.params, condition))
    with only_if(condition):
        updates, new_slots = call_update(optimizer, updates, slots, inputs, exact=True)

    def conditional(update: object, leaf: object) -> Any:
        if isinstance(update, Replacement):
            return Replacement(_select(condition, move_to_devices(leaf), update.value))
        return jax.tree.map(functools.partial(_zero_unless, condition), update)

    updates = map_updates(
        conditional, inputs.params, updates, jax.tree.leaves(inputs.params), what="updates"
    )

    def slot(name: str, new: Any) -> Any:
        role = roles.get(name)
        old = slots[name]
        if is_guard and role in (Role.LOSS_SCALE, Role.SCALE_SINCE):
            return new  # a loss scale changes when an update is skipped
        if is_guard and role is Role.LAST_FINITE:
            return jnp.where(condition, new, _mark_skipped(old))
        if role in AGES:
            return jax.tree.map(
                lambda old_age, new_age: jnp.where(condition, new_age, old_age + 1), old, new
            )
        return jax.tree.map(select_leaf, old, new)

    def select_leaf(old_leaf: Any, new_leaf: Any) -> Any:
        # `call_with_loaded` has chosen between the values of slots in host memory.
        if is_on_host(new_leaf):
            return new_leaf
        return _select(condition, old_leaf, new_leaf)

    return updates, {name: slot(name, new) for name, new in new_slots.items()}


def _select(condition: Array, old: Array, new: Array) -> Array:
    return jax.lax.select_n(condition, old, new)  # takes less time to trace than `jnp.where`


def _zero_unless(condition: Array, update: Array) -> Array:
    # The indices of `IndexedSlices` are not trainable, and stay.
    if not trees.is_trainable(update):
        return update
    return _select(condition, jnp.zeros_like(update), update)


# Dynamic loss scaling, for float16.

LOSS_SCALE = "loss_scale"
SCALE_SINCE = "scale_since"
SMALLEST = 2.0**-126
LARGEST = 2.0**126
"""Bounds of the scale: it and its reciprocal are normal float32 numbers."""


@makes_optimizer(1)
def dynamic_loss_scale(
    optimizer: OptimizerLike, initial: float = 2.0**15, period: int = 2000, factor: float = 2.0
) -> Optimizer:
    """Loss scaling: g ← g/scale, with a dynamic scale.

    scale ·= factor after `period` updates in a row, scale /= factor at a nonfinite one. `minimize`
    multiplies the loss by the slot `loss_scale` before differentiation; its metrics show the
    unscaled loss and norms. For `apply_gradients`, differentiate `loss * jstep.loss_scale(state)`,
    and pass `scaled=True`.

    Args:
        optimizer: The inner optimizer, which sees unscaled gradients. An update whose gradients are
            not finite is skipped as by `skip_nonfinite`. Put partitions, chains, clipping and
            guards inside. Only `scope`, `skip_nonfinite`, `master_weights`, `with_moving_average`,
            `lookahead`, `cautious` and `stochastic_rounding` may wrap it.
        initial: The initial scale, > 0.
        period: The number of successive updates, ≥ 1, after which the scale grows.
        factor: The factor by which the scale grows and shrinks, > 1.

    Returns:
        An `Optimizer` with two more scalar slots: `loss_scale`, and `scale_since`, the step of its
        last change. A train step's metrics show `loss_scale`, and `skipped`, 1 or 0.

    Raises:
        ValueError: The optimizer already has one of these slots.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.dynamic_loss_scale(jstep.gradient_descent(1.0), initial=8.0)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.float32(4.0)}, optimizer, scaled=True)
        >>> infinite = {"w": jnp.float32(jnp.inf)}
        >>> state = jstep.apply_gradients(state, infinite, optimizer, scaled=True)
        >>> print(state.params["w"], state.slots["loss_scale"], state.slots["scale_since"])
        0.5 4.0 2

    Source: Micikevicius et al., "Mixed Precision Training" (2017), section 3.2;
    `torch.amp.GradScaler`.
    """
    optimizer = as_optimizer("optimizer", optimizer)
    initial_scale = as_number(initial, "initial", low=0, above=True, high=LARGEST)
    length = as_int(period, "period", at_least=1)
    growth = as_number(factor, "factor", low=1, above=True)

    def update(
        updates: Updates, inner: Slots, outer: Slots, inputs: StepInputs
    ) -> tuple[Updates, Slots, Slots]:
        scale = outer[LOSS_SCALE]
        changed_at = outer[SCALE_SINCE]
        finite = all_finite(updates, inputs.params)
        updates, inner = conditional_update(
            finite, optimizer, unscale(updates, scale), inner, inputs, is_guard=True
        )
        next_step = jnp.asarray(inputs.step).astype(changed_at.dtype) + 1
        grows = finite & (next_step - changed_at >= length)
        larger = scale * growth
        smaller = jnp.maximum(scale / growth, SMALLEST)
        new = jnp.where(finite, jnp.where(grows & (larger <= LARGEST), larger, scale), smaller)
        since = jnp.where(finite & ~grows, changed_at, next_step)
        return updates, inner, {LOSS_SCALE: new, SCALE_SINCE: since}

    fresh = {
        LOSS_SCALE: lambda params, step: jnp.array(initial_scale, dtype=jnp.float32),
        SCALE_SINCE: _fresh_step,
    }
    outer = WrapperSlots(fresh, {LOSS_SCALE: Role.LOSS_SCALE, SCALE_SINCE: Role.SCALE_SINCE})
    return wrap_optimizer(
        optimizer, "dynamic_loss_scale", update, outer, guarded=True, inner_roles=_inner_roles
    )


def loss_scale(state: TrainState) -> Array:
    """Return the factor by which `dynamic_loss_scale` wants the loss multiplied: a float32 scalar.

    Without a `dynamic_loss_scale` it is 1.

    Args:
        state: A `TrainState`, of which the result is an array in a trace, too.

    Raises:
        ValueError: The state was made by hand, so that which of its slots is a loss scale is not
            known.

    Example:
        >>> import jax, jax.numpy as jnp, jstep
        >>> optimizer = jstep.dynamic_loss_scale(jstep.gradient_descent(0.5), initial=8.0)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> loss_fn = lambda params: params["w"] ** 2
        >>> grads = jax.grad(lambda params: loss_fn(params) * jstep.loss_scale(state))(state.params)
        >>> state = jstep.apply_gradients(state, grads, optimizer, scaled=True)
        >>> print(grads["w"], state.params["w"])
        16.0 0.0

    Source: `torch.amp.GradScaler.scale`.
    """
    roles = roles_in(as_state(state))
    if not roles and state.slots.keys() - {MODEL_STATE}:
        raise ValueError(
            "loss_scale: the state must be made by TrainState.create, got one by hand, "
            "whose slots have no roles"
        )
    names = roles.names_with(Role.LOSS_SCALE)
    return next(
        (state.slots[name] for name in names if name in state.slots), jnp.ones((), jnp.float32)
    )


def _inner_roles(roles: Roles) -> Roles:
    return roles.with_private_age().with_order().with_misplaced(Role.LOSS_SCALE)


def current_loss_scale(roles: Roles, slots: Slots) -> Array | None:
    names = _outermost("dynamic_loss_scale", roles, Role.LOSS_SCALE)
    return next((slots[name] for name in names if name in slots), None)


def _outermost(wrapper_name: str, roles: Roles, *wanted: Role) -> list[str]:
    """The slots of a wrapper that must be outermost; raise if it is inside others."""
    names = roles.names_with(*wanted)
    misplaced = [name for name in names if name in roles.misplaced]
    if misplaced:
        raise ValueError(
            f"{wrapper_name}: must be outermost, got {misplaced} inside; "
            f"use {wrapper_name}(chain(...))"
        )
    return names


def unscale(updates: Updates, scale: Any) -> Updates:
    """The gradients divided by the scale, in at least float32: in float16 they would underflow."""
    # XLA recomputes a product in each kernel that reads it, but would store a quotient in memory.
    return wide_updates(updates, lambda g: g * (1 / scale).astype(g.dtype))


# The gradient noise scale, averaged over steps.

NOISE_SLOTS = {
    "noise/gradient_noise": Role.NOISE,
    "noise/gradient_square": Role.NOISE_SQUARE,
    "noise/weight": Role.NOISE_WEIGHT,
}


@makes_optimizer(1)
def with_noise_scale(optimizer: OptimizerLike, decay: float = 0.99) -> Optimizer:
    """Average the gradient noise in slots, to report the gradient noise scale tr Σ/|G|².

    Σ is the covariance of the gradient of one example, G the mean gradient.
    `minimize(..., num_microbatches=n, metrics=("noise_scale",))` measures both, and noise_scale,
    from the gradients of the n microbatches:

        tr Σ = (small − big)·W/(n − 1),  |G|² = big − tr Σ/W

    big is the squared norm of the mean gradient, small the weighted mean of the squared norms of
    the microbatch gradients, W the number of examples in the batch or the sum of the values of
    `weight_fn`. Gradients are those of the loss, before clipping, noise and weight decay.

    Args:
        optimizer: The whole optimizer, including chains and partitions. `dynamic_loss_scale` must
            wrap this wrapper; `skip_nonfinite`, `master_weights`, `update_every` and `scope` may.
        decay: The decay of the averages, in [0, 1): 0.99 leaves a spread of about 5 % at n = 4,
            0.999 of 2 %.

    Returns:
        An `Optimizer` with three more scalar slots, `noise/gradient_noise`, `noise/gradient_square`
        and `noise/weight`, which corrects the bias of the averages. A step that does not request
        `noise_scale`, or that a guard skipped, changes no slot.

        A train step's metrics show `gradient_noise` (tr Σ), `gradient_square` (|G|²) and
        `noise_scale`, in examples or in the unit of `weight_fn`; NaN until they are known.

    Raises:
        ValueError: The optimizer already has slots of these names.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.with_noise_scale(jstep.gradient_descent(0.1))
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> def loss_fn(params, x):
        ...     return -jnp.mean(params["w"] * x)
        >>> train_step = jstep.minimize(
        ...     loss_fn, optimizer, num_microbatches=2, metrics=("noise_scale",)
        ... )
        >>> state, metrics = train_step(state, jnp.array([1.0, 3.0]))
        >>> noise, square = metrics["gradient_noise"], metrics["gradient_square"]
        >>> print(noise, square, round(float(metrics["noise_scale"]), 4))
        2.0 3.0 0.6667

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.
    """
    optimizer = as_optimizer("optimizer", optimizer)
    share = 1 - hyper.constant("decay", decay, low=0, high=1, below=True)

    def update(
        updates: Updates, inner: Slots, outer: Slots, inputs: StepInputs
    ) -> tuple[Updates, Slots, Slots]:
        updates, inner = call_update(optimizer, updates, inner, inputs, exact=True)
        measured = inputs.context.noise
        if measured is None:
            return updates, inner, outer
        is_measured = jnp.isfinite(measured.noise) & jnp.isfinite(measured.square)

        def averaged(old: Array, value: Array) -> Array:
            return jnp.where(is_measured, old + share * (value.astype(old.dtype) - old), old)

        values = (measured.noise, measured.square, jnp.ones((), jnp.float32))
        new = {
            name: averaged(outer[name], value)
            for name, value in zip(NOISE_SLOTS, values, strict=True)
        }
        return updates, inner, new

    def inner_roles(roles: Roles) -> Roles:
        return roles.with_misplaced(Role.LOSS_SCALE)

    outer = WrapperSlots(
        dict.fromkeys(NOISE_SLOTS, lambda params, step: jnp.zeros((), jnp.float32)), NOISE_SLOTS
    )
    return wrap_optimizer(
        optimizer, "with_noise_scale", update, outer, inner_roles=inner_roles, takes_context=True
    )


def noise_slots(roles: Roles) -> list[str]:
    """The slots of the averages, in the order of `NOISE_SLOTS`; raise if they are not outermost."""
    return _outermost("with_noise_scale", roles, *NOISE_SLOTS.values())


def check_noise_slots(roles: Roles) -> None:
    if not noise_slots(roles):
        raise ValueError(
            "metrics: 'noise_scale' needs jstep.with_noise_scale(optimizer), "
            "for the state and the step"
        )


def noise_metrics(roles: Roles, slots: Slots) -> dict[str, Array]:
    noise_slot, square_slot, weight_slot = noise_slots(roles)
    # NaN before the first measurement, when the weight is 0.
    noise = slots[noise_slot] / slots[weight_slot]
    square = slots[square_slot] / slots[weight_slot]
    scale = jnp.where(square > 0, noise / square, jnp.nan)
    return {"noise_scale": scale, "gradient_noise": noise, "gradient_square": square}


# Update only at every k-th step, optionally with accumulated gradients.

GRADIENT_SUM = "gradient_sum"
GRADIENT_COUNT = "gradient_count"
NOTHING = -0.0
"""The sum of no gradients: −0 + x = x for every x."""


@makes_optimizer(2)
def update_every(
    optimizer: OptimizerLike, k: int, *, phase: int = 0, accumulate: bool = False
) -> Optimizer:
    """Update at every k-th step, when (N − phase) mod k = k − 1, where N is the global step.

    At the other steps the update is zero and the slots stay unchanged, even if the gradients are
    NaN. Schedules are evaluated at the global step; ages count the optimizer's own updates.
    Averages inside it move at its own updates; with `every` they also wait for their global steps:
    make `every` a multiple of k, and `start_step` equal to phase modulo k. Averages around it move
    at every step.

    Args:
        optimizer: The optimizer. If no leaf has a gradient, it skips the step: a due update is not
            made later.
        k: The number of steps from one update to the next, ≥ 1.
        phase: The number of steps by which updates are delayed, 0 ≤ phase < k.
        accumulate: Whether a leaf's update uses the mean of its gradients since its last update. A
            leaf without a gradient at the step of an update keeps its mean until the next one.

    Returns:
        An `Optimizer` with the same hyperparameters and slots. With accumulate there are two more
        slots: `gradient_sum`, in at least float32, and `gradient_count`, the number of gradients in
        the sum of each leaf.

    Raises:
        ValueError: k or phase is out of its range, or the optimizer already has such a slot.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.update_every(jstep.gradient_descent(1.0), 2, accumulate=True)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> for g in (1.0, 3.0):
        ...     state = jstep.apply_gradients(state, {"w": jnp.float32(g)}, optimizer)
        ...     print(state.params["w"])
        0.0
        -2.0

    Source: n_critic in Arjovsky et al., "Wasserstein GAN" (2017), algorithm 1; `optax.MultiSteps`
    to accumulate.
    """
    optimizer = as_first_optimizer("update_every(optimizer, k)", optimizer, k)
    every = as_int(k, "k", at_least=1)
    offset = as_int(phase, "phase", at_least=0)
    if offset >= every:
        raise ValueError(
            f"phase={offset}: must be below k={every}; phase + k updates at the same steps as phase"
        )
    as_bool(accumulate, "accumulate")
    sums: dict[str, Slot] = {}
    if accumulate:
        sums = {GRADIENT_SUM: Slot(NOTHING), GRADIENT_COUNT: Slot(shape=lambda path, leaf: ())}

    def update(
        updates: Updates, inner: Slots, outer: Slots, inputs: StepInputs
    ) -> tuple[Updates, Slots, Slots]:
        step = jnp.asarray(inputs.step)
        due = jax.lax.rem(step, jnp.full_like(step, every)) == (offset - 1) % every
        if not accumulate:
            updates, inner = conditional_update(due, optimizer, updates, inner, inputs)
            return updates, inner, outer
        trained = trained_params(optimizer, inputs.params)
        gradients = match_gradients(updates, trained)
        treedef = trees.structure(trained)
        leaves = {
            name: slot_leaves(outer, name, trained, spec.shape) for name, spec in sums.items()
        }
        calls: list[Any] = []
        for g in gradients:
            rule = _mean_and_sums if isinstance(g, IndexedSlices) else _mean_and_sums_of_dense
            calls.append(None if g is None else (rule, g, due))
        means = update_leaves(trained, leaves, calls)
        updates, inner = conditional_update(due, optimizer, treedef.unflatten(means), inner, inputs)
        return updates, inner, {name: treedef.unflatten(values) for name, values in leaves.items()}

    def fresh(name: str, spec: Slot, params: Params, step: Step) -> Any:
        return fresh_slot(name, spec, trained_params(optimizer, params), step)

    outer = WrapperSlots(
        {name: functools.partial(fresh, name, spec) for name, spec in sums.items()},
        by_step=f"update_every(…, {every})" if every > 1 else None,
    )
    is_guarded = False if accumulate else None  # a nonfinite gradient would reach the sum
    return wrap_optimizer(
        optimizer, "update_every", update, outer, guarded=is_guarded, inner_roles=_inner_roles
    )


def _mean_and_sums(slots: Slots, gradient: Tree, due: Array) -> tuple[Any, Slots]:
    """The mean of a leaf's gradients, and their sum and number, reset if the mean is used."""
    total = slots[GRADIENT_SUM]
    if isinstance(gradient, IndexedSlices):
        rows = combine_rows(gradient)
        total = total.at[rows.indices].add(
            _named_zeros(rows.values.astype(total.dtype)), mode="drop"
        )
    else:
        total = total + _named_zeros(gradient.astype(total.dtype))
    count = slots[GRADIENT_COUNT] + 1
    mean: Any = total * (1 / count)  # XLA would store a quotient in memory
    if isinstance(gradient, IndexedSlices):
        named = ~(jnp.signbit(total) & (total == 0))  # any gradient in the sum names it
        mean = rows_in_order(mean, jnp.any(named, axis=tuple(range(1, total.ndim))))
    new_sum = jnp.where(due, jnp.full_like(total, NOTHING), total)
    new_count = jnp.where(due, jnp.zeros_like(count), count)
    return mean, {GRADIENT_SUM: new_sum, GRADIENT_COUNT: new_count}


# One trace for all leaves of a shape, as in leafwise.
_mean_and_sums_of_dense = jax.jit(_mean_and_sums)


def _named_zeros(values: Array) -> Array:
    """Values without −0, so that a sum with them is not −0 either."""
    return jnp.where(values == 0, jnp.zeros_like(values), values)


# Constraints of updates: projections of the parameters, and agreement with the gradients.

MIN_SHARE = 1e-3


@makes_optimizer(2)
def with_projection(optimizer: OptimizerLike, fn: Callable[[Params], Params]) -> Optimizer:
    """Project the parameters after each update: p ← fn(p + u).

    The new parameters are bitwise identical to `fn(p + u)`. The metric `update_norm` is the norm of
    the whole move.

    Args:
        optimizer: The optimizer. Around the projection belong only wrappers that do not change
            updates.
        fn: `fn(params) -> params`, a pure function that keeps structure, shapes and dtypes. Below a
            label of `partition`, the leaves of other labels are None. Results for integer leaves
            are ignored.

    Returns:
        An `Optimizer` with the same slots and hyperparameters. A leaf without an update keeps its
        value. Sparse updates are added to their tables before the projection.

    Raises:
        ValueError: In a step, `fn` returns another structure, shape or dtype.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.with_projection(
        ...     jstep.gradient_descent(0.125),
        ...     lambda params: jstep.clip_by_value(params, -0.25, 0.25),
        ... )
        >>> state = jstep.TrainState.create({"w": jnp.array([0.0, 3.0])}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.array([-1.0, -1.0])}, optimizer)
        >>> print(state.params["w"])
        [0.125 0.25 ]

    Source: Bertsekas, "On the Goldstein-Levitin-Polyak gradient projection method" (1976).
    """
    optimizer = as_optimizer("optimizer", optimizer)
    as_function(fn, "fn", "(params) -> params, such as a clip of each leaf", takes=1)

    def update(
        updates: Updates, inner: Slots, outer: Slots, inputs: StepInputs
    ) -> tuple[Updates, Slots, Slots]:
        params = inputs.params
        conditions = Conditions()
        with setting(CONDITIONS, (*CONDITIONS.get(), conditions)):
            updates, inner = call_update(optimizer, updates, inner, inputs, exact=True)
        moved = apply_updates(params, updates)
        new = _projected_leaves(moved, fn(moved))

        def projected(
            _: object, new: Any, old_leaf: Any, moved_leaf: Any, condition: Any
        ) -> Replacement:
            if condition is None:
                return Replacement(new)
            old_leaf = move_to_devices(old_leaf)
            # Behind a guard, or if no update was due, another element of a chain may still move the
            # parameter.
            return Replacement(
                jnp.where(condition | jnp.any(moved_leaf != old_leaf), new, old_leaf)
            )

        leaves = (
            jax.tree.leaves(params),
            jax.tree.leaves(moved),
            nested.update_conditions(params, conditions),
        )
        return map_updates(projected, params, updates, new, *leaves, what="updates"), inner, {}

    return wrap_optimizer(optimizer, "with_projection", update)


def _projected_leaves(params: Params, projected: object) -> list[Any]:
    leaves = trees.flatten_like(params, projected, "the result of fn", may_leave_out=False)
    for i, ((path, leaf), new) in enumerate(
        zip(trees.leaves_with_paths(params), leaves, strict=True)
    ):
        if not trees.is_trainable(leaf):
            continue
        if not trees.is_array_or_number(new):
            raise TypeError(
                f"fn: must return an array at {trees.quote_path(path)}, got {describe_type(new)}"
            )
        old_type = array_type(np.shape(leaf), jnp.result_type(leaf))
        new_type = array_type(np.shape(new), jnp.result_type(new))
        if old_type != new_type:
            raise ValueError(
                f"fn: must return {old_type} at {trees.quote_path(path)}, as in params, "
                f"got {new_type}"
            )
        leaves[i] = jnp.asarray(new)
    return leaves


@makes_optimizer(1)
def cautious(optimizer: OptimizerLike) -> Optimizer:
    """Cautious updates: u ← u·mask/max(mean(mask), 0.001), mask = (u·g < 0), for each leaf.

    Args:
        optimizer: The optimizer that turns gradients g into updates u, without `decay_weights`:
            apply it outside.

    Returns:
        An `Optimizer` with the same slots and hyperparameters.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.cautious(jstep.momentum(1.0, 0.9))
        >>> state = jstep.TrainState.create({"w": [0.0, 0.0]}, optimizer)
        >>> for g in ([1.0, 1.0], [1.0, -0.5]):
        ...     state = jstep.apply_gradients(state, {"w": [jnp.float32(x) for x in g]}, optimizer)
        >>> print(*state.params["w"])
        -2.9 -1.0

    Source: Liang et al., "Cautious Optimizers" (2024).
    """
    optimizer = as_optimizer("optimizer", optimizer)

    def masked(u: object, g: Any) -> Any:
        g = g.to_dense() if is_slices(g) else jnp.asarray(g)

        def masked_table(u: Array) -> Array:
            agrees = (((u < 0) & (g > 0)) | ((u > 0) & (g < 0))).astype(u.dtype)
            return u * (agrees / jnp.maximum(jnp.mean(agrees), MIN_SHARE))

        return map_table(masked_table, u)

    def update(
        updates: Updates, inner: Slots, outer: Slots, inputs: StepInputs
    ) -> tuple[Updates, Slots, Slots]:
        gradients = trees.flatten_like(inputs.params, updates, "gradients", is_leaf=is_slices)
        updates, inner = call_update(optimizer, updates, inner, inputs)
        return map_updates(masked, inputs.params, updates, gradients, what="updates"), inner, {}

    return wrap_optimizer(optimizer, "cautious", update)
