"""The gradient noise scale: estimates of one step and their moving averages."""

import jax.numpy as jnp
import numpy as np
import pytest

import jstep

N, ROWS = 4, 24
NAMES = ("gradient_noise", "gradient_square", "noise_scale")


def loss_fn(params, x, *rest):
    """A loss whose gradient for one example is the example for w, and a constant for b."""
    return jnp.mean(x @ params["w"]) + 0.5 * params["b"]


def params():
    return {"w": jnp.zeros(3), "b": jnp.float32(0.0), "n": jnp.int32(3), "none": None}


def draw_rows(seed, rows=ROWS):
    return (
        np.random.default_rng(seed)
        .normal([1.0, -0.5, 0.25], [1.0, 2.0, 0.5], (rows, 3))
        .astype(np.float32)
    )


def estimate(x, weights=None, n=N):
    """Compute both estimates in float64 from their definitions."""
    parts = np.asarray(x, np.float64).reshape(-1, n, 3).swapaxes(0, 1)
    g = np.concatenate([parts.mean(1), np.full((n, 1), 0.5)], axis=1)
    w = np.full(n, parts.shape[1], float) if weights is None else np.asarray(weights, float)
    g, w = g[w > 0], w[w > 0]
    total = (w[:, None] * g).sum(0) / w.sum()
    small, big = (w * (g**2).sum(1)).sum() / w.sum(), (total**2).sum()
    noise = (small - big) * w.sum() / (len(w) - 1)
    return noise, big - noise / w.sum()


def average(measured, decay=0.99):
    both = np.zeros(2)
    for estimates in measured:
        both = decay * both + (1 - decay) * np.asarray(estimates)
    noise, square = both / (1 - decay ** len(measured))
    return {
        "gradient_noise": noise,
        "gradient_square": square,
        "noise_scale": noise / square if square > 0 else np.nan,
    }


def check(metrics, expected, rtol=2e-5):
    for name in NAMES:
        np.testing.assert_allclose(metrics[name], expected[name], rtol=rtol, err_msg=name)


def make(optimizer, **kwargs):
    given = {"num_microbatches": N, "metrics": ("noise_scale",), **kwargs}
    return jstep.minimize(loss_fn, optimizer, **given), jstep.TrainState.create(params(), optimizer)


@pytest.mark.thorough(except_for=["0.99-AggregationMethod.DEFAULT"])
@pytest.mark.parametrize("method", jstep.AggregationMethod)
@pytest.mark.parametrize("decay", [0.99, 0.5, 0.0])
def test_averages_follow_the_equations(method, decay):
    optimizer = jstep.with_noise_scale(jstep.adam(1e-3), decay=decay)
    step, state = make(optimizer, aggregation_method=method)
    measured = []
    for seed in range(5):
        x = draw_rows(seed)
        measured.append(estimate(x))
        state, metrics = step(state, x)
        check(metrics, average(measured, decay))


