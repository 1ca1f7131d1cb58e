"""An optimizer wrapper that keeps moving averages of the parameters."""

from typing import Any

import jax.numpy as jnp

from jstep.core import trees
from jstep.core.memory import on_devices
from jstep.core.types import Context, Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.core.var_list import VarList
from jstep.optimizers.apply_updates import apply_updates
from jstep.optimizers.call_update import call_update
from jstep.optimizers.find_slot import find_slot
from jstep.optimizers.hyper import Hyper
from jstep.optimizers.masks import mask
from jstep.optimizers.wrap_optimizer import wrap_optimizer
from jstep.optimizers.wrappers.exponential_moving_average import NAME, ExponentialMovingAverage
from jstep.state import START_STEP, TrainState


def with_moving_average(optimizer: Optimizer, ema: ExponentialMovingAverage, var_list: VarList = None) -> Optimizer:
    """Keep moving averages of the parameters, updated after each update of an optimizer.

    Args:
        optimizer: The whole optimizer, including chains: changes by outer wrappers are not averaged.
        ema: The average. Its number of updates at the update N → N + 1 is N + 1.
        var_list: The leaves to average: a predicate `(path, leaf) -> bool`, paths or globs, a tree of bools; None for
            all.

    Returns:
        An `Optimizer` with one more slot, named `ema.name`. With zero_debias, the age of the averages comes from the
        optimizer's `start_step`, which is added if missing. Inside `skip_nonfinite`, a skipped update leaves the
        averages unchanged; inside `master_weights`, the master weights are averaged.

    Raises:
        ValueError: The optimizer already has a slot of that name, or (at `init`) an entry of var_list matches nothing.

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
    averaged = mask("var_list", var_list)

    def fresh(params: Params, global_step: Step) -> Any:
        leaves, treedef = trees.flatten(params)
        return ema.init(
            treedef.unflatten([p if is_one else None for p, is_one in zip(leaves, averaged(params), strict=True)])
        )

    def update(
        updates: Updates, inner: Slots, own: Slots, params: Params, step: Step, h: Hyper, context: Context
    ) -> tuple[Updates, Slots, Slots]:
        updates, inner = call_update(optimizer, updates, inner, params, step, context)
        after = jnp.asarray(step) + 1
        age = ema.age_at(after, own[START_STEP]) if ema.zero_debias else None
        moved = apply_updates(params, updates)
        return updates, inner, {ema.name: ema.apply(own[ema.name], moved, after, age=age)}

    return wrap_optimizer(optimizer, "with_moving_average", update, added={ema.name: fresh}, aged=ema.zero_debias)


def averaged_params(state: TrainState, name: str = NAME) -> Params:
    """The moving averages of the parameters, in the dtypes of the parameters, for evaluation.

    Values that are not averaged come from the state: integer leaves, leaves excluded by var_list, and model_state.
    BatchNorm statistics are those of the raw parameters; if that matters, recompute them on some batches with the
    averages, or make them change slowly (a momentum of 0.999).

    Args:
        state: A state whose optimizer is `with_moving_average`.
        name: The slot of the averages: its name with the prefixes of scopes and labels, or only the last part if
            there is one such slot.

    Returns:
        A tree like `state.params`.

    Raises:
        ValueError: The state has no such slot, or several; the error lists their names.

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
    return params_from_slot(state, name, "Averages are kept by jstep.with_moving_average(optimizer, ema).")


def params_from_slot(state: TrainState, name: str, hint: str) -> Params:
    """The leaves of a slot in the dtypes of the parameters; parameters where the slot has None.

    Args:
        state: The state.
        name: The name of the slot, with or without its prefix.
        hint: How such a slot is created, for the error.
    """
    slot = find_slot(state, name, hint)
    found = trees.flatten_like(state.params, state.slots[slot], f"slot {slot!r}")
    leaves, treedef = trees.flatten(state.params)
    return treedef.unflatten(
        [p if one is None else on_devices(one).astype(jnp.result_type(p)) for one, p in zip(found, leaves, strict=True)]
    )
