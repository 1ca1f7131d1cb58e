"""Which Adam is whose: the figures of the pages, computed from both equations."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from pages import DOCS
from source_files import text_of

import jstep

CASES = {(1e-5, 1e-4): ("0.240", "0.909"), (1e-8, 1e-6): ("0.760", "0.990")}
"""ε and the gradient → the first update of `adam` and of `adamw`, in units of the learning rate."""
PAGES = ["from/optax.md", "from/flax.md", "from/pytorch.md", "from/keras.md", "help/choosing-an-optimizer.md"]


def first_updates(epsilon, gradient, beta1=0.9, beta2=0.999):
    """TensorFlow's and the paper's first updates, by hand in float64."""
    m, v = (1 - beta1) * gradient, (1 - beta2) * gradient**2
    tensorflow = np.sqrt(1 - beta2) / (1 - beta1) * m / (np.sqrt(v) + epsilon)
    return tensorflow, m / (1 - beta1) / (np.sqrt(v / (1 - beta2)) + epsilon)


def first_update(optimizer, gradient):
    state = jstep.TrainState.create({"w": jnp.zeros(())}, optimizer)
    return -float(jstep.apply_gradients(state, {"w": jnp.float32(gradient)}, optimizer).params["w"])


@pytest.mark.parametrize(("epsilon", "gradient"), CASES)
def test_the_figures_of_the_pages(epsilon, gradient):
    figures = CASES[epsilon, gradient]
    by_hand = first_updates(epsilon, gradient)
    assert tuple(f"{one:.3f}" for one in by_hand) == figures
    ours = [jstep.adam(1.0, epsilon=epsilon), jstep.adamw(1.0, epsilon=epsilon, weight_decay=0.0)]
    np.testing.assert_allclose([first_update(one, gradient) for one in ours], by_hand, rtol=1e-5)


@pytest.mark.parametrize("name", PAGES)
def test_each_page_has_a_warning_with_these_figures(name):
    (box,) = re.findall(r'^!!! warning "[^\n]*\n(?:(?:    [^\n]*)?\n)+', text_of(DOCS / name), re.MULTILINE)
    words = " ".join(box.split())
    assert "weight_decay=0.0" in words.split('"')[1] or name == "from/keras.md"
    assert "adamw(" in words
    for figure in ("ε = 1e-5", "of 1e-4", "1e-8", "of 1e-6", *(one for pair in CASES.values() for one in pair)):
        assert figure in words, figure
    counts_more = 1 / np.sqrt(1 - 0.999)
    assert f"{counts_more:.0f} times as much in the first" in words
