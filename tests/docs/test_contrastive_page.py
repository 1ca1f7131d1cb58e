"""The recipe "Contrastive losses in parts": its losses and gradients are those of the whole
batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import DOCS

import jstep

PAGE = DOCS / "recipes" / "large-batches.md"


def assert_same_gradients(found, expected):
    """Equal up to the rounding of float32 sums, relative to the largest element of a leaf."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-6 * float(jnp.abs(other).max()))


@pytest.mark.thorough
def test_gradients_of_clip_in_parts(page):
    params, rows = page["init_params"](), (page["images"], page["texts"])
    expected = jax.grad(page["whole_loss"])(params, *rows)
    assert_same_gradients(jax.jit(jax.grad(page["clip_loss"]))(params, *rows), expected)
    # The gradients of the microbatches are others.
    _, others = jstep.compute_gradients(page["whole_loss"], num_microbatches=8)(params, *rows)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same_gradients(others, expected)


@pytest.mark.thorough
def test_steps_with_keys_are_those_of_a_loop_by_hand(page):
    """SimCLR for three steps, against the whole batch in a plain loop with the keys of each
    step."""
    optimizer, key = jstep.gradient_descent(0.1), jax.random.key(1)
    images = page["images"][:16]

    def whole(params, x, rng):
        noise = jnp.stack(
            [jax.random.normal(one, (2, x.shape[1])) for one in jax.random.split(rng, len(x))]
        )
        u, v = (page["encode"](params["image"], x + 0.1 * noise[:, i]) for i in range(2))
        z = jnp.concatenate([u, v])
        total = 0.0
        for i in range(len(z)):
            others = jnp.array([j for j in range(len(z)) if j != i])
            logits = z @ z[i] / 0.1
            total -= logits[(i + len(x)) % len(z)] - jax.nn.logsumexp(logits[others])
        return total / len(z)

    step = jstep.minimize(page["simclr_loss"], optimizer, rng=key)
    state = jstep.TrainState.create(page["init_params"](), optimizer)
    params = page["init_params"]()
    for i in range(2):
        expected, grads = jax.jit(jax.value_and_grad(whole))(
            params, images, jax.random.fold_in(key, i)
        )
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        state, metrics = step(state, images)
        assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
    for found, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
