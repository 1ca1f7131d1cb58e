"""The compiled step: compilation cache, donation, and use inside other transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close
from regression import X, Y, fresh, loss_fn

import jstep
from jstep.training import step as room


def test_second_call_does_not_compile(compilations):
    optimizer = jstep.chain(
        jstep.clip_gradients(by_norm=1.0), jstep.rmsprop(jstep.linear_warmup(0.1, 10))
    )
    traces = []

    def loss(params, model_state, batch, rng):
        traces.append(1)
        return loss_fn(params, *batch) + 0 * jax.random.uniform(rng), (model_state, {"n": 1})

    step = jstep.minimize(
        loss,
        optimizer,
        has_aux=True,
        has_model_state=True,
        rng=jax.random.key(0),
        metrics=("grad_norm",),
    )
    many = jstep.scan_steps(step)
    state = fresh(optimizer, model_state={"mean": 0.0, "count": 0, "list": [1.0]})
    batch, stack = (X, Y), (jnp.stack([X, X]), jnp.stack([Y, Y]))
    state, _ = step(state, batch)
    state, _ = many(state, stack)
    before = len(traces)
    with compilations() as seen:
        for _ in range(2):
            state, _ = step(state, batch)
            state, _ = many(state, stack)
    assert seen == []
    assert len(traces) == before
    assert jstep.global_step(state) == 9


def test_a_state_and_a_batch_on_different_devices_are_explained():
    optimizer = jstep.sgd(0.1)
    step = jstep.minimize(lambda params, x: jnp.sum(params["w"] * x), optimizer)
    state = jax.device_put(jstep.TrainState.create({"w": jnp.ones(2)}, optimizer), jax.devices()[0])
    with pytest.raises(ValueError, match="incompatible devices") as caught:
        step(state, jax.device_put(jnp.ones(2), jax.devices()[1]))
    assert [note for note in caught.value.__notes__ if "mesh" in note] == [
        "The state and the batch, or arrays that the loss closes over, "
        "are on different devices or on different "
        "meshes. Put all of them on one mesh object: jstep.shard_state(state, mesh), "
        "jstep.shard_batch(batch, mesh)."
    ]


def test_state_is_donated_by_default():
    optimizer = jstep.adam(0.1)
    state = fresh(optimizer)
    new, _ = jstep.minimize(loss_fn, optimizer)(state, X, Y)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))
    kept = fresh(optimizer)
    jstep.minimize(loss_fn, optimizer, donate=False)(kept, X, Y)
    jstep.minimize(loss_fn, optimizer, jit=False)(kept, X, Y)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(kept))


def test_lowering_and_tracing():
    optimizer = jstep.adam(0.1)
    step = jstep.minimize(loss_fn, optimizer)
    shapes = jax.eval_shape(lambda: fresh(optimizer))
    lowered = step.lower(shapes, X, Y)
    assert "module @jit_train_step" in lowered.as_text()  # its name in JAX's errors and profiles
    compiled = lowered.compile()
    assert compiled.memory_analysis().alias_size_in_bytes > 0
    assert step.eval_shape(shapes, X, Y)[0].params["w"].shape == (3,)


def test_step_inside_other_transformations():
    optimizer = jstep.adam(0.1)
    step = jstep.minimize(loss_fn, optimizer)
    state, _ = jax.jit(step)(fresh(optimizer), X, Y)
    assert_close(state.params, step(fresh(optimizer), X, Y)[0].params, 1e-5)
    several = jax.vmap(lambda w: jstep.TrainState.create({"w": w, "b": 0.5}, optimizer))(jnp.eye(3))
    states, metrics = jax.vmap(step, in_axes=(0, None, None))(several, X, Y)
    np.testing.assert_array_equal(states.global_step, [1, 1, 1])
    assert metrics["loss"].shape == (3,)


def test_a_loss_that_closes_over_a_sharded_array_is_explained():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    captured = jax.device_put(np.ones(2), jax.NamedSharding(mesh, jax.P("data")))
    optimizer = jstep.sgd(0.1)

    def loss_fn(params, x):
        return jnp.sum(captured * params["w"] * x)

    state = jstep.TrainState.create({"w": jnp.ones(2)}, optimizer)
    with pytest.raises(Exception, match="device assignment") as caught:
        jstep.minimize(loss_fn, optimizer)(state, np.ones(2, np.float32))
    assert any(
        "arrays that the loss closes over, are on different devices" in note
        for note in caught.value.__notes__
    )


def test_processes_agree_on_shapes_before_they_compile(monkeypatch):
    asked = []
    optimizer, batch = jstep.gradient_descent(0.5), np.ones(2, np.float32)
    step = jstep.minimize(
        lambda params, batch: jnp.sum(params["w"] * batch), optimizer, donate=False
    )
    state = jstep.TrainState.create({"w": 1.0}, optimizer)
    monkeypatch.setattr(room.AgreedShapes, "check", lambda self, *given: asked.append(given))
    step(state, batch)
    assert asked == []
    monkeypatch.setattr(room, "is_single_process", lambda: False)
    step(state, batch)
    assert [(one is state, [arg is batch for arg in args]) for one, args in asked] == [
        (True, [True])
    ]
    state, _ = step(jstep.shard_state(state, jax.make_mesh((2,), ("data",))), batch)
    step(state, batch)
    assert len(asked) == 3


# Errors of optimizers of the user, and of other libraries, in a step.


def loss_fn_of_errors(params):
    return params["w"] ** 2


@pytest.mark.parametrize(
    "of_leaf",
    [
        lambda g, p: jax.tree.map(lambda g, p: -0.1 * g, g, p),
        lambda g, p: jax.tree.map(lambda p, g: -0.1 * g, p, g),
        lambda g, p: {name: -0.1 * x.astype(jnp.float32) for name, x in g.items()},
    ],
    ids=["of trees that differ", "a product", "a method"],
)
def test_an_optimizer_that_computes_with_a_missing_gradient_gets_a_note(of_leaf):
    custom = jstep.Optimizer(
        lambda p, global_step=0: {}, lambda g, s, p, step: (of_leaf(g, p), s), lambda step: {}
    )
    for optimizer in (custom, jstep.chain(jstep.scale(1.0), custom)):
        step = jstep.minimize(loss_fn_of_errors, optimizer)
        with pytest.raises((TypeError, ValueError, AttributeError)) as caught:
            step(jstep.TrainState.create({"w": 1.0, "unused": 2.0, "n": jnp.int32(3)}, optimizer))
        (told,) = [
            line
            for line in caught.value.__notes__
            if line.startswith("jstep: the gradients of ['unused'] are")
        ]
        assert "jstep.leafwise" in told
        state, _ = step(jstep.TrainState.create({"w": 1.0}, optimizer))
        assert float(state.params["w"]) == pytest.approx(0.8)


def test_errors_of_the_step_get_no_note_about_gradients_that_are_there():
    def update(updates, slots, params, step):
        raise TypeError("None of this works")

    broken = jstep.Optimizer(lambda params, global_step=0: {}, update, lambda step: {})
    with pytest.raises(TypeError, match="None of this") as caught:
        jstep.minimize(loss_fn_of_errors, broken)(jstep.TrainState.create({"w": 1.0}, broken))
    assert not any("gradients of" in line for line in getattr(caught.value, "__notes__", []))


# Errors of JAX that ported programs meet have a note that shows the way out, once.

OPTIMIZER = jstep.gradient_descent(0.1)


def state():
    return jstep.TrainState.create({"w": jnp.ones(3)}, OPTIMIZER)


def loss_of_pmap(params, x):
    return jax.lax.pmean(jnp.sum(params["w"] * x), "batch")


CALLS = {
    "minimize": lambda: jstep.minimize(loss_of_pmap, OPTIMIZER)(state(), jnp.ones(3)),
    "evaluator": lambda: jstep.evaluator(
        lambda params, x: {"loss": loss_of_pmap(params, x)}, [jnp.ones(3)]
    )(state()),
    "train": lambda: jstep.train(
        jstep.minimize(loss_of_pmap, OPTIMIZER),
        state(),
        lambda step: jnp.ones(3),
        2,
        progress=False,
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_axis_of_pmap(call):
    with pytest.raises(NameError, match="unbound axis name: batch") as error:
        CALLS[call]()
    (note,) = [note for note in error.value.__notes__ if "pmap" in note]
    assert "jax.vmap(fn, axis_name='batch')" in note


def test_the_way_out_of_the_note_works():
    def loss_fn(params, x):
        return jax.vmap(loss_of_pmap, in_axes=(None, 0), axis_name="batch")(params, x[None])[0]

    after, _ = jstep.minimize(loss_fn, OPTIMIZER)(state(), jnp.ones(3))
    assert after.params["w"].tolist() == pytest.approx([0.9] * 3)


def test_a_carry_of_another_dtype():
    def step(state, x):
        (state, total), _ = jax.lax.scan(
            lambda carry, _: ((carry[0], carry[1].astype(x.dtype) + x), None),
            (state, jnp.int32(0)),
            jnp.arange(3),
        )
        return state, {"total": total}

    with pytest.raises(TypeError, match="carry output must have equal types") as error:
        jstep.TrainStep(step)(state(), jnp.float32(1))
    (note,) = [note for note in error.value.__notes__ if "carry" in note]
    assert "TrainState.create" in note


def test_a_step_has_the_docstring_of_its_function():
    assert (
        jstep.TrainStep(jstep.increment_global_step).__doc__ == jstep.increment_global_step.__doc__
    )


def test_the_step_as_a_number_inside_a_step():
    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        jstep.TrainStep(lambda s: (s, {"step": jstep.global_step(s)}))(state())
    assert any(
        "inside a compiled step use state.global_step" in note for note in error.value.__notes__
    )


def test_its_text_names_the_loss_and_the_optimizer():
    step = jstep.minimize(loss_fn, jstep.gradient_descent(0.01))
    assert repr(step) == (
        "<jstep.TrainStep loss_fn, gradient_descent(learning_rate=0.01), donate=True>"
    )
    assert repr(jstep.TrainStep(lambda state, x: (state, {}), donate=False)).endswith(
        ".TrainStep <lambda>, donate=False>"
    )
