"""NorMuon's normalization: one second moment per neuron, after orthogonalization."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np

from jstep.core.checks import one_of
from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.optimizers.adam import average
from jstep.optimizers.arguments import beta
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, Slot, leafwise
from jstep.optimizers.masks import by_path
from jstep.optimizers.matrix_axes import Axes, axes_of, checked_axes, partition_shown

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
        rows, columns = axes_of(path, leaf, chosen, *wording)
        sizes = [math.prod(np.shape(leaf)[axis] for axis in part) for part in (rows, columns)]
        return columns if whose == "short" and sizes[1] < sizes[0] else rows, rows + columns

    def shape(path: str, leaf: Any) -> tuple[int, ...]:
        mean, _ = mean_and_matrix(path, leaf)
        return tuple(1 if axis in mean else size for axis, size in enumerate(np.shape(leaf)))

    return leafwise(
        normalize_neurons_rule,
        slots={"neuron_v": Slot(shape=shape)},
        hyper={
            "neuron_beta2": beta("beta2", beta2),
            "neuron_epsilon": checked("epsilon", epsilon, low=0, above=True),
        },
        flags={"axes": by_path(mean_and_matrix)},
        sparse=False,
    )


NORMUON = (
    "jstep.chain(jstep.trace(0.95, use_nesterov=True), jstep.orthogonalize(), jstep.normalize_neurons(), "
    "jstep.scale_by_learning_rate(0.02))"
)


def normalize_neurons_rule(u: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's direction and second moments."""
    mean, matrix = h["axes"]
    v = average(slots["neuron_v"], jnp.mean(jnp.square(u), mean, keepdims=True), h["neuron_beta2"])
    new = u / (jnp.sqrt(v) + h["neuron_epsilon"])
    old_norm, norm = (jnp.sqrt(jnp.sum(jnp.square(x), matrix, keepdims=True)) for x in (u, new))
    return new * (old_norm / (norm + h["neuron_epsilon"])), {"neuron_v": v}
