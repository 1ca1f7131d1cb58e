"""Parameters that are no arrays, copies of parameters in slots, boxed variables, and paths of several leaves."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep


def test_empty_trees_raise() -> None:
    state = jstep.TrainState.create({}, jstep.adam())
    with pytest.raises(ValueError, match=r"No variables to optimize"):
        jstep.minimize(lambda p: jnp.float32(1), jstep.adam())(state)
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        jstep.apply_gradients(state, {}, jstep.adam())


# Equinox.


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """A module whose leaves are arrays and functions, as those of Equinox are."""

    weight: Any
    activation: Any


def test_a_leaf_that_is_not_an_array_is_named_with_what_splits_the_model() -> None:
    params = {"layers": [Module(jnp.ones(2), None), Module(jnp.ones(2), jax.nn.relu)]}
    by_hand = jstep.TrainState(params, {}, jnp.int32(0))

    def loss_fn(params: Any) -> jax.Array:
        return jnp.sum(params["layers"][1].activation(params["layers"][0].weight))

    for make in (
        lambda: jstep.TrainState.create(params, jstep.adam()),
        lambda: jstep.minimize(loss_fn, jstep.adam())(by_hand),
        lambda: jstep.minimize(loss_fn, jstep.adam(), jit=False)(by_hand),
        lambda: jstep.compute_gradients(loss_fn)(params),
    ):
        with pytest.raises(TypeError, match="params: the leaf at 'layers/1/activation' is a") as caught:
            make()
        assert "keep only arrays in params, by equinox.partition or flax.nnx.split" in str(caught.value)


@pytest.mark.parametrize("leaf", [jnp.float32, "relu", np.array(["relu"]), np.array([None])], ids=repr)
def test_a_leaf_with_a_dtype_that_is_not_an_array_is_named_too(leaf: Any) -> None:
    params = Module(jnp.ones(2), leaf)
    step = jstep.minimize(lambda params: jnp.sum(params.weight), jstep.adam())
    for make in (
        lambda: jstep.TrainState.create(params, jstep.adam()),
        lambda: step(jstep.TrainState(params, {}, jnp.int32(0))),
    ):
        with pytest.raises(TypeError, match=r"params: the leaf at 'activation' is .*equinox\.partition"):
            make()


# Flax.


SHARED_PATH = {"a": {"b": 1.0}, "a/b": 2.0, "c": 3.0}


def test_path_shared_by_two_leaves() -> None:
    state = jstep.TrainState.create(SHARED_PATH, jstep.adagrad(0.1))
    with pytest.raises(ValueError, match="get_slot: 2 leaves share the path 'a/b'"):
        jstep.get_slot(state, "accumulator", "a/b")
    assert float(jstep.get_slot(state, "accumulator", "c")) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="var_list: 2 leaves share the path 'a/b'"):
        jstep.compute_gradients(lambda p: p["c"], var_list=["a/b"])(state.params)
    _, grads = jstep.compute_gradients(lambda p: p["c"] + p["a/b"], var_list=["*"])(state.params)
    assert grads["a"]["b"] is None


def test_slots_initialized_with_parameters_are_copies() -> None:
    """A buffer can be donated only once."""
    base = jstep.gradient_descent(0.1)
    custom = base._replace(
        init=lambda params, global_step=0: {"start": params, "same": params},
        update=lambda u, slots, p, step: (base.update(u, {}, p, step)[0], slots),
    )
    step = jstep.minimize(lambda p: p["w"] ** 2, custom)
    for copy in (True, False):
        state = jstep.TrainState.create({"w": jnp.float32(1.0)}, custom, copy=copy)
        for _ in range(2):
            state, _ = step(state)
        assert float(state.slots["start"]["w"]) == float(state.slots["same"]["w"]) == 1.0


# Flax NNX, whose variables are boxed arrays.


@pytest.fixture
def nnx() -> Any:
    return pytest.importorskip("flax.nnx")


def test_boxed_variables(nnx: Any) -> None:
    class Model(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.fc = nnx.Linear(2, 1, rngs=rngs)
            self.norm = nnx.BatchNorm(1, rngs=rngs)

    model = Model(nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"the variable at 'norm/mean' is an nnx\.BatchStat, which is not trained"):
        jstep.TrainState.create(model, jstep.adam())
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = jstep.momentum(0.1, 0.9)
    state = jstep.TrainState.create(params, optimizer, model_state=rest)
    for path in ("fc/kernel", "fc/kernel/value"):
        assert jstep.get_slot(state, "momentum", path).shape == (2, 1)

    def loss_fn(params: Any, rest: Any, x: Any) -> Any:
        model = nnx.merge(graphdef, params, rest, copy=True)
        loss = jnp.mean(model.norm(model.fc(x)) ** 2) + jnp.mean(model.fc(x))
        return loss, nnx.split(model, nnx.Param, ...)[2]

    step = jstep.minimize(loss_fn, optimizer, has_model_state=True, var_list=["fc/kernel"])
    new, _ = step(state, jnp.array([[1.0, 2.0], [3.0, 5.0]]))
    assert jstep.get_slot(new, "momentum", "fc/kernel").any()
    assert not jstep.get_slot(new, "momentum", "fc/bias").any()
    assert float(new.slots["model_state"]["norm"]["var"].get_value()[0]) != 1.0
