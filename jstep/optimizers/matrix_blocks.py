"""Elements of a chain for matrices: NorMuon's normalization of neurons, and steps on a sphere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_number, one_of
from jstep.core.placement import when_concrete
from jstep.core.slot_roles import Init
from jstep.core.trees import Array, Optimizer, Params, ScalarOrSchedule, Slots, Step
from jstep.optimizers.axes import Axes, MatrixAxes, checked_axes, matrix_axes_of, partition_shown
from jstep.optimizers.directions import BETA, Result, Values, average, from_update, positive
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Slot
from jstep.optimizers.masks import by_path, own_leaves

Over: TypeAlias = Literal["neuron", "short"]


def normalize_neurons(
    beta2: ScalarOrSchedule = 0.95,
    epsilon: ScalarOrSchedule = 1e-10,
    axes: Axes | None = None,
    over: Over = "neuron",
) -> Optimizer:
    """NorMuon's block: v averages the mean of u² over the inputs of each neuron; U = u/(√v + ε); u = U·‖u‖/(‖U‖ + ε).

    Norms are Frobenius norms. Each matrix u keeps its norm, so scales before or after this block are preserved, and
    the bias of v cancels. After `orthogonalize` it is NorMuon (see the example).

    Args:
        beta2: The decay of the average v, in [0, 1).
        epsilon: Added to √v and ‖U‖, > 0.
        axes: `(path, leaf) -> (in, out)`, the axes (each a number or several) that form the matrix; other axes index
            a stack of matrices. By default the last two, (in, out) as in Flax.
        over: "neuron" for a mean over the in axes, one v for each output; "short" for a mean over the shorter of in
            and out (in, if they are equal), which also normalizes matrices with more inputs than outputs evenly.

    Returns:
        An element of a chain with the slot `neuron_v` (initially 0), which has the leaf's shape with size 1 on the
        axes of the mean. Its hyperparameters are `neuron_beta2` and `neuron_epsilon`.

    Raises:
        ValueError: An argument is out of its range; at `init`, a leaf has fewer than two axes.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> normuon = jstep.chain(
        ...     jstep.trace(0.95, use_nesterov=True),
        ...     jstep.orthogonalize(scale="original"),
        ...     jstep.normalize_neurons(),
        ...     jstep.add_weight_decay(0.1),
        ...     jstep.scale_by_learning_rate(0.02),
        ... )
        >>> optimizer = jstep.partition(
        ...     {"normuon": normuon, "adamw": jstep.adamw(1e-3)},
        ...     lambda path, leaf: "normuon" if leaf.ndim == 2 else "adamw",
        ... )
        >>> state = jstep.TrainState.create({"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}, optimizer)
        >>> print(state.slots["normuon/neuron_v"]["w"].shape)
        (1, 3)

    Source: Li et al., "NorMuon: Making Muon more efficient and scalable" (2025), and its authors' code, which keeps the
    norm, while the paper sets the root mean square to 0.2.
    """
    chosen = checked_axes(axes)
    whose = one_of(over, "over", ["neuron", "short"])
    wording = "to normalize its neurons", partition_shown("normuon", NORMUON)

    def mean_and_matrix(path: str, leaf: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of the mean, and those of the matrix."""
        rows, columns = matrix_axes_of(path, leaf, chosen, *wording)
        sizes = [math.prod(np.shape(leaf)[axis] for axis in part) for part in (rows, columns)]
        return columns if whose == "short" and sizes[1] < sizes[0] else rows, rows + columns

    def shape(path: str, leaf: Any) -> tuple[int, ...]:
        mean, _ = mean_and_matrix(path, leaf)
        return tuple(1 if axis in mean else size for axis, size in enumerate(np.shape(leaf)))

    hyper = {"neuron_beta2": checked("beta2", beta2, **BETA), "neuron_epsilon": positive("epsilon", epsilon)}
    flags = {"axes": by_path(mean_and_matrix)}
    return from_update("normalize_neurons", neurons_update, {"neuron_v": Slot(shape=shape)}, hyper, flags=flags)


NORMUON = (
    "jstep.chain(jstep.trace(0.95, use_nesterov=True), jstep.orthogonalize(), jstep.normalize_neurons(), "
    "jstep.scale_by_learning_rate(0.02))"
)


def neurons_update(u: Array, p: Array, s: Values, h: Values) -> Result:
    """The direction and second moments."""
    mean, matrix = h.axes
    v = average(s.neuron_v, jnp.mean(jnp.square(u), mean, keepdims=True), h.neuron_beta2)
    new = u / (jnp.sqrt(v) + h.neuron_epsilon)
    old_norm, norm = (jnp.sqrt(jnp.sum(jnp.square(x), matrix, keepdims=True)) for x in (u, new))
    return new * (old_norm / (norm + h.neuron_epsilon)), {"neuron_v": v}


Radius: TypeAlias = ScalarOrSchedule | Callable[[str, Any], float] | None
SMALLEST = 1e-10
"""The lower bound of norms in divisors."""


def on_hyperball(learning_rate: ScalarOrSchedule, radius: Radius = None, axes: Axes | None = None) -> Optimizer:
    """Hyperball: q = p − lr·R·u/‖u‖; p = R·q/‖q‖, for each matrix p with R = ‖p‖ and update u of the previous element.

    Norms are Frobenius norms. The matrix rotates by about lr radians, whatever the size of u, and keeps its norm, so
    weight decay would have no effect. AdamH, MuonH and NorMuonH are chains that end with it (see the examples). Do not
    change the updates after it (`cautious`, `decay_weights`, `scale_updates`), because that changes the norm. An
    average of the parameters has a smaller norm than the parameters. In bfloat16 small steps are lost: wrap the whole
    optimizer in `master_weights`.

    Use it for linear layers; train embeddings, biases, gains, routers and gates with Adam.

    Args:
        learning_rate: The relative step size lr ≥ 0; 0.02 is common, or √(lr·weight_decay) of the AdamW run that it
            replaces.
        radius: The norm R; None for the current norm of the matrix, which needs no slot. A number > 0, or
            `(path, leaf) -> number`, fixes the norm: the first update scales each matrix to it.
        axes: `(path, leaf) -> (in, out)`, the axes (each a number or several) that form the matrix; other axes index
            a stack of matrices, each with its own norm. By default the last two axes.

    Returns:
        An element of a chain without slots, used in place of `scale_by_learning_rate`.

    Raises:
        ValueError: An argument is out of its range; at `init`, a leaf has fewer than two axes, or a matrix is zero and
            would stay zero.

    Example:
        AdamH, with Adam for leaves that are not matrices:

        >>> import jax.numpy as jnp, jstep
        >>> adamh = jstep.chain(jstep.scale_by_adam(0.9, 0.95), jstep.on_hyperball(0.02))
        >>> optimizer = jstep.partition(
        ...     {"ball": adamh, "adam": jstep.adam(1e-3)}, lambda path, leaf: "ball" if leaf.ndim == 2 else "adam"
        ... )
        >>> state = jstep.TrainState.create({"w": jnp.array([[3.0], [4.0]]), "b": jnp.zeros(1)}, optimizer)
        >>> grads = {"w": jnp.array([[1.0], [-1.0]]), "b": jnp.ones(1)}
        >>> w = jstep.apply_gradients(state, grads, optimizer).params["w"]
        >>> print(*(f"{x:.4f}" for x in (*w[:, 0], jnp.linalg.norm(w))))
        2.9205 4.0584 5.0000

        MuonH, and NorMuonH, which has one more block:

        >>> muonh = jstep.chain(
        ...     jstep.trace(0.95, use_nesterov=True), jstep.orthogonalize(scale=None), jstep.on_hyperball(0.02)
        ... )
        >>> normuonh = jstep.chain(
        ...     jstep.trace(0.95, use_nesterov=True),
        ...     jstep.orthogonalize(scale=None),
        ...     jstep.normalize_neurons(),
        ...     jstep.on_hyperball(0.02),
        ... )

    Source: Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball Optimization" (2026),
    and its AdamH and MuonH in Levanter, which also use the norm at the current step.
    """
    chosen = checked_axes(axes)
    wording = (
        "to keep its norm",
        partition_shown("ball", "jstep.chain(jstep.scale_by_adam(0.9, 0.95), jstep.on_hyperball(0.02))"),
    )

    def matrix_axes(path: str, leaf: Any) -> MatrixAxes:
        return matrix_axes_of(path, leaf, chosen, *wording)

    hyper: dict[str, Any] = {"learning_rate": learning_rate}
    flags = {"axes": by_path(matrix_axes)}
    if callable(radius) and not isinstance(radius, type):
        of_leaf: Any = radius
        flags["radius"] = by_path(lambda path, leaf: _given(of_leaf(path, leaf), path))
    elif radius is not None:
        hyper["radius"] = radius
    optimizer = from_update("hyperball", hyperball_update, {}, hyper, flags=flags)
    made = optimizer.init
    assert isinstance(made, Init)

    def init(params: Params, global_step: Step = 0) -> Slots:
        slots = made(params, global_step)
        _refuse_zeros(params, matrix_axes)
        return slots

    return optimizer._replace(init=dataclasses.replace(made, make=init))


def hyperball_update(u: Array, p: Array, s: Values, h: Values) -> Result:
    """The update p·(R/‖q‖ − 1) − u·lr·R²/(‖u‖·‖q‖), with ‖q‖² from three sums in one pass over p and u.

    Relative to ‖p‖, d is ‖q‖² − 1 and excess is R² − 1; computing R/‖q‖ − 1 directly would lose half the digits.
    """
    axes = tuple(axis for part in h.axes for axis in part)
    of_p, of_u, inner = (jnp.sum(x, axes, keepdims=True) for x in (jnp.square(p), jnp.square(u), p * u))
    norm_p, norm_u = (jnp.maximum(jnp.sqrt(square), SMALLEST) for square in (of_p, of_u))
    ratio = h.radius / norm_p if "radius" in h else 1.0
    excess = (h.radius * h.radius - of_p) / jnp.square(norm_p) if "radius" in h else 0.0
    # Less than the learning rate if ‖u‖ is below the smallest norm; NaN if it is infinite.
    step = h.learning_rate * ratio
    taken = step * (jnp.sqrt(of_u) / norm_u)
    d = taken * taken - 2 * step * (inner / norm_p / norm_u)
    square = 1 + d
    # If the step cancels p, no direction is left: p stays unchanged.
    exists = ~(square < 1e-6)
    length = jnp.sqrt(jnp.where(exists, square, jnp.ones_like(square)))
    of_old = (excess - d) / (length * (ratio + length))
    of_new = ratio * step * norm_p / (length * norm_u)
    return jnp.where(exists, of_old * p - of_new * u, jnp.zeros_like(p)), {}


def _given(radius: Any, path: str) -> float:
    return as_number(radius, f"radius at {trees.quoted(path)}", low=0, above=True)


def _refuse_zeros(params: Params, matrix_axes: Callable[[str, Any], MatrixAxes]) -> None:
    """Raise for matrices whose norm is 0, as soon as their values are known."""
    for path, leaf in own_leaves(params):
        if trees.is_trainable(leaf) and trees.is_array(leaf) and np.size(leaf):
            axes = sum(matrix_axes(path, leaf), ())
            if trees.is_traced(leaf):
                when_concrete(path, _refuse_zero, axes)
            else:
                _refuse_zero(path, leaf, axes)


def _refuse_zero(path: str, leaf: Any, axes: tuple[int, ...]) -> None:
    if not trees.is_array(leaf) or _is_elsewhere(leaf):
        return
    with jax.ensure_compile_time_eval():
        norms = jax.device_get(_norms(leaf, axes))
    if np.any(norms == 0):
        place = tuple(np.argwhere(norms == 0)[0].tolist())
        raise ValueError(
            f"params: {f'the matrix {place} of ' if place else ''}the leaf at {trees.quoted(path)} has norm 0: must "
            "not be zero, because on_hyperball keeps the norm and it would stay zero; initialize it with random "
            "numbers, or train it with another optimizer (jstep.partition)"
        )


def _is_elsewhere(leaf: Any) -> bool:
    return trees.is_traced(leaf) or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable)


def _norms(x: Any, axes: tuple[int, ...]) -> Array:
    on: Any = jnp if isinstance(x, jax.Array) else np  # NumPy arrays stay in host memory
    norms: Array = on.sqrt(on.sum(on.square(x.astype(trees.compute_dtype(x.dtype))), axes))
    return norms
