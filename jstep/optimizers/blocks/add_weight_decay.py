"""Weight decay, as an element of a chain."""

from jstep.core.types import Array, Optimizer, ScalarOrSchedule
from jstep.core.var_list import VarList
from jstep.optimizers.arguments import DECAYED, decay_hyper, with_decay
from jstep.optimizers.leafwise import Hyper, leafwise
from jstep.optimizers.masks import mask as masked


def add_weight_decay(weight_decay: ScalarOrSchedule, mask: VarList = None) -> Optimizer:
    """Decay: u + weight_decay·p, u what the element before returned.

    After `scale_by_adam` it is decoupled as in AdamW, before a `trace` coupled as in SGD; `decay_weights`, after the
    learning rate, is independent of that.

    Args:
        weight_decay: The decay, ≥ 0.
        mask: Which leaves decay: the grammar of `var_list`, None for all.

    Returns:
        An element of a chain without slots.

    Raises:
        ValueError: It is negative, or the mask matches nothing.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(jstep.add_weight_decay(0.5), jstep.scale_by_learning_rate(0.25))
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(1.0)}, optimizer).params["w"])
        1.5

    Source: `optax.add_decayed_weights`.
    """
    hyper = decay_hyper(weight_decay)
    return leafwise(
        add_weight_decay_rule,
        hyper=hyper,
        flags={DECAYED: masked("mask", mask)},
        # A row that has no gradient decays, too.
        sparse=isinstance(hyper["weight_decay"], float) and hyper["weight_decay"] == 0.0,
    )


def add_weight_decay_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update with its decay."""
    return with_decay(g, p, h), {}
