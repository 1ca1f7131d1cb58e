"""The context of an update (loss, `value_and_grad`, key), through wrappers, labels and scopes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

PARAMS = {"w": jnp.array([1.0, -2.0]), "v": jnp.float32(0.5), "n": jnp.int32(3)}
X = jnp.array([1.0, 2.0, 3.0, 4.0])
KEY = jax.random.key(3)
EMA = jstep.ExponentialMovingAverage(0.5)


def loss_fn(params, x):
    return (
        jnp.mean(x) * jnp.sum(params["w"].astype(jnp.float32) ** 2)
        + params["v"].astype(jnp.float32) ** 3
    )


def recording(seen):
    """Return an optimizer that stores the loss, and loss and gradient at moved parameters, in its
    slots."""

    def init(params, global_step=0):
        return {
            "loss": jnp.zeros(()),
            "there": jnp.zeros(()),
            "grad": jax.tree.map(jnp.zeros_like, params),
        }

    def update(updates, slots, params, step, context):
        seen["context"], seen["params"] = context, params
        if context.value_and_grad is None:
            return updates, slots
        moved = jax.tree.map(
            lambda p: p + 1 if jnp.issubdtype(p.dtype, jnp.floating) else p, params
        )
        there, grads = context.value_and_grad(moved)
        grads = jax.tree.map(
            lambda old, g: old if g is None else g.astype(old.dtype),
            slots["grad"],
            grads,
            is_leaf=lambda x: x is None,
        )
        assert context.loss is not None
        return jax.tree.map(lambda g: -0.01 * g, updates), {
            "loss": context.loss,
            "there": there,
            "grad": grads,
        }

    return jstep.Optimizer(init, update, lambda step: {}, takes_context=True)


def by_path(path, leaf):
    return {"w": "a", "v": "a/b"}.get(path)


WRAPPERS = {
    "scope": lambda one: jstep.scope(one, "s"),
    "scale": lambda one: jstep.dynamic_loss_scale(one, initial=64.0),
    "masters": jstep.master_weights,
    "lookahead": jstep.lookahead,
    "averages": lambda one: jstep.with_moving_average(one, EMA),
    "rounding": lambda one: jstep.stochastic_rounding(one, KEY),
    "chain": lambda one: jstep.chain(jstep.clip_gradients(by_value=100.0), one, jstep.scale(1.0)),
    "every": lambda one: jstep.update_every(one, 2),
    "deep": lambda one: jstep.dynamic_loss_scale(
        jstep.skip_nonfinite(jstep.master_weights(jstep.scope(one, "q")))
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kwargs", [{}, {"num_microbatches": 2}, {"sharpness": 0.1}, {"var_list": ["w", "v"]}], ids=str
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_context_is_of_this_step_inside_wrappers(wrapper, kwargs):
    seen = {}
    optimizer = WRAPPERS[wrapper](recording(seen))
    step = jstep.minimize(loss_fn, optimizer, **kwargs)
    state, _ = step(jstep.TrainState.create(PARAMS, optimizer), X)
    state, metrics = step(state, X)
    slots = {name.rsplit("/", 1)[-1]: tree for name, tree in state.slots.items()}
    np.testing.assert_allclose(slots["loss"], metrics["loss"], rtol=1e-6)
    before = step(jstep.TrainState.create(PARAMS, optimizer), X)[0].params
    moved = {"w": before["w"] + 1, "v": before["v"] + 1, "n": before["n"]}
    np.testing.assert_allclose(slots["there"], loss_fn(moved, X), rtol=1e-5)
    np.testing.assert_allclose(slots["grad"]["w"], 2 * jnp.mean(X) * moved["w"], rtol=1e-5)
    np.testing.assert_allclose(slots["grad"]["v"], 3 * moved["v"] ** 2, rtol=1e-5)
    assert step._cache_size() == 1


@pytest.mark.thorough(except_for=["True"])
@pytest.mark.parametrize("masters", [False, True])
def test_value_and_grad_in_a_partition_moves_only_its_leaves(masters):
    first = {}
    second = {}
    optimizer = jstep.partition(
        {"a": recording(first), "a/b": jstep.scope(recording(second), "x")}, by_path
    )
    optimizer = jstep.master_weights(optimizer) if masters else optimizer
    state, metrics = jstep.minimize(loss_fn, optimizer)(
        jstep.TrainState.create(PARAMS, optimizer), X
    )
    assert first["params"]["v"] is first["params"]["n"] is second["params"]["w"] is None
    w, v = PARAMS["w"], PARAMS["v"]
    np.testing.assert_allclose(state.slots["a/loss"], metrics["loss"])
    np.testing.assert_allclose(state.slots["a/there"], loss_fn({"w": w + 1, "v": v}, X), rtol=1e-6)
    np.testing.assert_allclose(
        state.slots["a/b/x/there"], loss_fn({"w": w, "v": v + 1}, X), rtol=1e-6
    )
    assert state.slots["a/grad"]["v"] is None
    np.testing.assert_allclose(state.slots["a/grad"]["w"], 5 * (w + 1), rtol=1e-6)


def test_value_and_grad_in_master_weights_rounds_params():
    optimizer = jstep.master_weights(recording({}))
    params = {"w": jnp.array([1.0, 2.0], jnp.bfloat16), "v": jnp.bfloat16(0.5), "n": jnp.int32(1)}
    state = jstep.TrainState.create(params, optimizer)
    state = state.replace(
        slots={**state.slots, "master": {**state.slots["master"], "w": jnp.array([1.001, 2.001])}}
    )
    state, _ = jstep.minimize(loss_fn, optimizer)(state, X)
    assert float(state.slots["there"]) == float(
        loss_fn({"w": jnp.array([2.0, 3.0]), "v": jnp.float32(1.5)}, X)
    )


def test_value_and_grad_has_no_side_effects():
    def counted(params, model_state, x, rng):
        jstep.summary.scalar("seen", jnp.mean(x))
        noise = jax.random.normal(rng)
        return loss_fn(params, x) + noise, (model_state + 1, {"mine": noise})

    optimizer = recording({})
    step = jstep.minimize(counted, optimizer, has_model_state=True, has_aux=True, rng=KEY)
    state, metrics = step(jstep.TrainState.create(PARAMS, optimizer, model_state=jnp.int32(0)), X)
    assert int(state.slots["model_state"]) == 1
    moved = {"w": PARAMS["w"] + 1, "v": PARAMS["v"] + 1}
    np.testing.assert_allclose(state.slots["there"], loss_fn(moved, X) + metrics["mine"], rtol=1e-6)
    assert len(jax.tree.leaves(metrics["summaries"])) == 1
    assert jstep.summary.merge_all() is None or not jax.tree.leaves(jstep.summary.merge_all())


def test_key_depends_on_step_and_differs_from_the_loss_key():
    def recording_key():
        def update(updates, slots, params, step, context):
            assert context.key is not None
            return jax.tree.map(lambda g: None, updates), {"key": jax.random.key_data(context.key)}

        return jstep.Optimizer(
            lambda p, step=0: {"key": jnp.zeros(2, jnp.uint32)}, update, lambda step: {}, True
        )

    def loss(params, x, rng):
        return loss_fn(params, x), {"key": jax.random.key_data(rng).astype(jnp.float32)}

    keys = []
    for n in (1, 2):
        optimizer = recording_key()
        step = jstep.minimize(loss, optimizer, has_aux=True, rng=KEY, num_microbatches=n)
        state = jstep.TrainState.create(PARAMS, optimizer)
        for _ in range(2):
            state, metrics = step(state, X)
            keys.append(np.asarray(state.slots["key"]))
            assert n > 1 or not np.array_equal(keys[-1].astype(np.float32), metrics["key"])
    np.testing.assert_array_equal(keys[:2], keys[2:])
    assert not np.array_equal(keys[0], keys[1])
    seen = {}
    jstep.minimize(loss_fn, recording(seen))(jstep.TrainState.create(PARAMS, recording({})), X)
    assert seen["context"].key is None


def test_apply_gradients_passes_the_context():
    seen = {}
    optimizer = jstep.skip_nonfinite(jstep.scope(recording(seen), "s"))
    state = jstep.TrainState.create(PARAMS, optimizer)
    grads = {"w": jnp.ones(2), "v": jnp.float32(1.0), "n": None}
    jstep.apply_gradients(state, grads, optimizer, scaled=True)
    assert seen["context"] == jstep.Context() == jstep.Context(None, None, None)
    optimizer.update(grads, state.slots, state.params, state.global_step)
    assert seen["context"] == jstep.Context()
    jstep.apply_gradients(
        state, grads, optimizer, context=jstep.Context(loss=jnp.float32(3.0)), scaled=True
    )
    assert float(seen["context"].loss) == 3
    with pytest.raises(TypeError, match=r"context: must be a jstep.Context or None, got a float"):
        jstep.apply_gradients(state, grads, optimizer, context=3.0)
