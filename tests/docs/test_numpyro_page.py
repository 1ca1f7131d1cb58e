"""The page on NumPyro: its steps are those of NumPyro's own SVI, with constraints and mutable state, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import DOCS, run_page

import jstep

numpyro = pytest.importorskip("numpyro")
pytestmark = pytest.mark.thorough  # the page runs for seconds

PAGE = DOCS / "recipes" / "numpyro.md"


@pytest.fixture(scope="module")
def page():
    """The names that the page defines."""
    return run_page(PAGE, lambda code: code.replace("    2000,\n", "    100,\n").replace("atol=0.02", "atol=9.0"))


@pytest.fixture(autouse=True)
def standard():
    """JAX's own settings, as those in which pages run."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.legacy_prng_key("allow"):
        yield


def test_steps_are_those_of_svi(page):
    """With the keys of SVI, which splits one at each step."""
    elbo, rate = page["elbo"], 1e-6
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


def test_microbatches_estimate_the_same_loss(page):
    """The mean over many keys, for one microbatch and for four."""
    losses = {}
    for n in (1, 4):
        step = jstep.compute_gradients(page["loss_fn"], num_microbatches=n)
        keys = jax.random.split(jax.random.key(5), 2000)
        one = lambda key, step=step: step(page["fitted"] | page["params"], *page["data"][0], rng=key)[0]  # noqa: E731
        losses[n] = np.asarray(jax.jit(lambda keys, one=one: jax.lax.map(one, keys))(keys))
    error = np.hypot(*(found.std() / len(found) ** 0.5 for found in losses.values()))
    assert abs(losses[1].mean() - losses[4].mean()) < 5 * error < 0.05 * losses[1].mean()


def test_a_guide_with_constraints_and_mutable_state():
    """As the page describes it: the first state from `init`, the next ones from the loss."""

    def model(x):
        mean = numpyro.sample("mean", numpyro.distributions.Normal(0.0, 10.0))
        numpyro.sample("x", numpyro.distributions.Normal(mean, 1.0).expand([len(x)]).to_event(1), obs=x)

    def guide(x):
        count = numpyro.primitives.mutable("count", {"calls": jnp.zeros(())})
        count["calls"] = count["calls"] + 1
        center = numpyro.param("center", 0.0)
        scale = numpyro.param("scale", 1.0, constraint=numpyro.distributions.constraints.positive)
        numpyro.sample("mean", numpyro.distributions.Normal(center, scale))

    elbo = numpyro.infer.Trace_ELBO()
    svi = numpyro.infer.SVI(model, guide, numpyro.optim.SGD(1.0), elbo)
    x = np.float32([1.0, 2.0, 3.0, 2.0])
    began = svi.init(jax.random.key(0), x)

    def loss_fn(params, model_state, x, rng):
        found = elbo.loss_with_mutable_state(rng, svi.constrain_fn(params) | model_state, model, guide, x)
        return found["loss"], found["mutable_state"]

    optimizer = jstep.adam(jstep.cosine_decay(0.05, 800))
    params = svi.optim.get_params(began.optim_state)
    state = jstep.TrainState.create(params, optimizer, model_state=began.mutable_state)
    calls = float(state.model_state["count"]["calls"])
    step = jstep.minimize(loss_fn, optimizer, has_model_state=True, rng=jax.random.key(1))
    state = jstep.train(step, state, lambda step: x, 800, steps_per_call=100)
    assert float(state.model_state["count"]["calls"]) == calls + 800
    fitted = svi.constrain_fn(state.params)
    precision = len(x) + 0.01
    assert float(fitted["center"]) == pytest.approx(x.sum() / precision, abs=0.1)
    assert float(fitted["scale"]) == pytest.approx(precision**-0.5, rel=0.15)
