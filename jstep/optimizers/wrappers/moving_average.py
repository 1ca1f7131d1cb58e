"""An optimizer wrapper that keeps moving averages of the parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.execution_order import compute_first
from jstep.core.memory import on_devices
from jstep.core.types import Context, Held, Optimizer, Params, Slots, Step, Updates, require_optimizer
from jstep.core.var_list import VarList
from jstep.optimizers.apply_updates import apply_updates
from jstep.optimizers.call_update import call_update
from jstep.optimizers.find_slot import find_slot
from jstep.optimizers.hyper import Hyper
from jstep.optimizers.masks import mask
from jstep.optimizers.wrap_optimizer import wrap_optimizer
from jstep.optimizers.wrappers.exponential_moving_average import NAME, ExponentialMovingAverage
from jstep.state import START_STEP, TrainState

DECAY = "decay"


def with_moving_average(
    optimizer: Optimizer,
    ema: ExponentialMovingAverage,
    var_list: VarList = None,
    initial: Callable[[Params], Params] | Params = None,
) -> Optimizer:
    """Keep moving averages of the parameters, updated after each update of an optimizer.

    Args:
        optimizer: The whole optimizer, including chains: changes by outer wrappers are not averaged.
        ema: The average. Its number of updates at the update N → N + 1 is N + 1. A decay that is a schedule is read at
            the step N, and is the hyperparameter `name/decay`; one that is `held` is in the slot `held/…`.
        var_list: The leaves to average: a predicate `(path, leaf) -> bool`, paths or globs, a tree of bools; None for
            all.
        initial: The values from which the averages start, such as another initialization of a teacher: a function
            `(params) -> params`, or a tree like params; None for copies of the parameters.

    Returns:
        An `Optimizer` with one more slot, named `ema.name`. With zero_debias, the age of the averages comes from the
        optimizer's `start_step`, which is added if missing. Inside `skip_nonfinite`, a skipped update leaves the
        averages unchanged; inside `master_weights`, the master weights are averaged.

    Raises:
        ValueError: The optimizer already has a slot of that name; initial is given for averages that start from zeros
            (zero_debias) or from the parameters at start_step; or (at `init`) an entry of var_list matches nothing, or
            initial has another structure or shape than params.

    Example:
        >>> import jstep
        >>> optimizer = jstep.with_moving_average(jstep.momentum(0.1, 0.9), jstep.ExponentialMovingAverage(0.99))
        >>> jstep.get_slot_names(jstep.TrainState.create({"w": 1.0}, optimizer))
        ['ExponentialMovingAverage', 'momentum']

        A teacher that starts elsewhere, and whose decay grows from 0.996 to 1:

        >>> import jax, jax.numpy as jnp
        >>> ema = jstep.ExponentialMovingAverage(lambda step: 1 - jstep.cosine_decay(0.004, 1000)(step))
        >>> optimizer = jstep.with_moving_average(
        ...     jstep.gradient_descent(1.0), ema, initial=lambda params: jax.tree.map(jnp.ones_like, params)
        ... )
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> state = jstep.apply_gradients(state, {"w": jnp.float32(0.0)}, optimizer)
        >>> print(jnp.round(jstep.averaged_params(state)["w"], 4))
        0.996

    Source: `tf.contrib.opt.MovingAverageOptimizer`.
    """
    require_optimizer("optimizer", optimizer)
    if not isinstance(ema, ExponentialMovingAverage):
        raise TypeError(f"ema={ema!r}: must be an ExponentialMovingAverage, got {type(ema).__name__}")
    if initial is not None and (ema.zero_debias or ema.start_step):
        start = "from zeros (zero_debias=True)" if ema.zero_debias else f"at start_step={ema.start_step}"
        raise ValueError(
            f"initial: the averages start {start}, so initial values have no effect; leave one of them out"
        )
    averaged = mask("var_list", var_list)
    is_constant = not (callable(ema.decay) or isinstance(ema.decay, Held))
    hyper = {} if is_constant else {f"{ema.name}/{DECAY}": ema.decay}

    def fresh(params: Params, global_step: Step) -> Any:
        leaves, treedef = trees.flatten(params)
        if initial is not None:
            leaves = _initial(initial, params)
        return ema.init(
            treedef.unflatten([p if is_one else None for p, is_one in zip(leaves, averaged(params), strict=True)])
        )

    def update(
        updates: Updates, inner: Slots, own: Slots, params: Params, step: Step, h: Hyper, context: Context
    ) -> tuple[Updates, Slots, Slots]:
        updates, inner = call_update(optimizer, updates, inner, params, step, context, exact=True)
        after = jnp.asarray(step) + 1
        now = dataclasses.replace(ema, decay=h[f"{ema.name}/{DECAY}"]) if hyper else ema
        age = ema.age_at(after, own[START_STEP]) if ema.zero_debias else None
        # The averages read the new parameters from memory. Without the barrier XLA would recompute the parameters
        # from the slots it is about to overwrite.
        (moved,) = compute_first(apply_updates(params, updates))
        return updates, inner, {ema.name: now.apply(own[ema.name], moved, after, age=age)}

    return wrap_optimizer(
        optimizer, "with_moving_average", update, added={ema.name: fresh}, hyper=hyper, aged=ema.zero_debias
    )


def _initial(initial: Any, params: Params) -> list[Any]:
    """Return the initial values at the leaves of params, and the leaves themselves where none is trainable."""
    found = initial(params) if callable(initial) else initial
    values = trees.flatten_like(params, found, "initial")
    pairs = list(zip(trees.leaves_with_paths(params), values, strict=True))
    for (path, leaf), value in pairs:
        if trees.is_trainable(leaf) and (value is None or np.shape(value) != np.shape(leaf)):
            have = "nothing" if value is None else f"shape {np.shape(value)}"
            raise ValueError(f"initial: must have shape {np.shape(leaf)} at {trees.quoted(path)}, got {have}")
    return [
        jnp.asarray(value).astype(trees.compute_dtype(jnp.result_type(leaf))) if trees.is_trainable(leaf) else leaf
        for (_, leaf), value in pairs
    ]


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
