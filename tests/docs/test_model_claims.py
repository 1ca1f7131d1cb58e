"""Claims about models on the page "From PyTorch", checked against torch where it is installed
(dev/peers.sh)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import DOCS

optax = pytest.importorskip("optax")
torch = pytest.importorskip("torch")
nn = torch.nn
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 8)).astype(np.float32)
IMAGES = RNG.normal(size=(2, 8, 8, 3)).astype(np.float32)
LABELS = RNG.integers(8, size=6)
pytestmark = pytest.mark.usefixtures("standard")


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


def channels_last(x):
    return x.permute(0, 2, 3, 1)


def test_gelu_and_layer_norm():
    close(jax.nn.gelu(X, approximate=False), nn.GELU()(torch.tensor(X)))
    close(jax.nn.gelu(X), nn.GELU("tanh")(torch.tensor(X)))
    assert np.abs(jax.nn.gelu(X) - jax.nn.gelu(X, approximate=False)).max() > 1e-4
    close(jax.nn.standardize(X, epsilon=1e-5), nn.LayerNorm(8)(torch.tensor(X)))


def test_padding_at_stride_2():
    conv = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
    theirs = channels_last(conv(torch.tensor(IMAGES).permute(0, 3, 1, 2)))
    kernel = conv.weight.detach().numpy().transpose(2, 3, 1, 0)

    def convolved(padding):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            IMAGES, kernel, (2, 2), padding, dimension_numbers=numbers
        )

    close(convolved([(1, 1), (1, 1)]), theirs)
    assert np.abs(convolved("SAME") - theirs.detach().numpy()).max() > 0.1


def test_cross_entropy():
    logits, labels = torch.tensor(X), torch.tensor(LABELS)
    close(
        optax.softmax_cross_entropy_with_integer_labels(X, LABELS).mean(),
        nn.functional.cross_entropy(logits, labels),
    )
    soft = jax.nn.one_hot(LABELS, 8) * 0.7 + 0.3 / 8
    for y, theirs in ((jax.nn.one_hot(LABELS, 8), labels), (soft, torch.tensor(np.asarray(soft)))):
        smoothed = nn.functional.cross_entropy(logits, theirs, label_smoothing=0.1)
        close(optax.softmax_cross_entropy(X, optax.smooth_labels(y, 0.1)).mean(), smoothed)
    holes = np.where(np.arange(6) < 2, -100, LABELS)
    losses = optax.softmax_cross_entropy_with_integer_labels(X, jnp.maximum(holes, 0))
    ours = jnp.sum(jnp.where(holes == -100, 0, losses)) / jnp.sum(holes != -100)
    close(ours, nn.functional.cross_entropy(logits, torch.tensor(holes)))


def test_initial_weights():
    """Uniform in ±1/√(fan in): the bound, and the variance 1 / (3 fan in)."""
    kernel = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")(
        jax.random.key(0), (64, 4096)
    )
    theirs = nn.Linear(64, 4096).weight.detach().numpy()
    for weights in (kernel, theirs):
        assert 0.99 / 8 < np.abs(weights).max() <= 1 / 8
        np.testing.assert_allclose(np.var(weights), 1 / (3 * 64), rtol=0.02)


def test_the_page_has_what_is_tested():
    page = (DOCS / "from" / "pytorch.md").read_text("utf-8")
    for code in (
        "approximate=False",
        "[(1, 1), (1, 1)]",
        "optax.smooth_labels(y, 0.1)",
        'variance_scaling(1 / 3, "fan_in"',
    ):
        assert code in page
