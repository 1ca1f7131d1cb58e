"""Muon: orthogonalized momentum, and its orthogonalization as an element of a chain."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_bool, one_of
from jstep.core.placement import layout_of
from jstep.core.selection import VarList
from jstep.core.slot_roles import Init, Role, Roles
from jstep.core.trees import Array, IndexedSlices, Optimizer, Params, ScalarOrSchedule, Slots, Step, Updates
from jstep.optimizers.axes import Axes, checked_axes, matrix_axes_of, partition_shown
from jstep.optimizers.directions import Result, Values, average, decay_mask, from_direction, from_update
from jstep.optimizers.distribute_matrices import layout_of_matrix
from jstep.optimizers.held import held_names, held_slots
from jstep.optimizers.hyper import checked, low_dtype, report, value_at
from jstep.optimizers.leafwise import MEAN
from jstep.optimizers.masks import own_leaves
from jstep.optimizers.match_gradients import match_gradients, missing_slot
from jstep.optimizers.newton_schulz import (
    COEFFICIENTS,
    Iteration,
    Normalization,
    as_matrix,
    orthogonalized,
    triples_and_safety,
)
from jstep.optimizers.offloading import loads_slots
from jstep.optimizers.wrappers.chain import chain

Scale = Literal["rms", "original"]
SCALES: dict[str | None, Callable[[int, int], float]] = {
    "rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, columns / rows)),
    None: lambda rows, columns: 1.0,
}


def muon(
    learning_rate: ScalarOrSchedule = 1e-3,
    momentum: ScalarOrSchedule = 0.95,
    use_nesterov: bool = True,
    ns_steps: int | None = None,
    ns_coefficients: Sequence[Any] | str = COEFFICIENTS,
    epsilon: ScalarOrSchedule = 1e-7,
    scale: Scale | None = "rms",
    weight_decay: ScalarOrSchedule = 0.1,
    weight_decay_mask: VarList = None,
    axes: Axes | None = None,
    ns_dtype: Any = jnp.float32,
    normalization: Normalization = "frobenius",
    distribute: bool = True,
) -> Optimizer:
    """Muon: M = μ·M + (1−μ)·g; G = (1−μ)·g + μ·M by Nesterov, or M; p −= lr·(scale·(about UVᵀ) + weight_decay·p).

    UVᵀ of G = USVᵀ is approximated by a Newton–Schulz iteration: see `orthogonalize`. Use Muon for the matrices of
    hidden layers; train embeddings, heads, vectors and scalars with another optimizer (see the example).

    Args:
        learning_rate: The step size lr ≥ 0; with scale "rms" about the same as AdamW's.
        momentum: The decay μ of the average of gradients, in [0, 1].
        use_nesterov: Whether to use Nesterov momentum.
        ns_steps: The number of iterations, ≥ 1; None for the preset's number, or 5 with custom coefficients.
        ns_coefficients: (a, b, c), one such triple for each iteration, or a preset: "jordan" (the default), "dion" or
            "polar_express"; see `orthogonalize`.
        epsilon: The lower bound of the norm in the divisor, > 0.
        scale: "rms" for 0.2·√max(in, out), "original" for √max(1, out/in), None for 1.
        weight_decay: Decoupled weight decay, multiplied by lr; ≥ 0.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.
        axes: `(path, leaf) -> (in, out)`, the axes (each a number or several) that form the matrix; other axes index
            a stack of matrices. By default the last two, (in, out) as in Flax.
        ns_dtype: The dtype of the iteration's products.
        normalization: The norm in the divisor, "frobenius" or "schatten"; see `orthogonalize`.
        distribute: Whether to distribute matrices of one shape over the devices of their mesh; see `orthogonalize`.

    Returns:
        An `Optimizer` with the slot `momentum` (initially 0).

    Raises:
        ValueError: An argument is out of its range, the mask matches nothing, or, at `init`, a leaf has fewer than
            two axes.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.partition(
        ...     {"muon": jstep.muon(1e-2), "adamw": jstep.adamw(1e-3)},
        ...     lambda path, leaf: "muon" if leaf.ndim == 2 and "embed" not in path else "adamw",
        ... )
        >>> params = {"embed": jnp.ones((8, 4)), "dense": {"kernel": jnp.ones((4, 4)), "bias": jnp.zeros(4)}}
        >>> jstep.get_slot_names(jstep.TrainState.create(params, optimizer))
        ['adamw/m', 'adamw/v', 'muon/momentum']

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is
    Scalable for LLM Training" (2025), for scale "rms". The results match `torch.optim.Muon` with
    adjust_lr_fn="match_rms_adamw" and products in float32; Optax's also corrects the bias.
    """
    average_of = nesterov_average if as_bool(use_nesterov, "use_nesterov") else kept_average
    hyper, flags = {"learning_rate": learning_rate, "weight_decay": weight_decay}, decay_mask(weight_decay_mask)
    return chain(
        from_update("muon", average_of, {"momentum": MEAN}, {"momentum": momentum}),
        orthogonalize(ns_steps, ns_coefficients, epsilon, scale, axes, ns_dtype, normalization, distribute),
        from_direction("muon_step", lambda g, p, s, h: (g, {}), {}, hyper, flags=flags),
    )


def kept_average(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The average of gradients."""
    m = average(s.momentum, g, h.momentum)
    return m, {"momentum": m}


def nesterov_average(g: Array, p: Array, s: Values, h: Values) -> Result:
    """The average with Nesterov momentum, one step ahead of the one that is kept."""
    m = average(s.momentum, g, h.momentum)
    return average(m, g, h.momentum), {"momentum": m}


