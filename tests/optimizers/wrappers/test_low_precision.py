"""Master weights, stochastic rounding and the loss scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_optax import run_jstep

import jstep

KEY = jax.random.key(5)


def low(tree, dtype=jnp.bfloat16):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def squared_descent(decay):
    """A hand-written optimizer that computes in the dtype of its gradients."""

    def update(updates, slots, params, step):
        return jstep.map_gradients(lambda g: -decay * g * g, updates), {}

    return jstep.Optimizer(lambda params, global_step=0: {}, update, lambda step: {})


BLOCKS = {
    **{
        f"clip_{kind}": lambda kind=kind: jstep.clip_gradients(**{kind: 0.3})
        for kind in ("by_value", "by_norm", "by_average_norm", "by_global_norm", "adaptive")
    },
    "normalize": jstep.normalize_gradients,
    "normalize_each": lambda: jstep.normalize_gradients(per_leaf=True),
    "noise": lambda: jstep.add_noise(0.01, 0.55, KEY),
    "scale": lambda: jstep.scale(0.3),
    "trust": jstep.scale_by_trust_ratio,
    "stateless": lambda: jstep.stateless(
        lambda u, p, step: jstep.map_gradients(lambda x: 0.3 * x, u)
    ),
    "by_hand": lambda: squared_descent(0.3),
}
AROUND = {
    "every": lambda one: jstep.update_every(one, 2),
    "accumulate": lambda one: jstep.update_every(one, 2, accumulate=True),
    "guard": jstep.skip_nonfinite,
    "loss_scale": jstep.dynamic_loss_scale,
    "cautious": jstep.cautious,
    "lookahead": lambda one: jstep.lookahead(one, 2),
    "label": lambda one: jstep.partition({"x": one}, lambda path, leaf: "x"),
}


@pytest.mark.thorough(except_for=["guard-False"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", [*BLOCKS, *AROUND])
def test_masters_are_the_float32_run_on_the_same_gradients(name, sparse):
    sgd = jstep.gradient_descent(0.1)
    optimizer = AROUND[name](sgd) if name in AROUND else jstep.chain(BLOCKS[name](), sgd)
    start = {"w": jnp.linspace(-1, 1, 64).reshape(8, 8).astype("bfloat16")}
    g = jnp.sin(jnp.arange(64.0)).reshape(8, 8).astype("bfloat16")
    masters, wide = jstep.master_weights(optimizer), low(start, jnp.float32)
    small, full = jstep.TrainState.create(start, masters), jstep.TrainState.create(wide, optimizer)
    for _ in range(6):
        grads = {"w": jstep.IndexedSlices(g[:3], jnp.array([1, 3, 1]), (8, 8)) if sparse else g}
        small = jstep.apply_gradients(small, grads, masters, scaled=True)
        wide_grads = jstep.map_gradients(lambda x: x.astype("float32"), grads)
        full = jstep.apply_gradients(full, wide_grads, optimizer, scaled=True)
    np.testing.assert_array_equal(small.slots["master"]["w"], full.params["w"])


def test_parameters_are_the_rounding_of_their_masters():
    """XLA's default optimization, unlike that of the other tests, leaves out roundings between
    float32 operations."""
    optimizer = jstep.master_weights(jstep.gradient_descent(0.1))
    draw = lambda seed, size: low({"w": size * jax.random.normal(jax.random.key(seed), (1 << 17,))})  # noqa: E731
    state = jstep.TrainState.create(draw(0, 0.1), optimizer)
    options = {"xla_backend_optimization_level": 3}
    step = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer), compiler_options=options)
    for seed in (1, 2):
        state = step(state, draw(seed, 1.0))
        np.testing.assert_array_equal(
            state.params["w"], state.slots["master"]["w"].astype(jnp.bfloat16)
        )


def test_clipping_computes_in_float32_and_functions_keep_the_dtype():
    """Without masters, too: the slots of what follows are those of the float32 gradients."""
    g = jnp.sin(jnp.arange(64.0)).astype("bfloat16")
    for kind in ("by_norm", "by_global_norm"):
        optimizer = jstep.chain(jstep.clip_gradients(**{kind: 0.003}), jstep.momentum(0.1, 0.9))
        small = jstep.TrainState.create({"w": jnp.zeros(64, "bfloat16")}, optimizer)
        full = jstep.TrainState.create({"w": jnp.zeros(64)}, optimizer)
        small = jstep.apply_gradients(small, {"w": g}, optimizer)
        full = jstep.apply_gradients(full, {"w": g.astype("float32")}, optimizer)
        np.testing.assert_array_equal(small.slots["momentum"]["w"], full.slots["momentum"]["w"])
    assert (
        jstep.clip_by_norm(g, 0.3).dtype == jstep.clip_by_value(g, -0.3, 0.3).dtype == jnp.bfloat16
    )


@pytest.mark.thorough
def test_stochastic_rounding_is_unbiased_and_reproducible():
    params = {"w": jnp.ones(40_000, jnp.bfloat16), "h": jnp.ones(4, jnp.float16), "f": jnp.ones(4)}
    grads = jax.tree.map(jnp.ones_like, params)
    optimizer = jstep.stochastic_rounding(jstep.gradient_descent(2.0**-10), KEY)
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer, scaled=True))

    def run(params, grads, steps=1):
        state = jstep.TrainState.create(params, optimizer)
        for _ in range(steps):
            state = step(state, grads)
        return jax.tree.map(np.float32, state.params)

    one, again = run(params, grads), run(params, grads)
    np.testing.assert_array_equal(one["w"], again["w"])
    assert set(np.unique(one["w"])) == {1.0, 1.0 - 2.0**-8}
    np.testing.assert_allclose(np.mean(one["w"]), 1 - 2.0**-10, atol=5e-5)
    np.testing.assert_array_equal(one["f"], 1 - np.float32(2.0**-10))
    np.testing.assert_allclose(np.mean(run(params, grads, 16)["w"]), 1 - 16 * 2.0**-10, atol=2e-4)
    negative = run(jax.tree.map(jnp.negative, params), jax.tree.map(jnp.negative, grads))
    np.testing.assert_allclose(np.mean(negative["w"]), -1 + 2.0**-10, atol=5e-5)


def test_stochastic_rounding_keeps_infinities_and_nan():
    params = {"w": jnp.array([jnp.inf, jnp.nan, 3.38e38, 1.0], jnp.bfloat16)}
    state = run_jstep(
        jstep.stochastic_rounding(jstep.gradient_descent(1.0), KEY),
        [jax.tree.map(jnp.zeros_like, params)],
        params,
    )
    np.testing.assert_array_equal(
        state.params["w"].astype(jnp.float32)[2:], params["w"].astype(jnp.float32)[2:]
    )
    assert not np.isfinite(state.params["w"].astype(jnp.float32)[:2]).any()


def scaled(grad, state):
    return {"w": jnp.full(2, grad, jnp.float32) * state.slots["loss_scale"]}


def scale(optimizer):
    return jstep.dynamic_loss_scale(optimizer, initial=8.0, period=2)


LOSS_SCALES = {
    "unguarded": lambda: scale(jstep.adam(0.1)),
    "guard inside": lambda: scale(jstep.skip_nonfinite(jstep.adam(0.1))),
    "guard outside": lambda: jstep.skip_nonfinite(scale(jstep.adam(0.1))),
}


@pytest.mark.thorough(except_for=["guard outside"])
@pytest.mark.parametrize("case", LOSS_SCALES)
def test_loss_scale_changes_like_torch_grad_scaler(case):
    optimizer = LOSS_SCALES[case]()
    state = jstep.TrainState.create({"w": jnp.zeros(2)}, optimizer, 100)
    step = jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer, scaled=True))
    scales, since = [], []
    for grad in (1.0, 1.0, np.inf, np.nan, 1.0, 1.0, 1.0):
        state = step(state, scaled(grad, state))
        scales.append(float(state.slots["loss_scale"]))
        since.append(int(state.slots["scale_since"]))
    assert scales == [8, 16, 8, 4, 4, 8, 8]
    assert since == [100, 102, 103, 104, 104, 106, 106]
    assert int(state.slots["start_step"]) == 102  # two updates were skipped
    plain = jstep.adam(0.1)
    np.testing.assert_allclose(
        state.params["w"],
        run_jstep(plain, [{"w": jnp.ones(2)}] * 5, {"w": jnp.zeros(2)}).params["w"],
        rtol=1e-5,
    )


@pytest.mark.thorough
def test_loss_scale_stays_finite_and_nonzero():
    optimizer = jstep.dynamic_loss_scale(jstep.gradient_descent(0.1), initial=2.0**126, period=1)
    state = jstep.TrainState.create({"w": jnp.zeros(2)}, optimizer)
    state = jstep.apply_gradients(state, {"w": jnp.zeros(2)}, optimizer, scaled=True)
    assert float(state.slots["loss_scale"]) == 2.0**126
    state = state.replace(slots={**state.slots, "loss_scale": jnp.float32(2.0**-126)})
    state = jstep.apply_gradients(state, {"w": jnp.full(2, jnp.nan)}, optimizer, scaled=True)
    assert float(state.slots["loss_scale"]) == 2.0**-126


# A loss scale must wrap the whole optimizer; anywhere else it is rejected.

PARAMS = {"a": jnp.float32(1.0), "b": jnp.float32(2.0)}
SGD = lambda: jstep.gradient_descent(1.0)  # noqa: E731
SCALED = lambda: jstep.dynamic_loss_scale(SGD(), initial=4.0)  # noqa: E731
ACCEPTED = {
    "alone": SCALED,
    "scope": lambda: jstep.scope(SCALED(), "s"),
    "guard": lambda: jstep.skip_nonfinite(SCALED()),
    "masters": lambda: jstep.master_weights(SCALED()),
    "lookahead": lambda: jstep.lookahead(SCALED()),
    "all": lambda: jstep.scope(
        jstep.skip_nonfinite(jstep.scope(jstep.master_weights(SCALED()), "t")), "s"
    ),
}


def loss_fn(params, x):
    return params["a"] * x + params["b"]


@pytest.mark.thorough(except_for=["all"])
@pytest.mark.parametrize("case", ACCEPTED)
def test_some_wrappers_may_be_around_a_loss_scale(case):
    optimizer = ACCEPTED[case]()
    step = jstep.minimize(loss_fn, optimizer, metrics=("grad_norm",))
    state, metrics = step(jstep.TrainState.create(PARAMS, optimizer), jnp.float32(0.5))
    np.testing.assert_allclose([state.params["a"], state.params["b"]], [0.5, 1.0])
    assert next(float(value) for name, value in metrics.items() if name.endswith("loss_scale")) == 4
    np.testing.assert_allclose(metrics["grad_norm"], 1.25**0.5, rtol=1e-6)
    state, metrics = step(state, jnp.float32(jnp.inf))
    assert float(metrics["skipped"]) == 1
    np.testing.assert_allclose([state.params["a"], state.params["b"]], [0.5, 1.0])
