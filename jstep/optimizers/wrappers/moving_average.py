"""Moving averages of the parameters, fed by the one step."""

import jax
import jax.numpy as jnp

from jstep.core import trees
from jstep.core.types import Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.optimizers.apply_updates import apply_updates
from jstep.optimizers.merge import merge
from jstep.optimizers.wrappers.exponential_moving_average import NAME, ExponentialMovingAverage
from jstep.state import START_STEP, TrainState


def with_moving_average(optimizer: Optimizer, ema: ExponentialMovingAverage) -> Optimizer:
    """The same optimizer, which also keeps moving averages of the parameters, after each update.

    Args:
        optimizer: The whole optimizer, chains included: what is put around it later moves parameters unseen.
        ema: The average. Its number of updates at the update N → N + 1 is N + 1.

    Returns:
        An `Optimizer` with one more slot, named `ema.name`. Where zero_debias needs the age of the averages,
        it reads the optimizer's `start_step`, or keeps one where the optimizer has none.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: The optimizer has a slot of that name.

    Example:
        >>> import jstep
        >>> optimizer = jstep.with_moving_average(jstep.momentum(0.1, 0.9), jstep.ExponentialMovingAverage(0.99))
        >>> jstep.get_slot_names(jstep.TrainState.create({"w": 1.0}, optimizer))
        ['ExponentialMovingAverage', 'momentum']

    Source: `tf.contrib.opt.MovingAverageOptimizer`.
    """
    require_optimizer("optimizer", optimizer)
    if not isinstance(ema, ExponentialMovingAverage):
        raise TypeError(f"ema={ema!r}: must be an ExponentialMovingAverage, got {type(ema).__name__}")

    def init(params: Params, global_step: Step = 0) -> Slots:
        slots = merge([optimizer.init(params, global_step), {ema.name: ema.init(params)}], "slot")
        if ema.zero_debias and START_STEP not in slots:
            slots[START_STEP] = jnp.array(global_step, dtype=trees.default_int(), copy=True)
        return slots

    def update(updates: Updates, slots: Slots, params: Params, step: Step, /) -> tuple[Updates, Slots]:
        for name in (ema.name, *([START_STEP] if ema.zero_debias else [])):
            if name not in slots:
                raise ValueError(
                    f"the state has no slot {name!r}, it has {sorted(slots)}; create it with the optimizer that "
                    "with_moving_average returned"
                )
        updates, own = optimizer.update(updates, slots, params, step)
        after = jnp.asarray(step) + 1
        age = after - slots[START_STEP].astype(after.dtype) if ema.zero_debias else None
        # The averages read the new parameters from memory. Without the barrier XLA computes them a second
        # time from the slots it is about to overwrite.
        moved = jax.lax.optimization_barrier(apply_updates(params, updates))
        new = {**own, ema.name: ema.apply(slots[ema.name], moved, after, age=age)}
        if ema.zero_debias and START_STEP not in new:
            new[START_STEP] = slots[START_STEP]
        return updates, new

    return Optimizer(init, update, optimizer.hyperparameters)


def averaged_params(state: TrainState, name: str = NAME) -> Params:
    """The parameters with their moving averages in their place and dtype, for evaluation.

    Args:
        state: A state whose optimizer is `with_moving_average`.
        name: The slot of the averages.

    Returns:
        A tree like `state.params`; leaves without an average, such as integers, are those of the state.

    Raises:
        ValueError: The state has no such slot.

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
    if name not in state.slots:
        raise ValueError(
            f"name={name!r}: the state has no such slot{trees.nearest(name, state.slots)}; it has "
            f"{sorted(state.slots)}. Averages are kept by jstep.with_moving_average(optimizer, ema)."
        )
    averages = trees.flatten_like(state.params, state.slots[name], f"slot {name!r}")
    leaves, treedef = trees.flatten(state.params)
    return treedef.unflatten(
        [p if avg is None else avg.astype(jnp.result_type(p)) for avg, p in zip(averages, leaves, strict=True)]
    )
