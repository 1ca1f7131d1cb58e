"""Muon's orthogonalization, as an element of a chain."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.checks import as_function, as_int, kind, one_of, shown
from jstep.core.indexed_slices import IndexedSlices
from jstep.core.types import Optimizer, Params, ScalarOrSchedule, Slots, Step, Updates
from jstep.optimizers.arguments import low_dtype
from jstep.optimizers.held import held_names, held_slots
from jstep.optimizers.hyper import checked, report, value_at
from jstep.optimizers.masks import own_leaves
from jstep.optimizers.matched import matched_gradients, missing_slot
from jstep.optimizers.names import Init, Role, Roles
from jstep.optimizers.newton_schulz import Iteration, as_matrix, orthogonalized

COEFFICIENTS = (3.4445, -4.775, 2.0315)
Axes = Callable[[str, Any], tuple[Any, Any]]
Scale = Literal["rms", "original"]
SCALES: dict[str | None, Callable[[int, int], float]] = {
    "rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, columns / rows)),
    None: lambda rows, columns: 1.0,
}


def orthogonalize(
    ns_steps: int = 5,
    ns_coefficients: Sequence[Any] = COEFFICIENTS,
    epsilon: ScalarOrSchedule = 1e-7,
    scale: Scale | None = "rms",
    axes: Axes | None = None,
    ns_dtype: Any = jnp.float32,
) -> Optimizer:
    """Orthogonalization: scale · (about UVᵀ, where the update is USVᵀ), a Newton–Schulz iteration for each matrix.

    X = u/max(‖u‖, ε), and ns_steps times A = XXᵀ; X = a·X + (b·A + c·A²)·X. It does not converge: singular values end
    between 0.7 and 1.2, soon.

    Args:
        ns_steps: How many iterations, ≥ 1.
        ns_coefficients: (a, b, c), or one such triple for each iteration.
        epsilon: The smallest norm that is divided by, > 0: a gradient below it is damped.
        scale: "rms" for 0.2·√max(in, out), by which an update is as large as AdamW's; "original" for √max(1, out/in);
            None for 1.
        axes: `(path, leaf) -> (in, out)`, the axes (a number or several) of a leaf that are its matrix; further ones
            count matrices. Unless told the last two are, (in, out) as in Flax, and those before them count.
        ns_dtype: The dtype of the products; `jnp.bfloat16` is faster on accelerators, and off by a hundredth.

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

    Source: Jordan et al., "Muon" (2024); Bernstein and Newhouse, "Old Optimizer, New Norm" (2024).
    """
    kept = low_dtype("ns_dtype", ns_dtype)
    # float32 is the least that leaves are computed in: what is wider stays so.
    iteration = Iteration(
        _coefficients(ns_coefficients, as_int(ns_steps, "ns_steps", at_least=1)), None if kept == np.float32 else kept
    )
    hyper = {"epsilon": checked("epsilon", epsilon, low=0, above=True)}
    factor = SCALES[one_of(scale, "scale", list(SCALES))]
    chosen = as_function(axes, "axes", "(path, leaf) -> (in, out)", optional=True) or _last_two

    def matrix_axes(params: Params) -> list[Any]:
        return [_axes_of(path, leaf, chosen) if trees.is_trainable(leaf) else None for path, leaf in own_leaves(params)]

    def init(params: Params, global_step: Step = 0) -> Slots:
        matrix_axes(params)
        return held_slots(hyper)

    def update(updates: Updates, given: Slots, params: Params, step: Step, /) -> tuple[Updates, Slots]:
        gradients, treedef = matched_gradients(updates, params), trees.structure(params)
        for name in held_names(hyper):
            if name not in given:
                raise missing_slot(name, given)
        small = value_at("epsilon", hyper["epsilon"], step, given)
        new: list[Any] = [None] * len(gradients)
        matrices, ways = {}, {}
        for i, (gradient, leaf, where) in enumerate(
            zip(gradients, jax.tree.leaves(params), matrix_axes(params), strict=True)
        ):
            if gradient is not None:
                dense = gradient.to_dense() if isinstance(gradient, IndexedSlices) else gradient
                matrices[i], ways[i] = as_matrix(dense.astype(trees.compute_dtype(leaf.dtype)), where)
        for i, answer in zip(matrices, orthogonalized(list(matrices.values()), iteration, small), strict=True):
            new[i] = factor(*answer.shape[-2:]) * ways[i](answer)
        return treedef.unflatten(new), {name: given[name] for name in held_names(hyper)}

    roles = Roles(dict.fromkeys(held_names(hyper), Role.HELD))
    return Optimizer(Init(init, lambda params: roles), update, report(hyper))


def _coefficients(given: Any, count: int) -> tuple[tuple[float, float, float], ...]:
    def number(x: Any) -> bool:
        return isinstance(x, int | float) and not isinstance(x, bool)

    wrong = TypeError(
        f"ns_coefficients={shown(given)}: must be three numbers (a, b, c), or such a triple for each of the {count} "
        f"steps, got {kind(given)}"
    )
    if not isinstance(given, list | tuple):
        raise wrong
    triples = [given] * count if len(given) == 3 and all(map(number, given)) else given
    for triple in triples:
        if not (isinstance(triple, list | tuple) and len(triple) == 3 and all(map(number, triple))):
            raise wrong
    if len(triples) != count:
        raise ValueError(f"ns_coefficients: must have a triple for each step, got {len(triples)} for ns_steps={count}")
    return tuple((float(a), float(b), float(c)) for a, b, c in triples)


def _last_two(path: str, leaf: Any) -> tuple[int, int]:
    return -2, -1


def _axes_of(path: str, leaf: Any, chosen: Axes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = np.shape(leaf)
    if len(shape) < 2:
        raise ValueError(
            f"params: the leaf at {trees.quoted(path)} has shape {shape}: must have two axes, a matrix, to be made "
            "orthogonal; train the rest by another optimizer: jstep.partition({'muon': jstep.muon(1e-3), "
            "'adamw': jstep.adamw(1e-3)}, lambda path, leaf: 'muon' if leaf.ndim == 2 and 'embed' not in path else "
            "'adamw')"
        )
    given = chosen(path, leaf)
    if not (isinstance(given, tuple | list) and len(given) == 2):
        raise ValueError(f"axes: must return (in, out) for {path!r} of shape {shape}, got {shown(given)}")
    try:
        parts = [
            tuple(range(len(shape))[axis] for axis in (part if isinstance(part, tuple | list) else (part,)))
            for part in given
        ]
    except (IndexError, TypeError) as error:
        raise ValueError(f"axes: {shown(given)} for {path!r}: must be axes of shape {shape}") from error
    flat = [axis for part in parts for axis in part]
    if not all(parts) or len(set(flat)) != len(flat):
        raise ValueError(f"axes: {shown(given)} for {path!r} of shape {shape}: must be two parts of different axes")
    return parts[0], parts[1]
