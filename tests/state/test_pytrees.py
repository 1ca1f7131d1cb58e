"""Parameters in containers, dataclasses and boxed variables, and paths as arguments."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)
Y = jnp.sin(X[:, 0])
EMA = jstep.ExponentialMovingAverage(0.9)


class Layer(NamedTuple):
    kernel: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    layers: list[Layer]
    scale: Any
    name: str = dataclasses.field(default="model", metadata={"static": True})


def layer(seed: int, n: int, m: int) -> Layer:
    return Layer(jax.random.normal(jax.random.key(seed), (n, m)) / n**0.5, jnp.zeros(m))


FIRST, SECOND = layer(0, 4, 8), layer(1, 8, 1)


def predict(one: Layer, two: Layer, x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ one.kernel + one.bias[None])
    return (h @ two.kernel + two.bias[None])[:, 0]


CONTAINERS = {
    "dict": ({"one": dict(FIRST._asdict()), "two": dict(SECOND._asdict())}, "one/kernel"),
    "list": ([FIRST, [SECOND]], "0/kernel"),
    "tuple": ((FIRST, (SECOND, None)), "1/0/bias"),
    "namedtuple": (Layer(FIRST, SECOND), "kernel/kernel"),
    "dataclass": (Model([FIRST, SECOND], jnp.float32(1)), "layers/0/kernel"),
}


def optimizers() -> list[jstep.Optimizer]:
    return [
        jstep.skip_nonfinite(
            jstep.with_moving_average(jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adam(0.01)), EMA)
        ),
        jstep.with_moving_average(
            jstep.partition(
                {"k": jstep.momentum(0.01, 0.9), "b": jstep.adagrad(0.1)},
                lambda path, leaf: "b" if leaf.ndim < 2 else "k",
            ),
            EMA,
        ),
    ]


def check_trains(params: Any, loss: Any, *args: Any, **kwargs: Any) -> jstep.TrainState:
    """Check that training with both optimizers lowers the loss and keeps the tree structure."""
    for optimizer in optimizers():
        state = jstep.TrainState.create(params, optimizer, **kwargs)
        treedef = jax.tree.structure(state)
        step = jstep.minimize(loss, optimizer, has_model_state=bool(kwargs))
        first = None
        for _ in range(20):
            state, metrics = step(state, *args)
            first = float(metrics["loss"]) if first is None else first
        assert float(metrics["loss"]) < 0.9 * first
        assert jax.tree.structure(state) == treedef
        assert jax.tree.structure(jstep.averaged_params(state)) == jax.tree.structure(params)
        assert type(state.params) is type(params)
    return state


@pytest.mark.thorough(except_for=["namedtuple"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_parameters_in_containers(name: str) -> None:
    params, path = CONTAINERS[name]
    treedef = jax.tree.structure(params)
    indices = jax.tree.leaves(jax.tree.unflatten(treedef, range(treedef.num_leaves)))
    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    find = {shape: i for i, shape in zip(indices, shapes, strict=True)}

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        leaves = jax.tree.leaves(params)
        one, two = (Layer(leaves[find[a.kernel.shape]], leaves[find[a.bias.shape]]) for a in (FIRST, SECOND))
        return jnp.mean((predict(one, two, x) - y) ** 2)

    check_trains(params, loss, X, Y)
    state = jstep.TrainState.create(params, jstep.adam())
    assert jstep.get_slot(state, "m", path) is not None
    with pytest.raises(ValueError, match=r"nearest|paths are"):
        jstep.compute_gradients(loss, var_list=[path + "x"])(params, X, Y)
    _, grads = jstep.compute_gradients(loss, var_list=[path])(params, X, Y)
    assert len(jax.tree.leaves(grads)) == 1


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


def test_a_leaf_that_is_not_an_array_is_named_with_the_two_lines_that_split_the_model() -> None:
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
        assert "\n    params, static = eqx.partition(model, eqx.is_inexact_array)" in str(caught.value)
        assert "\n    model = eqx.combine(params, static)" in str(caught.value)


@pytest.mark.parametrize("leaf", [jnp.float32, "relu", np.array(["relu"]), np.array([None])], ids=repr)
def test_a_leaf_with_a_dtype_that_is_not_an_array_is_named_too(leaf: Any) -> None:
    params = Module(jnp.ones(2), leaf)
    step = jstep.minimize(lambda params: jnp.sum(params.weight), jstep.adam())
    for make in (
        lambda: jstep.TrainState.create(params, jstep.adam()),
        lambda: step(jstep.TrainState(params, {}, jnp.int32(0))),
    ):
        with pytest.raises(TypeError, match=r"params: the leaf at 'activation' is .*\n.*eqx\.partition"):
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
