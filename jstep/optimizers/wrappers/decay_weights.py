"""Weight decay that does not depend on the learning rate."""

from __future__ import annotations

from collections.abc import Mapping

from jstep.core.checks import as_bool
from jstep.core.types import Array, Optimizer
from jstep.core.var_list import VarList
from jstep.optimizers.decays import Decay, decay_arguments, decay_of
from jstep.optimizers.hyper import Hyper
from jstep.optimizers.leafwise import LeafSlots, leafwise


def decay_weights(
    weight_decay: Decay, mask: VarList | Mapping[str, float] = None, *, cautious: bool = False
) -> Optimizer:
    """Weight decay independent of the learning rate: u −= wd·p, chained after an optimizer whose updates are u.

    Args:
        weight_decay: The fraction wd ≥ 0 of each weight that an update removes; use a schedule to make it follow the
            learning rate. Or a mapping from paths or globs to these: the first match applies, and leaves without a
            match do not decay.
        mask: The leaves that decay: a predicate `(path, leaf) -> bool`, paths or globs, a tree of bools; None for all.
            Or path or glob → a factor ≥ 0 on the decay: the first match applies, and leaves without a match have the
            factor 1.
        cautious: Whether to decay an element only if its update also moves it towards zero: u·p < 0.

    Returns:
        An `Optimizer` without slots. Its hyperparameter is `decoupled_weight_decay`, or `decoupled_weight_decay/glob`
        for each entry of a mapping. Leaves without a gradient do not decay; sparse updates become dense.

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
    rule = cautious_decay_rule if as_bool(cautious, "cautious") else decay_rule
    hyper, flags = decay_arguments("decoupled_weight_decay", weight_decay, mask)
    return leafwise(rule, hyper=hyper, flags=flags, sparse=False)


def decay_rule(u: Array, p: Array, slots: LeafSlots, h: Hyper) -> tuple[Array, LeafSlots]:
    """A leaf's update with weight decay."""
    decay = decay_of(h)
    return (u if decay is None else u - decay * p), {}


def cautious_decay_rule(u: Array, p: Array, slots: LeafSlots, h: Hyper) -> tuple[Array, LeafSlots]:
    """A leaf's update with weight decay for the elements that the update moves towards zero."""
    decay = decay_of(h)
    if decay is None:
        return u, {}
    towards_zero = ((u < 0) & (p > 0)) | ((u > 0) & (p < 0))
    return u - decay * towards_zero.astype(p.dtype) * p, {}
