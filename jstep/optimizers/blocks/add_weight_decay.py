"""Weight decay as an element of a chain."""

from __future__ import annotations

from collections.abc import Mapping

from jstep.core.types import Array, Optimizer
from jstep.core.var_list import VarList
from jstep.optimizers.decays import Decay, decay_arguments, decay_of, is_zero
from jstep.optimizers.leafwise import Hyper, leafwise


def add_weight_decay(weight_decay: Decay, mask: VarList | Mapping[str, float] = None) -> Optimizer:
    """Add weight decay: u + weight_decay·p, where u is the update from the previous element.

    After `scale_by_adam` the decay is decoupled as in AdamW; before a `trace` it is coupled as in SGD. For a decay
    that does not depend on the learning rate, put `decay_weights` after it.

    Args:
        weight_decay: The decay ≥ 0: a number, a schedule or `held`. Or a mapping from paths or globs to these: the
            first match applies, and leaves without a match do not decay.
        mask: The leaves that decay, in the grammar of `var_list`; None for all. Or path or glob → a factor ≥ 0 on the
            decay, such as `mup(...).decays`: the first match applies, and leaves without a match have the factor 1.

    Returns:
        An element of a chain without slots. Its hyperparameter is `weight_decay`, or `weight_decay/glob` for each entry
        of a mapping.

    Raises:
        ValueError: A number is negative, or an entry matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.add_weight_decay(0.5), jstep.scale_by_learning_rate(0.25))
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer).params["w"])
        1.5

    Source: `optax.add_decayed_weights`.
    """
    hyper, flags = decay_arguments("weight_decay", weight_decay, mask)
    # Rows without a gradient decay, too.
    return leafwise(add_weight_decay_rule, hyper=hyper, flags=flags, sparse=is_zero(hyper))


def add_weight_decay_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update with weight decay."""
    decay = decay_of(h)
    return (g if decay is None else g + decay * p), {}
