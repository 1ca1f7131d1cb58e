"""Gradients of a loss function, with microbatches and sharpness-aware minimization."""

from collections.abc import Callable
from typing import Any

import jax

from jstep.core.meshes import sharded_like
from jstep.core.placement import sharding_of
from jstep.core.selection import VarList
from jstep.core.trees import Number, Params
from jstep.differentiate.engine import GATE_OP, Differentiation, Inputs
from jstep.differentiate.lanes import Lanes, on_lanes
from jstep.differentiate.microbatches import AggregationMethod, Part


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
    lanes: int | None = None,
) -> Callable[..., Any]:
    """Return a function that computes a loss and its gradients.

    Args:
        loss_fn: `loss_fn(params, *args) -> loss`, a floating-point scalar; with has_aux `-> (loss, aux)`.
        var_list: The parameters to differentiate: None (all), a predicate `(path, leaf) -> bool`, a list of paths or
            globs (`"decoder/*"`), or a tree of bools. The others are not differentiated; their gradients are None, as
            are those of parameters that the loss does not depend on.
        has_aux: Whether loss_fn returns auxiliary values with the loss.
        num_microbatches: Number of microbatches for gradient accumulation; the leading axis of every arg is split
            into that many microbatches, which are processed in one scan. Microbatch i of n consists of rows i, i + n,
            i + 2n, …: on a mesh each device has its share of them, so no row moves between devices, and microbatches do
            not depend on the number of devices. Gradients, loss and floating (also complex) leaves of aux are means
            in at least float32; integers and bools of aux are sums in at least int32. They are those of the whole batch
            if the loss is a mean over rows. A loss that compares rows with each other (contrastive losses, BatchNorm)
            sees those of one microbatch, so it is another objective for each number of microbatches; the recipe
            "Contrastive losses in parts" computes such a loss exactly.
        weight_fn: `weight_fn(*microbatch)`, the weight of a microbatch in the means, such as its number of tokens.
        gate_gradients: GATE_NONE, GATE_OP or GATE_GRAPH: how far XLA may overlap gradients and updates. It affects
            memory and time, never values.
        aggregation_method: Whether to keep a running sum of the gradients of microbatches (DEFAULT) or all of them
            (ADD_N).
        sharpness: The radius ρ ≥ 0 of sharpness-aware minimization: gradients are taken at p + ρ·g/‖g‖, with the
            same batch and key; loss and aux are those at p. It costs a second gradient.
        adaptive: Whether to scale the radius by the magnitude of each element (ASAM): p + ρ·p²·g/‖|p|·g‖.
        lanes: Number of lanes, a power of two, as in `minimize`: the gradients are those of its step, with the same
            bits on any number of devices that divides it. Sums that a custom step computes elsewhere are not covered.
            In a `jax.jit` of your own, set the mesh (`jax.set_mesh`); rows of unknown sharding are spread over all of
            its devices.

    Returns:
        `f(params, *args, **kwargs) -> (loss, grads)`, or `((loss, aux), grads)`. Keyword arguments are passed to
        loss_fn unchanged in every microbatch.

    Raises:
        TypeError: An argument has the wrong type, or the loss is not floating point.
        ValueError: An argument is out of range, the loss is not a scalar, a var_list entry matches nothing, or
            num_microbatches or lanes do not fit the batch.

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
        lanes=lanes,
    )

    def loss_and_gradients(params: Params, *args: Any, **kwargs: Any) -> Any:
        def run(lanes: Lanes | None, params: Params, args: tuple[Any, ...]) -> Part:
            return compute(Inputs(params, args=args, kwargs=kwargs, lanes=lanes))

        place = sharded_like(Part(None, None, None, params))  # type: ignore[arg-type]
        part = on_lanes(compute.lanes, run, params, args, jax.tree.map(sharding_of, args), place=place)
        return ((part.loss, part.aux), part.gradients) if has_aux else (part.loss, part.gradients)

    return loss_and_gradients
