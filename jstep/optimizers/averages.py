"""Copies that follow the parameters: exponential moving averages, and Lookahead's slow weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_bool, as_function, as_int, as_string, describe_type
from jstep.core.device_values import as_scalar
from jstep.core.meshes import supports_meshes
from jstep.core.new_arrays import copy_as, full_like
from jstep.core.placement import move_to_devices
from jstep.core.public_names import explains_attributes, find_hint
from jstep.core.recorded_calls import makes_optimizer
from jstep.core.selection import VarList
from jstep.core.tracebacks import explains_arguments, shortens_tracebacks
from jstep.core.trees import (
    Array,
    Held,
    Optimizer,
    OptimizerLike,
    P,
    Params,
    ScalarOrSchedule,
    Slots,
    Step,
    Updates,
)
from jstep.optimizers import hyperparameters, nested
from jstep.optimizers.chains import trained_params
from jstep.optimizers.host_slots import update_leaves
from jstep.optimizers.hyperparameters import as_hyperparameter, check_prefix
from jstep.optimizers.leaf_values import mask
from jstep.optimizers.nested import StepInputs, WrapperSlots, wrap_optimizer
from jstep.optimizers.rules import Slot, fresh_slot, slot_age
from jstep.optimizers.updates import add, apply_updates, is_update
from jstep.slots.indexed_slices import is_slices
from jstep.slots.optax_transformations import as_optimizer
from jstep.slots.roles import Role, Roles
from jstep.state.slots import AVERAGE_SLOT, find_averages, find_slot, has_name, params_from_slots
from jstep.state.train_state import MODEL_STATE, TrainState

# Exponential moving averages of parameters, and the wrapper that keeps them.

DECAY = "decay"
RATE = "rate"


@explains_attributes
@explains_arguments
@dataclasses.dataclass(frozen=True)
class ExponentialMovingAverage:
    """Moving average: avg −= (1 − d) · (avg − p).

    The decay d is `decay`, or min(decay, (1 + n) / (10 + n)) with num_updates.

    Attributes:
        decay: The decay in [0, 1], such as 0.999; a schedule, read at the step before the update;
            or `held`, for `with_moving_average` only. None if `rate` is given.
        num_updates: Whether the decay grows with the number n of updates: with
            `with_moving_average` the global step after the update, so that n is 1 at the first one.
        zero_debias: Whether averages start from zero and are bias-corrected: the rate 1 − d becomes
            (1 − d) / (1 − dⁿ), where n is their age.
        name: The name of the slot, and the last part of `average_name`.
        start_step: The averages equal the parameters up to and including this step.
        every: After start_step, the averages move only at the steps start_step + every,
            start_step + 2·every, …. With decay=1.0 and zero_debias they are then the mean of the
            parameters at those steps: stochastic weight averaging.
        rate: The rate 1 − d in place of the decay, in [0, 1], such as 0.001; also a schedule, or
            `held`. A decay that is a schedule or `held` is a float32: at 0.999999 its rate is off
            by 1.3 %.
        model_state: Whether `with_moving_average` averages the floating leaves of the model state,
            too: `averaged_model_state`.
        per_step: Whether the averages of `with_moving_average` move once a step, whichever leaves
            have a gradient: at the update that increments the step or, if none does, at the end of
            the step by `increment_global_step(state, optimizer=optimizer)`. By default the average
            of a leaf moves at each update of that leaf.

    Raises:
        ValueError: A number is out of range, `name` is empty, or not exactly one of `decay` and
            `rate` is given.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> ema = jstep.ExponentialMovingAverage(0.5)
        >>> averages = ema.init({"w": jnp.float32(0.0)})
        >>> print(ema.apply(averages, {"w": jnp.float32(1.0)})["w"])
        0.5

    Source: Polyak and Juditsky (1992); Kingma and Ba, "Adam" (2014), section 3, for the bias;
    `tf.train.ExponentialMovingAverage`.
    """

    decay: ScalarOrSchedule | None = None
    num_updates: bool = False
    zero_debias: bool = False
    name: str = AVERAGE_SLOT
    _: dataclasses.KW_ONLY
    start_step: int = 0
    every: int = 1
    rate: ScalarOrSchedule | None = None
    model_state: bool = False
    per_step: bool = False

    def __post_init__(self) -> None:
        if (self.decay is None) == (self.rate is None):
            raise ValueError(
                f"decay={self.decay}, rate={self.rate}: exactly one must be given, "
                "where rate is 1 − decay"
            )
        argument, value = self._speed
        object.__setattr__(self, argument, as_hyperparameter(argument, value, low=0, high=1))
        for flag in ("zero_debias", "model_state", "per_step"):
            as_bool(getattr(self, flag), flag)
        try:
            as_bool(self.num_updates, "num_updates")
        except TypeError as error:
            hint = find_hint("ExponentialMovingAverage(num_updates=n)")
            raise TypeError(f"{error}{hint}") from None
        check_prefix("name", as_string(self.name, "name"))
        object.__setattr__(self, "start_step", as_int(self.start_step, "start_step", at_least=0))
        object.__setattr__(self, "every", as_int(self.every, "every", at_least=1))

    @supports_meshes("params")
    def init(self, params: Params) -> Any:
        """Initial averages: copies of the parameters, or zeros with zero_debias and start_step=0.

        Args:
            params: Any tree. float16 and bfloat16 leaves are averaged in float32.

        Returns:
            A tree with the structure of params; None for leaves that cannot be averaged, such as
            integers.
        """

        def leaf(p: Any) -> Any:
            if not trees.is_trainable(p):
                return None
            dtype = trees.compute_dtype(jnp.result_type(p))
            if self._starts_at_zeros:
                return full_like(p, 0.0, dtype)
            return copy_as(p, dtype)

        return jax.tree.map(leaf, params)

    @shortens_tracebacks
    @supports_meshes("averages", "params")
    def apply(
        self,
        averages: Any,
        params: Params,
        num_updates: Step | None = None,
        *,
        age: Step | None = None,
    ) -> Any:
        """Update the averages with new values of the parameters.

        Args:
            averages: The averages returned by `init` or `apply`.
            params: The new values.
            num_updates: The number n ≥ 1 of updates after which params have these values.
            age: The number of values averaged so far, including this one.

        Raises:
            TypeError: `decay` or `rate` is held.
            ValueError: num_updates is required but missing, or is negative; or the structures
                differ.
        """
        weight = self._weight(num_updates, age)
        leaves, treedef = trees.flatten(params)
        new: list[Any] = []
        for average, p in zip(
            trees.flatten_like(params, averages, "averages"), leaves, strict=True
        ):
            new.append(None if average is None else move_average(average, p, weight))
        return treedef.unflatten(new)

    @property
    def _speed(self) -> tuple[str, Any]:
        return (DECAY, self.decay) if self.rate is None else (RATE, self.rate)

    def _weight(self, num_updates: Step | None = None, age: Step | None = None) -> Any:
        """The weight of p: `apply` adds weight · (p − avg)."""
        argument, speed = self._speed
        needed = (
            self.num_updates or self._waits or callable(speed) or (self.zero_debias and age is None)
        )
        if num_updates is None and needed:
            raise ValueError(
                "num_updates=None: must be given for this average; "
                "pass num_updates=state.global_step"
            )
        if isinstance(speed, Held):
            raise TypeError(
                f"{argument}=held({speed.name!r}, …): its value is in the state; "
                "use jstep.with_moving_average"
            )
        if num_updates is not None:
            _count("num_updates", num_updates)
        if age is not None:
            _count("age", age)
        if age is None and self.zero_debias:  # if there was one update for each number from 1 to n
            age = jnp.maximum((jnp.asarray(num_updates) - self.start_step) // self.every, 1)
        weight = self._weight_when_due(num_updates, age)
        if self._waits:
            # 1 up to start_step, where the averages are the parameters, and then 0 except at the
            # steps that are due.
            later = jnp.where(
                self._is_due(num_updates), jnp.asarray(weight, trees.default_float()), 0.0
            )
            weight = jnp.where(jnp.asarray(num_updates) <= self.start_step, 1.0, later)
        return weight

    @property
    def _starts_at_zeros(self) -> bool:
        return self.zero_debias and not self.start_step

    @property
    def _waits(self) -> bool:
        return self.start_step > 0 or self.every > 1

    def _is_due(self, num_updates: Step | None) -> Array:
        updates = jnp.asarray(num_updates) - self.start_step
        return (updates > 0) & (updates % self.every == 0)

    def _weight_when_due(self, num_updates: Step | None, age: Step | None) -> Any:
        # In terms of 1 − d, because computing 1 − d for d near 1 would lose digits.
        argument, speed = self._speed
        if callable(speed):
            speed = hyperparameters.value_at(argument, speed, jnp.asarray(num_updates) - 1)
        rate: Any = 1 - speed if argument == DECAY else speed
        if self.num_updates:
            rate = jnp.maximum(
                jnp.asarray(rate, trees.default_float()),
                9 / (10 + _count("num_updates", num_updates)),
            )
        if self.zero_debias:
            n = jnp.maximum(_count("age", age), 1.0)
            rate = jnp.asarray(rate, n.dtype)
            # For d = 1 the limit of (1 − d) / (1 − dⁿ) is 1/n, the plain mean.
            divisor = -jnp.expm1(n * jnp.log1p(-rate))
            rate = jnp.where(rate > 0, rate / jnp.where(rate > 0, divisor, 1.0), 1 / n)
        return rate

    def average_name(self, path: str) -> str:
        """TF's name of a parameter's average, `path/name`, for `Saver.restore(…, names=…)`.

        Example:
            >>> import jstep
            >>> jstep.ExponentialMovingAverage(0.9).average_name("dense/kernel")
            'dense/kernel/ExponentialMovingAverage'
        """
        if path != "":
            as_string(path, "path", "the path of a parameter, such as 'dense/kernel'")
        return f"{path}/{self.name}" if path else self.name


def _count(name: str, value: object) -> Array:
    return jnp.asarray(as_scalar(value, name, low=0, integer=True)).astype(trees.default_float())


@jax.jit  # one trace for all leaves of a shape, as in leafwise
def move_average(average: Array, p: Array, rate: Array) -> Array:
    rate = jnp.asarray(rate).astype(average.dtype)
    p = p.astype(average.dtype)
    moved = average - rate * (average - p)
    # Exactly the parameter or exactly the average, without rounding or 0 · ∞.
    return jnp.where(rate >= 1, p, jnp.where(rate > 0, moved, average))


def _move_leaf(slots: Slots, p: Array, u: object, weight: Array) -> tuple[None, Slots]:
    moved = p if u is None else add(p, u)
    return None, {AVERAGE_SLOT: move_average(slots[AVERAGE_SLOT], moved, weight)}


@makes_optimizer(2)
def with_moving_average(
    optimizer: OptimizerLike,
    ema: ExponentialMovingAverage,
    var_list: VarList = None,
    initial: Callable[[Params], Params] | Params = None,
) -> Optimizer:
    """Keep moving averages of the parameters, updated after each update of an optimizer.

    Args:
        optimizer: The whole optimizer, including chains: changes by outer wrappers are not
            averaged.
        ema: The average. At the update N → N + 1 a schedule is read at N; it is the hyperparameter
            `name/decay` or `name/rate`.
        var_list: The leaves to average; None for all.
        initial: The values from which the averages start: a function `(params) -> params`, or a
            tree like params, in which leaves that are not averaged may be None; None for copies of
            the parameters.

    Returns:
        An `Optimizer` with one more slot, named `ema.name`. Leaves that a `partition` freezes have
        no average. With zero_debias, the age of averages is the optimizer's `start_step`, or around
        a `partition` one for each label, `with_moving_average/label/start_step`. Averages with
        start_step, every or per_step have an age of their own,
        `with_moving_average/name/start_step`. Inside `skip_nonfinite`, a skipped update leaves the
        averages unchanged; inside `master_weights`, the master weights are averaged.

    Raises:
        ValueError: The optimizer already has a slot of that name; initial is given for averages
            that start from zeros (zero_debias) or from the parameters at start_step; or (at `init`)
            an entry of var_list matches nothing, or initial has another structure or shape than
            params.

    Example:
        >>> import jstep
        >>> ema = jstep.ExponentialMovingAverage(0.99)
        >>> optimizer = jstep.with_moving_average(jstep.momentum(0.1, 0.9), ema)
        >>> jstep.get_slot_names(jstep.TrainState.create({"w": 1.0}, optimizer))
        ['ExponentialMovingAverage', 'momentum']

    Source: `tf.contrib.opt.MovingAverageOptimizer`.
    """
    optimizer = as_optimizer("optimizer", optimizer)
    if not isinstance(ema, ExponentialMovingAverage):
        raise TypeError(
            f"ema={ema!r}: must be an ExponentialMovingAverage, got {describe_type(ema)}; "
            "a decay is given to one: jstep.ExponentialMovingAverage(0.999)"
        )
    if initial is not None and (ema.zero_debias or ema.start_step):
        raise ValueError(
            "initial: must be None for averages with zero_debias or a start_step, "
            "which start elsewhere"
        )
    if trees.is_function(initial):
        as_function(initial, "initial", "(params) -> params", takes=1)
    averaged = mask("var_list", var_list)
    weight_slots = [f"{ema.name}/weight"] if ema.model_state else []  # for `move_model_state`
    argument, speed = ema._speed
    hyper = {f"{ema.name}/{argument}": speed} if callable(speed) or isinstance(speed, Held) else {}

    def init_averages(params: Params, global_step: Step) -> Any:
        leaves, treedef = trees.flatten(params)
        updated = treedef.flatten_up_to(trained_params(optimizer, params))
        chosen = [flag and p is not None for flag, p in zip(averaged(params), updated, strict=True)]
        if initial is not None:
            leaves = _initial(initial, params, chosen)
        return ema.init(
            treedef.unflatten([p if flag else None for p, flag in zip(leaves, chosen, strict=True)])
        )

    def update(
        updates: Updates, inner: Slots, outer: Slots, inputs: StepInputs
    ) -> tuple[Updates, Slots, Slots]:
        gradients = trees.flatten_like(inputs.params, updates, "gradients", is_leaf=is_slices)
        updates, inner = nested.call_update(optimizer, updates, inner, inputs, exact=True)
        if ema.per_step and not nested.INCREMENTS.get():
            return updates, inner, outer
        current_ema = ema
        if hyper:
            speed_now = inputs.h[f"{ema.name}/{argument}"]
            current_ema = dataclasses.replace(ema, **{argument: speed_now})
        averages, weight = update_averages(current_ema, outer[ema.name], updates, gradients, inputs)
        weights = dict.fromkeys(weight_slots, jnp.asarray(weight, jnp.float32))
        return updates, inner, {ema.name: averages, **weights}

    role = Role.COPY if initial is None and not ema._starts_at_zeros else Role.AVERAGE
    # Averages that do not move at each update have a separate age; the others use the optimizer's.
    waits = ema.zero_debias and (ema._waits or ema.per_step)
    counted: Callable[[Any], Any] | None = None
    age_scope = None
    if waits:
        counted = functools.partial(_is_due_next, ema)
        age_scope = f"with_moving_average/{ema.name}"
    by_step = None
    if ema.every > 1 and not ema.per_step:
        by_step = f"{ema.name} (every={ema.every})"
    outer = WrapperSlots(
        {ema.name: init_averages, **dict.fromkeys(weight_slots, _zero_weight)},
        {ema.name: role, **dict.fromkeys(weight_slots, Role.LAST_WEIGHT)},
        {ema.name: "weight"},
        averages=[ema.name],
        hyper=hyper,
        aged=ema.zero_debias,
        counted=counted,
        age_scope=age_scope,
        per_step=ema.per_step,
        by_step=by_step,
    )
    return wrap_optimizer(optimizer, "with_moving_average", update, outer)


def _is_due_next(ema: ExponentialMovingAverage, step: Any) -> Any:
    return ema._is_due(jnp.asarray(step) + 1)


def _zero_weight(params: Params, step: Any) -> Array:
    return jnp.zeros((), jnp.float32)


class _Weights(NamedTuple):
    """The weights of new values in the averages of one age; None: the average stays.

    Attributes:
        updated: The weight of the new value of a parameter that has a gradient.
        unchanged: That of the value of a parameter without one.
    """

    updated: Any
    unchanged: Any


def update_averages(
    ema: ExponentialMovingAverage,
    averages: Params,
    updates: Updates,
    gradients: Sequence[Any],
    inputs: StepInputs,
) -> tuple[Params, Any]:
    """Move the averages to the updated parameters; return them and the weight of the new values.

    `gradients` are the leaves that the optimizer got: one without a gradient has no new value.
    """
    params = inputs.params
    next_step = jnp.asarray(inputs.step) + 1
    leaves = trees.flatten_like(params, averages, "averages")
    new_updates = trees.flatten_like(params, updates, "updates", is_leaf=is_update)
    weights: dict[int, _Weights] = {}  # by age, which the leaves of a label share

    def weights_of(start: Any) -> _Weights:
        if id(start) not in weights:
            age = None if start is None else slot_age(inputs.step, start)
            unchanged = None
            if ema._starts_at_zeros:
                # An average that starts at zeros becomes the first value, even without a gradient.
                unchanged = jnp.where((age == 1) & ema._is_due(next_step), 1.0, 0.0)
            weights[id(start)] = _Weights(ema._weight(next_step, age), unchanged)
        return weights[id(start)]

    def call(average: object, p: object, u: object, g: object, start: object) -> Any:
        if average is None:
            return None
        leaf_weights = weights_of(start)
        weight = leaf_weights.unchanged if g is None and not ema.per_step else leaf_weights.updated
        return None if weight is None else (_move_leaf, p, u, weight)

    calls = list(map(call, leaves, jax.tree.leaves(params), new_updates, gradients, inputs.starts))
    update_leaves(params, {AVERAGE_SLOT: leaves}, calls)
    weight = next((leaf_weights.updated for leaf_weights in weights.values()), 0.0)
    return trees.structure(params).unflatten(leaves), weight


def _initial(initial: Any, params: Params, averaged: Sequence[bool]) -> list[Any]:
    # A model may be callable, and is a tree.
    tree = initial(params) if trees.is_function(initial) else initial
    values = trees.flatten_like(params, tree, "initial", may_leave_out=not all(averaged))
    leaves = []
    for (path, leaf), value, is_averaged in zip(
        trees.leaves_with_paths(params), values, averaged, strict=True
    ):
        if not (is_averaged and trees.is_trainable(leaf)):
            leaves.append(leaf)
            continue
        if value is None or np.shape(value) != np.shape(leaf):
            have = "nothing" if value is None else f"shape {np.shape(value)}"
            raise ValueError(
                f"initial: must have shape {np.shape(leaf)} at {trees.quote_path(path)}, got {have}"
            )
        leaves.append(jnp.asarray(value).astype(trees.compute_dtype(jnp.result_type(leaf))))
    return leaves


def averaged_params(state: TrainState[P], name: str | Sequence[str] = AVERAGE_SLOT) -> P:
    """The moving averages of the parameters, in the dtypes of the parameters, for evaluation.

    Leaves that are not averaged come from the state. BatchNorm statistics belong to the raw
    parameters: average them, too (`averaged_model_state`), or recompute them.

    Args:
        state: A state whose optimizer is `with_moving_average`.
        name: The slot of the averages: its name with the prefixes of scopes and labels, or only the
            last part if there is one such average. Or several names, whose slots have different
            leaves, such as one for each label. If no average has the default name, it stands for
            the only one.

    Raises:
        ValueError: The state has no such average, or several, or several have the same leaf. Only
            what an optimizer declares is one: `with_moving_average` does, and a custom optimizer by
            `init.averages`. For schedule-free optimizers there is `schedule_free_params`, for
            `lookahead` `slow_params`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.with_moving_average(
        ...     jstep.gradient_descent(1.0), jstep.ExponentialMovingAverage(0.5)
        ... )
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.float32(-1.0)}, optimizer)
        >>> print(state.params["w"], jstep.averaged_params(state)["w"])
        1.0 0.5
    """
    return params_from_slots(state, find_averages(state, name))


def averaged_model_state(state: TrainState, name: str | Sequence[str] = AVERAGE_SLOT) -> Any:
    """Moving averages of the model state, kept by `ExponentialMovingAverage(…, model_state=True)`.

    Args:
        state: A state with a model state, whose optimizer is `with_moving_average`.
        name: The slot of the averages of the parameters, or several names, as for
            `averaged_params`.

    Raises:
        ValueError: The state has no such average, or several, or its model state has no averages.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> ema = jstep.ExponentialMovingAverage(0.5, model_state=True)
        >>> optimizer = jstep.with_moving_average(jstep.gradient_descent(1.0), ema)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer, model_state={"mean": 0.0})
        >>> state = state.replace(model_state={"mean": 1.0})  # as `minimize(has_model_state=True)`
        >>> state = jstep.apply_gradients(state, {"w": jnp.float32(-1.0)}, optimizer)
        >>> print(jstep.averaged_model_state(state)["mean"])
        0.5

    Source: `torch.optim.swa_utils.AveragedModel(use_buffers=True)`.
    """
    names = [f"{slot}/{MODEL_STATE}" for slot in find_averages(state, name)]
    averages = next((state.slots[slot] for slot in names if slot in state.slots), None)
    if averages is None:
        raise ValueError(
            f"name={name!r}: the state has no averages of its model state; keep them by "
            "jstep.ExponentialMovingAverage(…, model_state=True)"
        )

    def leaf(value: Any, average: Any) -> Any:
        return value if average is None else move_to_devices(average).astype(value.dtype)

    return jax.tree.map(leaf, state.model_state, averages, is_leaf=trees.is_none)


def move_model_state(state: TrainState, roles: Roles) -> TrainState:
    slots = dict(state.slots)
    for name in roles.names_with(Role.LAST_WEIGHT):
        slot = f"{name.rpartition('/')[0]}/{MODEL_STATE}"

        def leaf(value: Any, average: Any, weight: Any = slots[name]) -> Any:
            return None if average is None else move_average(average, value, weight)

        if slot in slots:
            slots[slot] = jax.tree.map(leaf, slots[MODEL_STATE], slots[slot], is_leaf=trees.is_none)
    return dataclasses.replace(state, slots=slots) if slots else state


# Lookahead: slow weights that follow the fast ones.

SLOW = "slow"


@makes_optimizer(1)
def lookahead(
    optimizer: OptimizerLike, sync_period: int = 6, slow_step_size: ScalarOrSchedule = 0.5
) -> Optimizer:
    """Lookahead: every k-th update slow += α·(p − slow); p = slow.

    Args:
        optimizer: The inner optimizer, which updates the fast weights; these are the parameters.
        sync_period: The number k ≥ 1 of updates between synchronizations, counted by the age of the
            slots.
        slow_step_size: The step size α, in [0, 1], of the slow weights towards the fast ones.

    Returns:
        An `Optimizer` with one more slot, `slow`, initially a copy of the parameters (at least
        float32), and the hyperparameter `slow_step_size`. The age is `start_step`, or around a
        `partition` `lookahead/label/start_step`. A leaf without a gradient at a synchronizing
        update is not synchronized; leaves that the partition freezes have no slow weights.

    Raises:
        ValueError: The optimizer already has such a slot or hyperparameter.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.lookahead(jstep.gradient_descent(1.0), sync_period=2)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> for _ in range(2):
        ...     state = jstep.apply_gradients(state, {"w": jnp.float32(-1.0)}, optimizer)
        >>> print(state.params["w"], jstep.slow_params(state)["w"])
        1.0 1.0

    Source: Zhang et al., "Lookahead Optimizer: k steps forward, 1 step back" (2019).
    """
    optimizer = as_optimizer("optimizer", optimizer)
    period = as_int(sync_period, "sync_period", at_least=1)

    def update(
        updates: Updates, inner: Slots, outer: Slots, inputs: StepInputs
    ) -> tuple[Updates, Slots, Slots]:
        params = inputs.params
        updates, inner = nested.call_update(optimizer, updates, inner, inputs)
        treedef = trees.structure(params)
        new_updates = trees.flatten_like(params, updates, "updates", is_leaf=is_slices)
        slows = trees.flatten_like(params, outer[SLOW], f"slot {SLOW!r}")
        rate = jnp.asarray(inputs.h["slow_step_size"], trees.default_float())

        def call(u: Any, p: Any, start: Any) -> Any:
            if u is None or start is None:
                return None
            is_due = slot_age(inputs.step, start) % period == 0
            return _synchronize, u, p, rate, is_due

        calls = map(call, new_updates, jax.tree.leaves(params), inputs.starts)
        synchronized = update_leaves(params, {SLOW: slows}, calls)
        # A leaf without an age is not synchronized, but an element of a chain may move it.
        new_updates = [
            u if new is None else new for u, new in zip(new_updates, synchronized, strict=True)
        ]
        return treedef.unflatten(new_updates), inner, {SLOW: treedef.unflatten(slows)}

    def fresh(params: Params, step: Step) -> Any:
        return fresh_slot(SLOW, Slot("copy"), trained_params(optimizer, params), step)

    hyper = {"slow_step_size": as_hyperparameter("slow_step_size", slow_step_size, low=0, high=1)}
    outer = WrapperSlots({SLOW: fresh}, {SLOW: Role.COPY}, {SLOW: "weight"}, hyper=hyper, aged=True)
    return wrap_optimizer(optimizer, "lookahead", update, outer, inner_roles=Roles.with_order)


def _synchronize(slots: Slots, u: Any, p: Array, rate: Array, is_due: Array) -> tuple[Array, Slots]:
    """If it is due, return (1 − rate)·(slow − p) + rate·u, which moves p to slow; otherwise u."""
    if is_slices(u):
        u = u.to_dense()
    slow = slots[SLOW]
    dtype = slow.dtype
    # u appears once: if it were read twice, XLA would store it in memory.
    share_of_slow = jnp.where(is_due, 1 - rate, 0.0).astype(dtype)
    towards_slow = share_of_slow * (slow - p.astype(dtype))
    update = towards_slow + jnp.where(is_due, rate, 1.0).astype(dtype) * u.astype(dtype)
    new_slow = apply_updates(p, update) if p.dtype == dtype else p.astype(dtype) + update
    return update, {SLOW: jnp.where(is_due, new_slow, slow)}


def slow_params(state: TrainState[P], name: str = SLOW) -> P:
    """The slow weights of `lookahead`, in the dtypes of the parameters, for evaluation.

    Args:
        state: A state whose optimizer is `lookahead`.
        name: The slot of the slow weights, named as in `averaged_params`.

    Raises:
        ValueError: No slot of `lookahead` has this name, or several have; the error lists their
            names.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.lookahead(jstep.gradient_descent(1.0))
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.float32(-1.0)}, optimizer)
        >>> print(state.params["w"], jstep.slow_params(state)["w"])
        1.0 0.0
    """
    hint = "Slow weights are kept by jstep.lookahead(optimizer)."
    slot = find_slot(state, name, hint, lambda slot: has_name(slot, SLOW))
    return params_from_slots(state, [slot])
