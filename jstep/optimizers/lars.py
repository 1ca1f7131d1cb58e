"""LARS: momentum with layer-wise trust ratios."""

from __future__ import annotations

from jstep.core.checks import as_bool
from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.core.var_list import VarList
from jstep.optimizers.arguments import decay_flags, decay_hyper, rate, with_decay
from jstep.optimizers.hyper import checked
from jstep.optimizers.leafwise import Hyper, leafwise
from jstep.optimizers.masks import mask
from jstep.optimizers.trust_ratio import scale_by_ratio


def lars(
    learning_rate: ScalarOrSchedule,
    momentum: ScalarOrSchedule = 0.9,
    use_nesterov: bool = False,
    trust_coefficient: ScalarOrSchedule = 1e-3,
    epsilon: ScalarOrSchedule = 0.0,
    trust_ratio_mask: VarList = None,
    weight_decay: ScalarOrSchedule = 0.0,
    weight_decay_mask: VarList = None,
) -> Optimizer:
    """LARS: g += weight_decay·p; a = momentum·a + lr·g·trust_coefficient·‖p‖/(‖g‖ + ε); p −= a, norms by leaf.

    With Nesterov p −= (the last term of a) + momentum·a. If a norm is 0, the ratio is 1. The learning rate is inside
    the buffer: gradients accumulated at a high rate keep that rate.

    Args:
        learning_rate: The step size lr ≥ 0.
        momentum: The fraction of the old update that is kept, in [0, 1].
        use_nesterov: Whether to use Nesterov momentum.
        trust_coefficient: The step length at lr = 1 as a fraction of the leaf's norm, ≥ 0.
        epsilon: Added to ‖g‖, ≥ 0.
        trust_ratio_mask: The leaves with a trust ratio, in the grammar of `var_list`; None for all.
        weight_decay: Coupled weight decay ≥ 0, added to the gradient as weight_decay·p.
        weight_decay_mask: The leaves that decay, in the grammar of `var_list`; None for all.

    Returns:
        An `Optimizer` with the slot `momentum` (initially 0).

    Raises:
        ValueError: An argument is out of its range, or a mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.lars(1.0, trust_coefficient=0.25)
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        1.5

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017); the results match
    `optax.lars`.
    """
    return leafwise(
        nesterov_rule if as_bool(use_nesterov, "use_nesterov") else lars_rule,
        slots={"momentum": 0.0},
        hyper={
            "learning_rate": rate(learning_rate),
            "momentum": checked("momentum", momentum, low=0, high=1),
            "trust_coefficient": checked("trust_coefficient", trust_coefficient, low=0),
            "epsilon": checked("epsilon", epsilon, low=0),
        }
        | decay_hyper(weight_decay),
        flags=decay_flags(weight_decay_mask) | {"trusts": mask("trust_ratio_mask", trust_ratio_mask)},
        sparse=False,
    )


def scaled(g: Array, p: Array, h: Hyper) -> Array:
    """The gradient with weight decay, multiplied by the trust ratio and the learning rate."""
    g = with_decay(g, p, h)
    if not h["trusts"]:
        return h["learning_rate"] * g
    return scale_by_ratio(p, g, h["learning_rate"], h["trust_coefficient"], h["epsilon"])


def lars_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update and buffer."""
    a = h["momentum"] * slots["momentum"] + scaled(g, p, h)
    return -a, {"momentum": a}


def nesterov_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update with Nesterov momentum, and its buffer."""
    g = scaled(g, p, h)
    a = h["momentum"] * slots["momentum"] + g
    return -(g + h["momentum"] * a), {"momentum": a}