@pytest.mark.thorough(except_for=["weights0"])
@pytest.mark.parametrize(
    "weights", [(3.0, 1.0, 2.0, 5.0), (3.0, 0.0, 2.0, 0.0), (0.5, 0.25, 0.0, 0.0)]
)
def test_noise_is_per_unit_weight_and_zero_weights_are_ignored(weights):
    optimizer = jstep.with_noise_scale(jstep.gradient_descent(0.1))
    step, state = make(optimizer, weight_fn=lambda x, w: jnp.mean(w))
    x = draw_rows(3)
    per_row = np.tile(np.float32(weights), ROWS // N)
    expected = average([estimate(x, weights)])
    x[per_row == 0] = np.nan
    _, metrics = step(state, x, per_row)
    check(metrics, expected)


def slots_of(state):
    return {name: float(value) for name, value in state.slots.items() if "noise/" in name}


def test_fewer_than_two_weighted_microbatches_give_nan():
    optimizer = jstep.with_noise_scale(jstep.gradient_descent(0.1))
    step, state = make(optimizer, weight_fn=lambda x, w: jnp.mean(w))
    one, none = np.tile(np.float32([0, 2, 0, 0]), ROWS // N), np.zeros(ROWS, np.float32)
    for per_row in (one, none):
        state, metrics = step(state, draw_rows(0), per_row)
        assert all(np.isnan(metrics[name]) for name in NAMES)
    state, metrics = step(state, draw_rows(1), np.ones(ROWS, np.float32))
    first = average([estimate(draw_rows(1), np.ones(N))])
    check(metrics, first)
    state, metrics = step(state, draw_rows(2), one)
    check(metrics, first)


def test_steps_without_the_metric_keep_the_averages():
    optimizer = jstep.with_noise_scale(jstep.adam(1e-3))
    measuring_step, state = make(optimizer)
    plain_step = jstep.minimize(loss_fn, optimizer)
    state, _ = measuring_step(state, draw_rows(0))
    before = slots_of(state)
    state, metrics = plain_step(state, draw_rows(1))
    assert not set(NAMES) & set(metrics)
    state = jstep.apply_gradients(state, {**params(), "n": None}, optimizer)
    assert slots_of(state) == before
    state, metrics = measuring_step(state, draw_rows(2))
    check(metrics, average([estimate(draw_rows(0)), estimate(draw_rows(2))]))


def test_negative_square_gives_nan_and_is_not_clipped():
    x = np.float32([[1, 0, 0], [-1, 0, 0], [1, 0, 0], [-1, 0, 0]])
    only_w = lambda params, x: jnp.mean(x @ params["w"])  # noqa: E731
    optimizer = jstep.with_noise_scale(jstep.gradient_descent(0.1))
    step = jstep.minimize(only_w, optimizer, num_microbatches=4, metrics="noise_scale")
    _, metrics = step(jstep.TrainState.create(params(), optimizer), x)
    np.testing.assert_allclose(
        [metrics["gradient_noise"], metrics["gradient_square"]], [4 / 3, -1 / 3], rtol=1e-6
    )
    assert np.isnan(metrics["noise_scale"])


GUARDS = {
    "inside": lambda inner: jstep.with_noise_scale(jstep.skip_nonfinite(inner)),
    "scale": lambda inner: jstep.dynamic_loss_scale(jstep.with_noise_scale(inner), initial=2.0**40),
    "scope": lambda inner: jstep.scope(
        jstep.dynamic_loss_scale(jstep.scope(jstep.with_noise_scale(inner), "b")), "a"
    ),
}


@pytest.mark.thorough(except_for=["inf-inside"])
@pytest.mark.parametrize("place", GUARDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_skipped_steps_keep_the_averages(place, bad):
    optimizer = GUARDS[place](
        jstep.chain(jstep.clip_gradients(by_global_norm=0.1), jstep.adam(1e-3))
    )
    step, state = make(optimizer)
    measured = []
    for seed in range(4):
        x = draw_rows(seed)
        if seed in (0, 2):
            x[1, 1] = bad
        else:
            measured.append(estimate(x))
        state, metrics = step(state, x)
        if measured:
            check(metrics, average(measured))
        else:
            assert all(np.isnan(metrics[name]) for name in NAMES)
    assert all(np.isfinite(value) for value in slots_of(state).values())


def test_squares_are_computed_in_float32():
    """In bfloat16, the difference of the squares would be only rounding error."""
    optimizer = jstep.with_noise_scale(jstep.gradient_descent(0.1))

    def loss(params, x):
        return jnp.mean((x * params["w"]).astype(jnp.float32))

    step = jstep.minimize(loss, optimizer, num_microbatches=2, metrics=("noise_scale",))
    state = jstep.TrainState.create({"w": jnp.zeros((), jnp.bfloat16)}, optimizer)
    x = jnp.asarray([100.0, 101.0], jnp.bfloat16)
    _, metrics = step(state, x)
    np.testing.assert_allclose(metrics["gradient_noise"], 0.5, rtol=1e-3)


def test_several_losses_form_one_gradient():
    losses = {
        "w": (lambda params, x: jnp.mean(x @ params["w"]), ["w"]),
        "b": (lambda params, x: 0.5 * params["b"] + 0 * jnp.sum(x), ["b"]),
    }
    optimizer = jstep.with_noise_scale(jstep.adam(1e-3))
    step = jstep.minimize(losses, optimizer, num_microbatches=N, metrics=("noise_scale",))
    _, metrics = step(jstep.TrainState.create(params(), optimizer), draw_rows(0))
    check(metrics, average([estimate(draw_rows(0))]))
