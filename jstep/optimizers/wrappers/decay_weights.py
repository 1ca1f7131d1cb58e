"""Weight decay that does not depend on the learning rate."""

from jstep.core.checks import as_bool
from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.core.var_list import VarList
from jstep.optimizers.hyper import Hyper, checked
from jstep.optimizers.leafwise import LeafSlots, leafwise
from jstep.optimizers.masks import mask as mask_of


def decay_weights(weight_decay: ScalarOrSchedule, mask: VarList = None, *, cautious: bool = False) -> Optimizer:
    """Weight decay, independent of the rate: u −= wd·p, the element after an optimizer whose updates are u.

    Args:
        weight_decay: The share wd ≥ 0 of each weight that an update takes away; a schedule makes it follow the
            learning rate where it should.
        mask: Which leaves decay: a predicate `(path, leaf) -> bool`, paths or globs, a tree of bools; None for all.
        cautious: Whether to decay an element only where its update moves it towards zero too: u·p < 0.

    Returns:
        An `Optimizer` without slots, whose hyperparameter is called `decoupled_weight_decay`. A leaf without gradient
        does not decay; a sparse update becomes dense.

    Raises:
        ValueError: `weight_decay` is out of its range, or an entry of the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.gradient_descent(0.5), jstep.decay_weights(0.25))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer).params["w"])
        0.25

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2017), where decay follows the schedule's
    fraction and not the rate; "Cautious Weight Decay" (2025).
    """
    return leafwise(
        cautious_decay_rule if as_bool(cautious, "cautious") else decay_rule,
        hyper={"decoupled_weight_decay": checked("weight_decay", weight_decay, low=0)},
        flags={"decays": mask_of("mask", mask)},
        sparse=False,
    )


def decay_rule(u: Array, p: Array, slots: LeafSlots, h: Hyper) -> tuple[Array, LeafSlots]:
    """A leaf's update with its decay."""
    return (u - h["decoupled_weight_decay"] * p if h["decays"] else u), {}


def cautious_decay_rule(u: Array, p: Array, slots: LeafSlots, h: Hyper) -> tuple[Array, LeafSlots]:
    """A leaf's update with its decay, where both move an element towards zero."""
    if not h["decays"]:
        return u, {}
    towards_zero = ((u < 0) & (p > 0)) | ((u > 0) & (p < 0))
    return u - h["decoupled_weight_decay"] * towards_zero.astype(p.dtype) * p, {}
