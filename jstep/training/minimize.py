"""From a loss and an optimizer to a training step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jstep.clipping import global_norm
from jstep.core import trees
from jstep.core.meshes import on_auto_axes
from jstep.core.types import Array, Optimizer, Params, require_optimizer
from jstep.core.var_list import VarList
from jstep.differentiate.gradients import GATE_OP, gradient_function
from jstep.differentiate.microbatches import AggregationMethod
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
        metrics: Which of `"grad_norm"` (of the raw gradients), `"update_norm"` (of the updates as added) and
            `"param_norm"` (of the new parameters) to compute.
        increment_global_step: Whether the update counts.
        jit: Whether to compile. False gives the pure function.
        donate: Whether the compiled step takes over the memory of the state passed in.

    Returns:
        A `TrainStep`, or the pure function where jit=False. Its metrics hold `loss`, each hyperparameter in force at
        the update, the norms asked for, and the entries of aux where it is a mapping, else `aux`; scalars
        on the device, which nothing waits for.

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
    if rng is not None and not trees.is_array(rng):
        raise TypeError(f"rng={rng!r}: must be a key, such as jax.random.key(0), got {type(rng).__name__}")
    rng = on_auto_axes(rng)
    compute = gradient_function(
        loss_fn,
        var_list=var_list,
        has_aux=has_aux,
        has_model_state=has_model_state,
        num_microbatches=num_microbatches,
        weight_fn=weight_fn,
        gate_gradients=gate_gradients,
        aggregation_method=aggregation_method,
    )

    def parts(state: TrainState, args: tuple[Any, ...], rows: Any) -> tuple[TrainState, dict[str, Any], Constants]:
        step = step_of(require_state(state))
        if has_model_state and MODEL_STATE not in state.slots:
            raise ValueError("has_model_state=True, but the state has none: TrainState.create(..., model_state=…)")
        key = None if rng is None else jax.random.fold_in(rng, step)
        loss, model_state, aux, grads = compute(state.params, state.slots.get(MODEL_STATE), args, {}, key, rows)
        new_state, updates = applied(state, grads, optimizer, increment_global_step)
        if has_model_state:
            new_state = new_state.replace(slots={**new_state.slots, MODEL_STATE: model_state})
        sources = {"grad_norm": grads, "update_norm": updates, "param_norm": _trainable(new_state.params)}
        named = {
            "the loss": {"loss": loss},
            "the optimizer's hyperparameters": optimizer.hyperparameters(step),
            "aux": (dict(aux) if isinstance(aux, Mapping) else {"aux": aux}) if has_aux else {},
            "the norms": {name: global_norm(sources[name]) for name in norms},
        }
        return (new_state, *split_constants(_joined(named)))

    pure_step = PureStep(parts, looks_at_rows=num_microbatches > 1)
    return TrainStep(pure_step, donate=donate) if jit else pure_step


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
