"""Muon's orthogonalization as an element of a chain."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_bool, one_of
from jstep.core.indexed_slices import IndexedSlices
from jstep.core.layouts import layout_of
from jstep.core.slot_roles import Init, Role, Roles
from jstep.core.types import Optimizer, Params, ScalarOrSchedule, Slots, Step, Updates
from jstep.optimizers.arguments import low_dtype
from jstep.optimizers.distribute_matrices import layout_of_matrix
from jstep.optimizers.held import held_names, held_slots
from jstep.optimizers.hyper import checked, report, value_at
from jstep.optimizers.masks import own_leaves
from jstep.optimizers.match_gradients import match_gradients, missing_slot
from jstep.optimizers.matrix_axes import Axes, axes_of, checked_axes, partition_shown
from jstep.optimizers.newton_schulz import Iteration, Normalization, as_matrix, orthogonalized
from jstep.optimizers.ns_presets import COEFFICIENTS, triples_and_safety

Scale = Literal["rms", "original"]
SCALES: dict[str | None, Callable[[int, int], float]] = {
    "rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, columns / rows)),
    None: lambda rows, columns: 1.0,
}


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
            axes_of(path, leaf, chosen, *wording) if trees.is_trainable(leaf) else None
            for path, leaf in own_leaves(params)
        ]

    def init(params: Params, global_step: Step = 0) -> Slots:
        matrix_axes(params)
        return held_slots(hyper)

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
