"""LAMB's trust ratio as an element of a chain."""

from jstep.core.types import Array, Optimizer
from jstep.optimizers.leafwise import Hyper, leafwise
from jstep.optimizers.trust_ratio import trust_ratio


def scale_by_trust_ratio() -> Optimizer:
    """Trust ratio: u·‖p‖/‖u‖ for each leaf, or u if a norm is 0; u is the update from the previous element.

    Returns:
        An element of a chain without slots.

    Example:
        LAMB:

        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.chain(
        ...     jstep.scale_by_adam(epsilon=1e-6), jstep.scale_by_trust_ratio(), jstep.scale_by_learning_rate(0.25)
        ... )
        >>> state = jstep.TrainState.create({"w": 2.0}, optimizer)
        >>> print(jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer).params["w"])
        1.5

    Source: You et al. (2019); `optax.scale_by_trust_ratio`.
    """
    return leafwise(scale_by_trust_ratio_rule, hyper={}, sparse=False)


def scale_by_trust_ratio_rule(g: Array, p: Array, slots: dict[str, Array], h: Hyper) -> tuple[Array, dict[str, Array]]:
    """A leaf's update."""
    return trust_ratio(p, g) * g, {}
