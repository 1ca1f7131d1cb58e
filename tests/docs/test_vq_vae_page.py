"""The page "VQ-VAE": the step against a loop by hand, in NumPy and with the gradient of the encoder made by hand."""

import jax
import numpy as np
import pytest
from comparisons import assert_close
from pages import DOCS

import jstep

pytestmark = pytest.mark.thorough  # the page runs for seconds
PAGE = DOCS / "recipes" / "vq-vae.md"


def step_by_hand(page, params, codebook, x, rate):
    """Gradient descent on encoder and decoder, and the averages of the codebook, in float64, row by row."""
    encoder, decoder = params["encoder"], params["decoder"]
    decay, beta = page["DECAY"], page["BETA"]
    z = np.tanh(x @ encoder)
    chosen = [int(np.argmin([np.sum((row - code) ** 2) for code in codebook["codes"]])) for row in z]
    quantized = codebook["codes"][chosen]
    error = quantized @ decoder - x
    loss = np.mean(error**2) + beta * np.mean((z - quantized) ** 2)
    of_output = 2 * error / error.size
    of_decoder = quantized.T @ of_output
    # Straight through: the gradient with respect to quantized is taken as that with respect to z.
    of_z = of_output @ decoder.T + beta * 2 * (z - quantized) / z.size
    of_encoder = x.T @ (of_z * (1 - z**2))
    counts, sums = decay * codebook["counts"], decay * codebook["sums"]
    for row, code in zip(z, chosen, strict=True):
        counts[code] += 1 - decay
        sums[code] += (1 - decay) * row
    params = {"encoder": encoder - rate * of_encoder, "decoder": decoder - rate * of_decoder}
    return loss, params, {"codes": sums / counts[:, None], "counts": counts, "sums": sums}


def as_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


@pytest.mark.parametrize("devices", ["one", "eight"])
def test_steps_are_those_of_a_loop_by_hand(page, devices):
    optimizer = jstep.gradient_descent(0.5)
    train_step = jstep.minimize(page["loss_fn"], optimizer, has_model_state=True, has_aux=True)
    state = jstep.TrainState.create(page["init_params"](), optimizer, model_state=page["init_codebook"]())
    params, codebook = as_float64(page["init_params"]()), as_float64(page["init_codebook"]())
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    if devices == "eight":
        state = jstep.shard_state(state, mesh)
    for step in range(10):
        x = page["batches"](step)
        loss, params, codebook = step_by_hand(page, params, codebook, x.astype(np.float64), 0.5)
        state, metrics = train_step(state, jstep.shard_batch(x, mesh) if devices == "eight" else x)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-4)
    assert_close(state.params, params, 1e-4, 1e-5)
    assert_close(state.model_state, codebook, 1e-4, 1e-5)
