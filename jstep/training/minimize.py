"""From a loss and an optimizer to a training step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.clipping import global_norm
from jstep.core import trees
from jstep.core.checks import as_bool, kind, shown
from jstep.core.collecting import with_returned
from jstep.core.loops import Unroll
from jstep.core.meshes import on_auto_axes
from jstep.core.types import Array, Number, Optimizer, Params, Slots, require_optimizer
from jstep.core.var_list import VarList
from jstep.differentiate import GATE_OP, AggregationMethod
from jstep.differentiate.engine import Differentiation, Inputs
from jstep.optimizers.metrics import metrics_of_slots
from jstep.optimizers.wrappers.skip_nonfinite import LOSS_SCALE
from jstep.state import MODEL_STATE, TrainState, require_state, step_of
from jstep.training.apply import applied
from jstep.training.constants import Constants, split_constants
from jstep.training.step import PureStep, TrainStep

NORMS = ("grad_norm", "update_norm", "param_norm")


def minimize(
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    *,
    var_list: VarList = None,
    has_aux: bool = False,
    num_microbatches: int = 1,
    weight_fn: Callable[..., Any] | None = None,
    gate_gradients: int = GATE_OP,
    aggregation_method: AggregationMethod = AggregationMethod.DEFAULT,
    has_model_state: bool = False,
    rng: Array | None = None,
    sharpness: Number | None = None,
    adaptive: bool = False,
    unroll: Unroll = None,
    metrics: Sequence[str] = (),
    increment_global_step: bool = True,
    jit: bool = True,
    donate: bool = True,
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """The training step of a loss: `train_step(state, *args) -> (state, metrics)`, compiled, the state donated.

    Args:
        loss_fn: `loss_fn(params, *args) -> loss`, a floating-point scalar. With has_aux `-> (loss, aux)`; with
            has_model_state `loss_fn(params, model_state, *args) -> (loss, model_state)`; with both
            `-> (loss, (model_state, aux))`; with rng it also takes `rng=key`.
        optimizer: The one the state was created with.
        var_list: What to train, as in `compute_gradients`; the rest stays as it is.
        has_aux: Whether loss_fn returns auxiliary values, which join the metrics.
        num_microbatches: In how many parts the batch is gone through, as in `compute_gradients`: one update.
        weight_fn: The weight of a microbatch, as in `compute_gradients`.
        gate_gradients: GATE_NONE, GATE_OP or GATE_GRAPH.
        aggregation_method: How the gradients of microbatches are added up.
        has_model_state: Whether loss_fn takes and returns non-trained variables, `state.slots["model_state"]`.
        rng: A PRNG key; loss_fn gets `fold_in(rng, global_step)`, a function of the step alone, so that a run
            that was interrupted draws the same numbers. A microbatch i gets `fold_in(that, i)`.
        sharpness: The radius of sharpness-aware minimization, as in `compute_gradients`: loss, aux and model_state are
            those at the parameters themselves.
        adaptive: Whether that radius follows the size of each element.
        unroll: How the loop over microbatches is unrolled, as in `scan_steps`; None chooses.
        metrics: Which of `"grad_norm"` (of the raw gradients), `"update_norm"` (of the updates as added) and
            `"param_norm"` (of the new parameters) to compute.
        increment_global_step: Whether the update counts.
        jit: Whether to compile. False gives the pure function.
        donate: Whether the compiled step takes over the memory of the state passed in.

    Returns:
        A `TrainStep`, or the pure function where jit=False. Its metrics hold `loss`, each hyperparameter in force at
        the update (also those that the state holds), the norms asked for, and the entries of aux where it is a
        mapping, else `aux`; scalars on the device, which nothing waits for. Where the loss makes summaries that it does
        not return, they are `summaries`.

    Raises:
        TypeError: An argument, the loss or a gradient is of the wrong type.
        ValueError: An argument is out of range, or something does not fit: var_list, the batch and
            num_microbatches, the state and the optimizer, names of metrics that collide.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(jstep.exponential_decay(0.1, 10, 0.5))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] * x) ** 2, optimizer)
        >>> state, metrics = train_step(state, jnp.float32(2.0))
        >>> print(state.params["w"], state.global_step, metrics["loss"], metrics["learning_rate"])
        0.19999999 1 4.0 0.1

    Source: `tf.train.Optimizer.minimize`.
    """
    require_optimizer("optimizer", optimizer)
    norms = _checked_norms(metrics)
    rng = on_auto_axes(_checked_key(rng))
    for name, flag in {"increment_global_step": increment_global_step, "jit": jit, "donate": donate}.items():
        as_bool(flag, name)
    differentiate = Differentiation(
        loss_fn,
        var_list=var_list,
        has_aux=has_aux,
        has_model_state=has_model_state,
        num_microbatches=num_microbatches,
        weight_fn=weight_fn,
        gate_gradients=gate_gradients,
        aggregation_method=aggregation_method,
        sharpness=on_auto_axes(sharpness),
        adaptive=adaptive,
        unroll=unroll,
        gathers=True,
    )

    def parts(state: TrainState, args: tuple[Any, ...], rows: Any) -> tuple[TrainState, dict[str, Any], Constants]:
        step = step_of(require_state(state))
        if has_model_state and MODEL_STATE not in state.slots:
            raise ValueError("has_model_state=True, but the state has none: TrainState.create(..., model_state=…)")
        key = None if rng is None else jax.random.fold_in(rng, step)
        scale = loss_scale(state.slots)
        model_state = state.slots.get(MODEL_STATE)
        part = differentiate(Inputs(state.params, model_state, args, key=key, rows=rows, scale=scale))
        new_state, updates = applied(state, part.gradients, optimizer, increment_global_step)
        if has_model_state:
            new_state = new_state.replace(slots={**new_state.slots, MODEL_STATE: part.model_state})

        def norm(name: str) -> Array:
            if name == "grad_norm":
                found = global_norm(part.gradients)
                return found if scale is None else found / scale.astype(found.dtype)
            return global_norm(updates if name == "update_norm" else _trainable(new_state.params))

        aux, made = with_returned(part.aux if isinstance(part.aux, Mapping) else {"aux": part.aux}, part.summaries)
        named = {
            "the loss": {"loss": part.loss},
            "the optimizer's hyperparameters": optimizer.hyperparameters(step),
            "the optimizer's slots": metrics_of_slots(state.slots, new_state.slots, step),
            "aux": aux if has_aux else {},
            "the norms": {name: norm(name) for name in norms},
            "what the loss made": {} if made is None else {"summaries": made},
        }
        return (new_state, *split_constants(_joined(named)))

    pure_step = PureStep(parts, looks_at_rows=num_microbatches > 1)
    return TrainStep(pure_step, donate=donate) if jit else pure_step


def loss_scale(slots: Slots) -> Array | None:
    """By what the loss is multiplied before it is differentiated: the slot `loss_scale`, whatever its prefix.

    Raises:
        ValueError: There are several.
    """
    names = [name for name, slot in slots.items() if name.rsplit("/", 1)[-1] == LOSS_SCALE and np.ndim(slot) == 0]
    if len(names) > 1:
        raise ValueError(
            f"the state has several loss scales, {', '.join(map(repr, names))}, and a loss is multiplied by one: put "
            "dynamic_loss_scale around the whole optimizer"
        )
    return slots[names[0]] if names else None


def _checked_key(rng: Any) -> Any:
    if rng is None:
        return None
    if not trees.is_array(rng):
        raise TypeError(f"rng={shown(rng)}: must be a key, such as jax.random.key(0), got {kind(rng)}")
    typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    if not (typed or (rng.dtype == np.uint32 and np.ndim(rng) == 1)):
        raise TypeError(f"rng: must be a key, such as jax.random.key(0), got {kind(rng)}")
    if typed and np.ndim(rng):
        raise ValueError(f"rng: must be one key, got keys of shape {np.shape(rng)}; take one of them")
    return rng


def _checked_norms(metrics: Any) -> tuple[str, ...]:
    if not isinstance(metrics, str | list | tuple | set | frozenset):
        raise TypeError(f"metrics={metrics!r}: must be names among {NORMS}, got {type(metrics).__name__}")
    names = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    for name in names:
        if name not in NORMS:
            raise ValueError(f"metrics: {name!r} is unknown{trees.nearest(str(name), NORMS)}; it takes any of {NORMS}")
    return names


def _trainable(params: Params) -> Any:
    return jax.tree.map(lambda leaf: leaf if trees.is_trainable(leaf) else None, params)


def _joined(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for part, values in parts.items():
        for name, value in values.items():
            if name in joined:
                raise ValueError(f"metrics: {part} and {origin[name]} both have {name!r}; rename it in {part}")
            joined[name], origin[name] = value, part
    return joined
