"""A chain of blocks equals the optimizer: the same updates, slots and hyperparameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import DECAY, DECAYED, RATE, RISING, assert_close, run_jstep, table_schedule

import jstep

LR, WD, MU, MASK = table_schedule(RATE), table_schedule(DECAY), table_schedule(RISING), list(DECAYED)

CASES = {
    "adamw": (
        lambda: jstep.adamw(LR, MU, 0.99, 1e-6, WD, MASK),
        lambda: (jstep.scale_by_adam(MU, 0.99, 1e-6), jstep.add_weight_decay(WD, MASK)),
    ),
    "lion": (
        lambda: jstep.lion(LR, MU, 0.9, WD, MASK),
        lambda: (jstep.scale_by_lion(MU, 0.9), jstep.add_weight_decay(WD, MASK)),
    ),
    "lamb": (
        lambda: jstep.lamb(LR, 0.9, 0.99, 1e-6, WD, MASK),
        lambda: (
            jstep.scale_by_adam(0.9, 0.99, 1e-6),
            jstep.add_weight_decay(WD, MASK),
            jstep.scale_by_trust_ratio(),
        ),
    ),
    "sgd-nesterov": (
        lambda: jstep.sgd(LR, MU, use_nesterov=True, weight_decay=WD, weight_decay_mask=MASK),
        lambda: (jstep.add_weight_decay(WD, MASK), jstep.trace(MU, use_nesterov=True)),
    ),
}


@pytest.mark.thorough(except_for=["lion"])
@pytest.mark.parametrize("name", CASES)
def test_a_chain_of_blocks_equals_the_optimizer(name):
    make, blocks = CASES[name]
    named, chain = make(), jstep.chain(*blocks(), jstep.scale_by_learning_rate(LR))
    (found, state), (other, chain_state) = run_jstep(named), run_jstep(chain)
    assert_close(found, other, rtol=1e-6, atol=1e-6)
    assert state.slots.keys() == chain_state.slots.keys()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.slots, chain_state.slots)
    have, want = chain.hyperparameters(3), named.hyperparameters(3)
    assert have.keys() == want.keys() - {"dampening"}
    for key, value in have.items():
        np.testing.assert_allclose(value, want[key], rtol=1e-6)


def test_scale_by_rms_and_orthogonalize():
    params = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
    grads = {"w": jnp.array([[3.0, -1.0], [2.0, 2.0]])}
    by_rms = jstep.chain(jstep.scale_by_rms(0.75, 0.0), jstep.scale(-0.5))
    state = jstep.apply_gradients(jstep.TrainState.create(params, by_rms), grads, by_rms)
    np.testing.assert_allclose(state.params["w"], params["w"] - jnp.sign(grads["w"]), rtol=1e-6)
    assert by_rms.hyperparameters(0).keys() == {"decay", "epsilon", "factor"}
    orthogonal = jstep.chain(
        jstep.orthogonalize(scale=None, ns_steps=30, ns_coefficients=(1.5, -0.5, 0.0)), jstep.scale(-1.0)
    )
    state = jstep.apply_gradients(jstep.TrainState.create(params, orthogonal), grads, orthogonal)
    u, _, vt = np.linalg.svd(grads["w"])
    np.testing.assert_allclose(params["w"] - state.params["w"], u @ vt, rtol=1e-4, atol=1e-5)
