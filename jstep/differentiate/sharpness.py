"""Sharpness-aware minimization: the perturbed parameters at which the gradient is taken."""

from typing import Any

import jax.numpy as jnp

from jstep.core import trees
from jstep.core.checks import shown
from jstep.core.indexed_slices import IndexedSlices
from jstep.core.traced_arguments import as_scalar
from jstep.core.trees import Array, Held
from jstep.differentiate.clipping import global_norm


def perturbed(leaves: list[Array], gradients: list[Any], rho: Any, *, adaptive: bool) -> list[Array]:
    """Return the nearby parameters at which the loss is largest, to first order.

    SAM: p + ρ·g / (‖g‖ + 1e-12); adaptive (ASAM): p + ρ·p²·g / (‖ |p|·g ‖ + 1e-12). Norms are over all leaves.

    Args:
        leaves: The parameters that are differentiated.
        gradients: Their gradients, of any scale.
        rho: The radius ρ.
        adaptive: Whether to scale the radius by the magnitude of each element.

    Source: Foret et al., "Sharpness-Aware Minimization" (2020); Kwon et al., "ASAM" (2021).
    """
    dense = [g.to_dense() if isinstance(g, IndexedSlices) else g for g in gradients]
    wide = [None if g is None else g.astype(trees.compute_dtype(g.dtype)) for g in dense]
    weights = [jnp.abs(p.astype(trees.compute_dtype(p.dtype))) if adaptive else None for p in map(jnp.asarray, leaves)]
    weighed = [g if g is None or w is None else w.astype(g.dtype) * g for g, w in zip(wide, weights, strict=True)]
    norm = global_norm(weighed)
    scale = jnp.asarray(rho).astype(norm.dtype) / (norm + jnp.asarray(1e-12, norm.dtype))

    def moved(p: Array, g: Array | None, w: Array | None) -> Array:
        p = jnp.asarray(p)
        if g is None:
            return p
        step = scale.astype(g.dtype) * (g if w is None else w.astype(g.dtype) * g)
        return (p.astype(g.dtype) + step).astype(p.dtype)

    return [moved(p, g, w) for p, g, w in zip(leaves, weighed, weights, strict=True)]


def checked_sharpness(sharpness: Any) -> Any:
    """Validate the radius ρ ≥ 0: a number, a scalar array (possibly traced), or None."""
    return None if sharpness is None else as_scalar(sharpness, "sharpness", low=0, expected="a number or None")


def checked_radius(sharpness: Any) -> Any:
    """Validate the radius of a training step: as in `checked_sharpness`, or a schedule."""
    if isinstance(sharpness, Held):
        raise TypeError(
            f"sharpness=held({sharpness.name!r}, ...): must be a number, an array or a schedule; held values are "
            "optimizer slots, and the radius belongs to the loss, which has none"
        )
    if isinstance(sharpness, type):
        raise TypeError(f"sharpness={shown(sharpness)}: must be a number, an array or a schedule, got a class")
    return sharpness if callable(sharpness) else checked_sharpness(sharpness)
