"""The page "Mixture of experts": its loss and bias row by row in NumPy, microbatches, and experts on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pages import DOCS

import jstep

pytestmark = pytest.mark.thorough  # the page runs for seconds

PAGE = DOCS / "recipes" / "mixture-of-experts.md"
AXIS_TYPES = [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit]


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


def on_mesh(page, kind, n):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    state = jstep.TrainState.create(
        page["init_params"],
        page["optimizer"],
        mesh=mesh,
        param_specs=[("experts/*", P("data"))],
        model_state=jnp.zeros(page["EXPERTS"]),
    )
    step = page["make_step"](page["across_devices"], num_microbatches=n)
    found = []
    for i in range(3):
        rows = jax.device_put(page["batches"](i), NamedSharding(mesh, P("data")))
        state, metrics = step(state, *rows)
        found.append(float(metrics["loss"]))
    assert state.params["experts"]["up"].sharding.spec == P("data")
    return state, found


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_without_dropped_tokens_the_devices_have_the_definition(page, standard, monkeypatch, kind, n):
    monkeypatch.setitem(page, "CAPACITY", page["EXPERTS"])  # places for all tokens of a device
    state, losses = on_mesh(page, kind, n)
    expected, step = page["make_state"](), page["make_step"](page["everywhere"])
    for i, loss in enumerate(losses):
        expected, metrics = step(expected, *page["batches"](i))
        assert loss == pytest.approx(float(metrics["loss"]), rel=1e-5)
    np.testing.assert_array_equal(state.model_state, expected.model_state)
    for one, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(jax.device_get(one), other, rtol=0, atol=2e-4)


def test_a_token_without_a_place_is_not_computed(page, standard, monkeypatch):
    """With a quarter of the mean, each device has two places for each expert: the first two choices of its rows."""
    monkeypatch.setitem(page, "CAPACITY", 0.25)
    x, y = page["batches"](0)
    taken = {}

    def computed(t, place, e):
        key = (t // (len(x) // 8), e)
        taken[key] = taken.get(key, 0) + 1
        return taken[key] <= int(0.25 * page["CHOSEN"] * len(x) / 8 / page["EXPERTS"])

    loss, _ = by_hand(page, 0.0, x, y, computed)
    _, losses = on_mesh(page, AXIS_TYPES[0], 1)
    assert losses[0] == pytest.approx(loss, rel=1e-5)
    assert abs(loss - by_hand(page, 0.0, x, y)[0]) > 1e-3
