"""Masks that match no parameter, and the partition that an error suggests."""

import jax.numpy as jnp
import pytest

import jstep

PARAMS = {"dense": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)}, "scale": jnp.ones(())}


@pytest.mark.parametrize(
    "make",
    [
        lambda mask: jstep.adamw(weight_decay_mask=mask),
        lambda mask: jstep.sgd(0.1, weight_decay_mask=mask),
        lambda mask: jstep.lars(0.1, weight_decay_mask=mask),
        lambda mask: jstep.soap(weight_decay_mask=mask),
        lambda mask: jstep.schedule_free_adamw(weight_decay_mask=mask),
        lambda mask: jstep.chain(jstep.add_weight_decay(0.1, mask), jstep.scale(-0.1)),
        lambda mask: jstep.lars(0.1, trust_ratio_mask=mask),
        lambda mask: jstep.partition({"all": jstep.adamw(weight_decay_mask=mask)}, lambda path, leaf: "all"),
    ],
)
def test_unmatched_masks_suggest_the_nearest_path(make) -> None:
    optimizer = make(["dense/kernle"])
    with pytest.raises(ValueError, match="mask: 'dense/kernle' matches no parameter; nearest: 'dense/kernel'"):
        jstep.TrainState.create(PARAMS, optimizer)  # before the first step
