"""`minimize` with a mapping of losses: one update, each loss trains its own parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
import jstep.summary
from jstep.training.minimize import CONTEXT_KEY_SALT

PARAMS = {
    "critic": {"w": jnp.array([[0.5, -1.0]])},
    "actor": {"w": jnp.array([[2.0, 1.0]])},
    "rest": jnp.float32(3.0),
}
X = jnp.array([[1.0, 2.0], [0.5, -1.0], [0.25, 1.0], [2.0, 0.0]])


def critic_loss(params, x, rng=None):
    noise = 0.0 if rng is None else jax.random.normal(rng)
    return (
        jnp.mean((x * params["critic"]["w"] * params["actor"]["w"]) ** 2)
        + noise * params["critic"]["w"].sum()
    )


def actor_loss(params, x, rng=None):
    noise = 0.0 if rng is None else jax.random.normal(rng)
    return (
        -jnp.mean(x * params["critic"]["w"] * params["actor"]["w"] + params["rest"])
        + noise * params["actor"]["w"].sum()
    )


LOSSES = {"critic": (critic_loss, "critic/*"), "actor": (actor_loss, ["actor/*"])}
SGD = jstep.gradient_descent(0.1)


def grads_of(params, x, keys=(None, None)):
    """Gradients of each loss with respect to its own parameters, computed manually."""
    critic = jax.grad(lambda w: critic_loss(params | {"critic": {"w": w}}, x, keys[0]))(
        params["critic"]["w"]
    )
    actor = jax.grad(lambda w: actor_loss(params | {"actor": {"w": w}}, x, keys[1]))(
        params["actor"]["w"]
    )
    return {"critic": {"w": critic}, "actor": {"w": actor}, "rest": jnp.float32(0.0)}


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


def after(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


@pytest.mark.thorough(except_for=["kwargs1"])
@pytest.mark.parametrize(
    "kwargs", [{}, {"num_microbatches": 2}, {"gate_gradients": jstep.GATE_GRAPH, "jit": False}]
)
def test_each_loss_trains_its_own_parameters(kwargs):
    step = jstep.minimize(LOSSES, SGD, metrics="grad_norm", **kwargs)
    state, metrics = step(jstep.TrainState.create(PARAMS, SGD), X)
    grads = grads_of(PARAMS, X)
    assert_close(state.params, after(PARAMS, grads))
    assert state.params["rest"] == 3.0
    losses = critic_loss(PARAMS, X), actor_loss(PARAMS, X)
    assert_close((metrics["critic/loss"], metrics["actor/loss"]), losses)
    assert_close(metrics["loss"], sum(losses))
    assert_close(metrics["grad_norm"], jstep.global_norm(grads))
    assert set(metrics) == {"loss", "critic/loss", "actor/loss", "learning_rate", "grad_norm"}


def test_each_loss_has_its_own_key():
    key = jax.random.key(3)
    step = jstep.minimize(LOSSES, SGD, rng=key)
    state, _ = step(jstep.TrainState.create(PARAMS, SGD, 7), X)
    keys = [jax.random.fold_in(jax.random.fold_in(key, 7), i) for i in range(2)]
    assert_close(state.params, after(PARAMS, grads_of(PARAMS, X, keys)))


def test_aux_and_summaries_are_prefixed():
    def with_aux(loss, aux):
        def fn(params, x):
            value = loss(params, x)
            jstep.summary.scalar(f"seen/{loss.__name__}", value)
            return value, aux(value)

        return fn

    losses = {
        "c": (with_aux(critic_loss, lambda v: {"twice": 2 * v}), "critic/*"),
        "a/b": (with_aux(actor_loss, lambda v: 3 * v), "actor/*"),
    }
    _, metrics = jstep.minimize(losses, SGD, has_aux=True)(jstep.TrainState.create(PARAMS, SGD), X)
    assert_close(metrics["c/twice"], 2 * metrics["c/loss"])
    assert_close(metrics["a/b/aux"], 3 * metrics["a/b/loss"])
    assert repr(metrics["summaries"]) == "Summary('seen/critic_loss', 'seen/actor_loss')"
    clash = {"c": (with_aux(critic_loss, lambda v: {"loss": v}), "critic/*")}
    with pytest.raises(
        ValueError,
        match=r"metrics: aux of 'c' and the loss 'c' both have 'c/loss'",
    ):
        jstep.minimize(clash, SGD, has_aux=True)(jstep.TrainState.create(PARAMS, SGD), X)


def test_context_has_the_total_loss_and_gradients():
    seen = {}

    def update(updates, slots, params, step, context):
        loss, again = context.value_and_grad(params)
        seen.update(
            loss=(context.loss, loss),
            gradients=(updates, again),
            key=jax.random.key_data(context.key),
        )
        return jax.tree.map(lambda g: -0.1 * g, updates), {}

    optimizer = jstep.Optimizer(
        lambda params, global_step=0: {}, update, lambda step: {}, takes_context=True
    )
    step = jstep.minimize(LOSSES, optimizer, rng=jax.random.key(0), jit=False)
    _, metrics = step(jstep.TrainState.create(PARAMS, optimizer), X)
    assert_close(seen["loss"], (metrics["loss"], metrics["loss"]))
    # The key is not that of a loss.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), CONTEXT_KEY_SALT)
    assert seen["key"].tolist() == jax.random.key_data(key).tolist()
    assert jax.tree.structure(seen["gradients"][0]) == jax.tree.structure(seen["gradients"][1])
    assert_close(*seen["gradients"])
    assert seen["gradients"][0]["rest"] is None


def test_lookup_gradients_stay_sparse():
    params = {"critic": jnp.ones((4, 2)), "actor": jnp.ones(2)}
    losses = {
        "critic": (
            lambda p, ids: jnp.sum(jstep.lookup(p["critic"], ids) * p["actor"][None]),
            "critic",
        ),
        "actor": (
            lambda p, ids: jnp.sum(jstep.lookup(p["critic"], ids) * p["actor"][None]),
            "actor",
        ),
    }
    kinds = {}

    def record_types(updates, params, step):
        kinds.update(
            jax.tree.map(type, updates, is_leaf=lambda x: isinstance(x, jstep.IndexedSlices))
        )
        return updates

    optimizer = jstep.chain(jstep.stateless(record_types), SGD)
    state, _ = jstep.minimize(losses, optimizer)(
        jstep.TrainState.create(params, optimizer), jnp.array([1, 1])
    )
    assert kinds["critic"] is jstep.IndexedSlices
    assert_close(state.params["critic"][:, 0], [1.0, 0.8, 1.0, 1.0])
    assert_close(state.params["actor"], [0.8, 0.8])


def test_error_names_the_loss():
    losses = {
        "critic": (critic_loss, "critic/*"),
        "actor": (lambda p, x: p["actor"]["w"], "actor/*"),
    }
    with pytest.raises(ValueError, match="the loss has shape") as caught:
        jstep.minimize(losses, SGD)(jstep.TrainState.create(PARAMS, SGD), X)
    assert any("'actor'" in note for note in caught.value.__notes__)


def test_model_state_is_unchanged():
    """The state may have one that another stage of the run uses."""
    model_state = {"mean": jnp.arange(3.0)}
    params = {"critic": {"w": jnp.ones(2)}, "actor": {"w": jnp.ones(2)}}
    state = jstep.TrainState.create(params, SGD, model_state=model_state)
    losses = {"critic": (lambda p: jnp.sum(p["critic"]["w"] ** 2), "critic/*")}
    state, _ = jstep.minimize(losses, SGD)(state)
    np.testing.assert_array_equal(state.slots["model_state"]["mean"], model_state["mean"])


def test_a_loss_must_depend_on_a_parameter_that_it_trains():
    """As of one loss alone: it would train nothing, silently."""
    for loss in (lambda params, x: x.sum(), lambda params, x: params["rest"] * x.sum()):
        step = jstep.minimize({"critic": (critic_loss, "critic/*"), "idle": (loss, "actor/*")}, SGD)
        with pytest.raises(ValueError, match="the loss 'idle' depends on none of"):
            step(jstep.TrainState.create(PARAMS, SGD), X)