def orthogonalize(
    ns_steps: int | None = None,
    ns_coefficients: Sequence[Any] | str = COEFFICIENTS,
    epsilon: ScalarOrSchedule = 1e-7,
    scale: Scale | None = "rms",
    axes: Axes | None = None,
    ns_dtype: Any = jnp.float32,
    normalization: Normalization = "frobenius",
    distribute: bool = True,
) -> Optimizer:
    """Orthogonalization: scale · (about UVᵀ, where the update is USVᵀ), by a Newton–Schulz iteration for each matrix.

    X = u/max(s·‖u‖, ε), and ns_steps times A = XXᵀ; X = a·X + (b·A + c·A²)·X. By default it does not converge, but
    quickly brings singular values to between 0.7 and 1.2. "polar_express" brings them to within 0.0001 of 1.

    Args:
        ns_steps: The number of iterations, ≥ 1; None for the preset's number, or 5 with custom coefficients.
        ns_coefficients: (a, b, c), one such triple for each iteration, or a preset: "jordan" (the default; 5 equal
            iterations), "dion" (at most 5 different ones) or "polar_express" (8 by default and any number, with a
            safety factor s of 1.01, which is 1 otherwise).
        epsilon: The lower bound of the norm in the divisor, > 0: gradients below it are damped.
        scale: "rms" for 0.2·√max(in, out), which makes updates as large as AdamW's; "original" for √max(1, out/in);
            None for 1.
        axes: `(path, leaf) -> (in, out)`, the axes (each a number or several) that form the matrix; other axes index
            a stack of matrices. By default the last two, (in, out) as in Flax.
        ns_dtype: The dtype of the products; `jnp.bfloat16` is faster on accelerators, with errors of about 0.01.
        normalization: "frobenius" for the Frobenius norm ‖u‖; "schatten" for √‖uuᵀ‖, the Schatten-4 norm, which is
            closer to the largest singular value (so that fewer iterations suffice) and needs no extra product.
        distribute: Whether to distribute matrices of one shape over the devices of their mesh, each whole on one
            device, so that no device repeats another's work. It has no effect on a single device.

    Returns:
        An element of a chain without slots.

    Raises:
        ValueError: An argument is out of its range; at `init`, a leaf has fewer than two axes.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.orthogonalize(scale=None), jstep.scale_by_learning_rate(1.0))
        >>> state = jstep.TrainState.create({"w": jnp.zeros((2, 2))}, optimizer)
        >>> grads = {"w": jnp.array([[0.0, 5.0], [5.0, 0.0]])}
        >>> print(jnp.round(jstep.apply_gradients(state, grads, optimizer).params["w"], 1) + 0.0)
        [[ 0.  -1.1]
         [-1.1  0. ]]

    Source: Jordan et al., "Muon" (2024); Bernstein and Newhouse, "Old Optimizer, New Norm" (2024); Amsel et al., "The
    Polar Express" (2025).
    """
    dtype = low_dtype("ns_dtype", ns_dtype)
    # Leaves are computed in at least float32 anyway; wider ones keep their dtype.
    triples, safety = triples_and_safety(ns_coefficients, ns_steps)
    schatten = one_of(normalization, "normalization", ["frobenius", "schatten"]) == "schatten"
    iteration = Iteration(triples, None if dtype == np.float32 else dtype, safety, schatten)
    hyper = {"epsilon": checked("epsilon", epsilon, low=0, above=True)}
    factor = SCALES[one_of(scale, "scale", list(SCALES))]
    chosen = checked_axes(axes)
    is_spread = as_bool(distribute, "distribute")
    wording = "to be orthogonalized", partition_shown("muon", "jstep.muon(1e-3)")

    def matrix_axes(params: Params) -> list[Any]:
        return [
            matrix_axes_of(path, leaf, chosen, *wording) if trees.is_trainable(leaf) else None
            for path, leaf in own_leaves(params)
        ]

    def init(params: Params, global_step: Step = 0) -> Slots:
        matrix_axes(params)
        return held_slots(hyper)

    @loads_slots
    def update(updates: Updates, given: Slots, params: Params, step: Step, /) -> tuple[Updates, Slots]:
        gradients, treedef = match_gradients(updates, params), trees.structure(params)
        for name in held_names(hyper):
            if name not in given:
                raise missing_slot(name, given)
        small = value_at("epsilon", hyper["epsilon"], step, given)
        new: list[Any] = [None] * len(gradients)
        matrices, ways, layouts = {}, {}, []
        for i, (gradient, leaf, where, (path, _)) in enumerate(
            zip(gradients, jax.tree.leaves(params), matrix_axes(params), own_leaves(params), strict=True)
        ):
            if gradient is not None:
                sharding = layout_of(path) if is_spread else None
                layouts.append(layout_of_matrix(sharding, leaf.shape, where))
                dense = gradient.to_dense() if isinstance(gradient, IndexedSlices) else gradient
                matrices[i], ways[i] = as_matrix(dense.astype(trees.compute_dtype(leaf.dtype)), where)
        made = orthogonalized(list(matrices.values()), iteration, small, layouts)
        for i, matrix in zip(matrices, made, strict=True):
            new[i] = factor(*matrix.shape[-2:]) * ways[i](matrix)
        return treedef.unflatten(new), {name: given[name] for name in held_names(hyper)}

    roles = Roles(dict.fromkeys(held_names(hyper), Role.HELD))
    return Optimizer(Init(init, lambda params: roles), update, report(hyper))
