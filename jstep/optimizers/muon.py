"""Muon: orthogonalized momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jstep.core.checks import as_bool
from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.core.var_list import VarList
from jstep.optimizers.adam import average
from jstep.optimizers.arguments import decay_flags, decay_hyper, rate, with_decay
from jstep.optimizers.blocks.orthogonalize import Scale, orthogonalize
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise
from jstep.optimizers.matrix_axes import Axes
from jstep.optimizers.newton_schulz import Normalization
from jstep.optimizers.ns_presets import COEFFICIENTS
from jstep.optimizers.wrappers.chain import chain


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
    return chain(
        leafwise(
            nesterov_rule if as_bool(use_nesterov, "use_nesterov") else momentum_rule,
            slots={"momentum": 0.0},
            hyper={"momentum": checked("momentum", momentum, low=0, high=1)},
            sparse=False,
        ),
        orthogonalize(ns_steps, ns_coefficients, epsilon, scale, axes, ns_dtype, normalization, distribute),
        leafwise(
            step_rule,
            hyper={"learning_rate": rate(learning_rate)} | decay_hyper(weight_decay),
            flags=decay_flags(weight_decay_mask),
            sparse=False,
        ),
    )


def momentum_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's average, which is its direction."""
    m = average(slots["momentum"], g, h["momentum"])
    return m, {"momentum": m}


def nesterov_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's direction with Nesterov momentum, and its average."""
    m = average(slots["momentum"], g, h["momentum"])
    return average(m, g, h["momentum"]), {"momentum": m}


def step_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update with weight decay and learning rate."""
    return -h["learning_rate"] * with_decay(g, p, h), {}
