"""Weight decay, as an element of a chain."""

from collections.abc import Mapping

from jstep.core.types import Array, Optimizer
from jstep.core.var_list import VarList
from jstep.optimizers.decays import Decay, decay_arguments, decay_of, is_zero
from jstep.optimizers.leafwise import Hyper, leafwise


def add_weight_decay(weight_decay: Decay, mask: VarList | Mapping[str, float] = None) -> Optimizer:
    """Decay: u + weight_decay·p, u what the element before returned.

    After `scale_by_adam` it is decoupled as in AdamW, before a `trace` coupled as in SGD; `decay_weights`, after the
    learning rate, is independent of that.

    Args:
        weight_decay: The decay, ≥ 0: a number, a schedule or held. Or a mapping from paths or globs to such: the first
            that matches a leaf counts, and what none matches does not decay.
        mask: Which leaves decay: the grammar of `var_list`, None for all. Or path or glob → a factor ≥ 0 on the decay,
            such as `mup(...).decays`: the first that matches a leaf counts, and what none matches decays as it is.

    Returns:
        An element of a chain without slots, whose hyperparameter is called `weight_decay`, or `weight_decay/glob` of
        several.

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
    # A row that has no gradient decays, too.
    return leafwise(add_weight_decay_rule, hyper=hyper, flags=flags, sparse=is_zero(hyper))


def add_weight_decay_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update with its decay."""
    decay = decay_of(h)
    return (g if decay is None else g + decay * p), {}
