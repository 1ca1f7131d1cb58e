"""The page "Mixture of experts": its loss and bias row by row in NumPy, microbatches, and experts on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import DOCS

pytestmark = pytest.mark.thorough  # the page runs for seconds

PAGE = DOCS / "recipes" / "mixture-of-experts.md"


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def by_hand(page, bias, x, y, computed=None):
    """The loss and how many tokens chose each expert, token by token in float64.

    `computed` says which choices found a place: all of them by default.
    """
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), page["init_params"]())
    experts, counts, error = params["experts"], np.zeros(page["EXPERTS"], int), 0.0
    for t, token in enumerate(np.asarray(x, np.float64)):
        scores = 1 / (1 + np.exp(-token @ params["router"]))
        chosen = np.argsort(-(scores + bias))[: page["CHOSEN"]]
        output = token.copy()
        for place, e in enumerate(chosen):
            counts[e] += 1
            if computed is None or computed(t, place, e):
                weight = scores[e] / scores[chosen].sum()
                output += weight * (gelu(token @ experts["up"][e]) @ experts["down"][e])
        error += np.mean((output - y[t]) ** 2)
    return error / len(x), counts


@pytest.mark.parametrize("n", [1, 4])
def test_loss_and_bias_token_by_token(page, standard, n):
    x, y = page["batches"](3)
    bias = np.linspace(-0.5, 0.5, page["EXPERTS"]).astype(np.float32)
    loss, counts = by_hand(page, bias, x, y)
    unbiased, others = by_hand(page, 0.0, x, y)
    assert (counts != others).any()
    assert abs(loss - unbiased) > 1e-3

    step = page["make_step"](page["everywhere"], num_microbatches=n)
    state, metrics = step(page["make_state"]().replace(model_state=jnp.asarray(bias)), x, y)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(metrics["max_load"]) == pytest.approx(counts.max() / counts.mean())
    np.testing.assert_allclose(state.model_state, bias + page["SPEED"] * np.sign(counts.mean() - counts), rtol=1e-6)
