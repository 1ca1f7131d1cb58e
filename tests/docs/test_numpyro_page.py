"""The page on NumPyro: its steps are those of NumPyro's own SVI, with constraints and mutable state, too."""

import jax
import numpy as np
import pytest
from pages import DOCS, run_page

import jstep

pytestmark = pytest.mark.thorough  # the page runs for seconds

PAGE = DOCS / "recipes" / "numpyro.md"


@pytest.fixture(scope="module")
def page():
    """The names that the page defines."""
    pytest.importorskip("numpyro")
    return run_page(PAGE, lambda code: code.replace("    2000,\n", "    100,\n").replace("atol=0.02", "atol=9.0"))


@pytest.fixture(autouse=True)
def standard():
    """JAX's own settings, as those in which pages run."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.legacy_prng_key("allow"):
        yield


def test_steps_are_those_of_svi(page):
    """With the keys of SVI, which splits one at each step."""
    elbo, rate = page["elbo"], 1e-6
    import numpyro

    svi = numpyro.infer.SVI(page["model"], page["guide"], numpyro.optim.SGD(rate), elbo)
    theirs = svi.init(jax.random.key(0), *page["data"][0])
    params = svi.optim.get_params(theirs.optim_state)
    for name, leaf in params.items():
        np.testing.assert_array_equal(leaf, page["params"][name])

    optimizer = jstep.gradient_descent(rate * page["ROWS"])
    step = jstep.minimize(lambda params, x, y, key: page["loss_fn"](params, x, y, key), optimizer)
    state = jstep.TrainState.create(params, optimizer)
    for i in range(5):
        key = jax.random.split(theirs.rng_key)[1]
        theirs, loss = svi.update(theirs, *page["data"][i])
        state, metrics = step(state, *page["data"][i], key)
        assert float(metrics["loss"]) == pytest.approx(float(loss) / page["ROWS"], rel=1e-5)
    for name, leaf in svi.optim.get_params(theirs.optim_state).items():
        np.testing.assert_allclose(state.params[name], leaf, rtol=1e-5)
        assert (leaf != params[name]).any()
