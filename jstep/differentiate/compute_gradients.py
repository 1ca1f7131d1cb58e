"""The gradients of a loss."""

from collections.abc import Callable
from typing import Any

from jstep.core.types import Number, Params
from jstep.core.var_list import VarList
from jstep.differentiate.engine import Differentiation, Inputs
from jstep.differentiate.gating import GATE_OP
from jstep.differentiate.microbatches import AggregationMethod


def compute_gradients(
    loss_fn: Callable[..., Any],
    *,
    var_list: VarList = None,
    has_aux: bool = False,
    num_microbatches: int = 1,
    weight_fn: Callable[..., Any] | None = None,
    gate_gradients: int = GATE_OP,
    aggregation_method: AggregationMethod = AggregationMethod.DEFAULT,
    sharpness: Number | None = None,
    adaptive: bool = False,
) -> Callable[..., Any]:
    """A function that computes a loss and its gradients.

    Args:
        loss_fn: `loss_fn(params, *args) -> loss`, a floating-point scalar; with has_aux `-> (loss, aux)`.
        var_list: What to differentiate: None (all), a predicate `(path, leaf) -> bool`, a list of paths or globs
            (`"decoder/*"`), or a tree of bools. What is left out is not differentiated at all and gets None, as does
            what the loss does not depend on.
        has_aux: Whether loss_fn returns auxiliary values with the loss.
        num_microbatches: In how many parts the leading axis of every arg is split. The parts, contiguous blocks
            of rows, are gone through in one scan; gradients, loss and floating (also complex) leaves of aux
            are their means in float32 at least, integers and bools of aux their sums in int32 at least. Where rows
            are known to be sharded over devices, part i of n is rows i, i + n, i + 2n, …, of which each device has
            its share: no row moves, and the parts do not depend on the number of devices. Only a loss that depends
            on which rows are together (random numbers, model_state) gives other values than on one device.
        weight_fn: `weight_fn(*microbatch)`, the weight of a microbatch in the means, such as its number of tokens.
        gate_gradients: GATE_NONE, GATE_OP or GATE_GRAPH: where XLA may not overlap gradients and updates. Changes
            memory and time, never values.
        aggregation_method: Whether microbatches keep a running sum of gradients (DEFAULT) or every part (ADD_N).
        sharpness: The radius ρ ≥ 0 of sharpness-aware minimization: the gradients are those at
            p + ρ·g/‖g‖, of the same batch and key; loss and aux are those at p. Costs a second gradient.
        adaptive: Whether the radius of each element follows its size (ASAM): p + ρ·p²·g/‖|p|·g‖.

    Returns:
        `f(params, *args, **kwargs) -> (loss, grads)`, or `((loss, aux), grads)`. Keyword arguments reach loss_fn
        as they are, in every microbatch.

    Raises:
        TypeError: An argument is of the wrong type, or the loss is not floating point.
        ValueError: An argument is out of range, the loss is no scalar, a var_list entry matches nothing, or
            num_microbatches does not divide the batch.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> f = jstep.compute_gradients(lambda p, x: jnp.mean(p["w"] * x + p["b"]), var_list=["w"])
        >>> loss, grads = f({"w": jnp.float32(2.0), "b": jnp.float32(1.0)}, jnp.array([1.0, 3.0]))
        >>> print(loss, grads)
        5.0 {'b': None, 'w': Array(2., dtype=float32)}

    Source: `tf.train.Optimizer.compute_gradients`; Foret et al., "Sharpness-Aware Minimization" (2020).
    """
    compute = Differentiation(
        loss_fn,
        var_list=var_list,
        has_aux=has_aux,
        num_microbatches=num_microbatches,
        weight_fn=weight_fn,
        gate_gradients=gate_gradients,
        aggregation_method=aggregation_method,
        sharpness=sharpness,
        adaptive=adaptive,
    )

    def loss_and_gradients(params: Params, *args: Any, **kwargs: Any) -> Any:
        part = compute(Inputs(params, args=args, kwargs=kwargs))
        return ((part.loss, part.aux), part.gradients) if has_aux else (part.loss, part.gradients)

    return loss_and_gradients
