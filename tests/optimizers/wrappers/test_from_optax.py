"""Transformations of Optax and of other libraries as optimizers of jstep."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from against_optax import assert_close, run_jstep, run_optax
from doubles import raising
from jax.sharding import PartitionSpec as P

import jstep

MASK = {"w": True, "c": False, "b": True, "k": False, "r": True}
LABELS = {"w": "a", "c": "a", "b": "b", "k": "b", "r": "a"}
TRANSFORMATIONS = {
    "adam": optax.adam(1e-2),
    "scheduled momentum": optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9),
    "masked": optax.masked(optax.adam(1e-2), MASK),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "several": optax.multi_transform({"a": optax.adam(1e-2), "b": optax.sgd(1e-2)}, LABELS),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
}


@pytest.mark.thorough(except_for=["masked"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_matches_optax(name):
    assert_close(
        run_jstep(jstep.from_optax(TRANSFORMATIONS[name])).params,
        run_optax(TRANSFORMATIONS[name])[-1],
    )


def test_slots_and_hyperparameters():
    optimizer = jstep.from_optax(
        optax.adam(1e-2), {"learning_rate": 1e-2, "b": jstep.constant(2.0)}, name="theirs"
    )
    state = jstep.TrainState.create(
        {"w": jnp.ones(2, jnp.bfloat16), "n": jnp.array(1), "x": None}, optimizer
    )
    assert sorted(state.slots) == ["theirs/0/count", "theirs/0/mu", "theirs/0/nu"]
    assert jstep.get_slot_names(state) == ["theirs/0/mu", "theirs/0/nu"]
    assert state.slots["theirs/0/mu"]["w"].dtype == jnp.float32
    assert state.slots["theirs/0/mu"]["n"] is None
    assert {name: float(value) for name, value in optimizer.hyperparameters(3).items()} == {
        "learning_rate": pytest.approx(1e-2), "b": 2.0,
    }  # fmt: skip
    by_function = jstep.from_optax(optax.sgd(0.1), lambda step: {"learning_rate": 0.1 * (step + 1)})
    assert float(by_function.hyperparameters(1)["learning_rate"]) == pytest.approx(0.2)
    step = jstep.minimize(lambda p: jnp.sum(p["w"].astype(jnp.float32)), optimizer)
    _, metrics = step(state)
    assert float(metrics["learning_rate"]) == pytest.approx(1e-2)


@pytest.mark.thorough
def test_moments_are_sharded_like_their_parameters():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    optimizer = jstep.from_optax(optax.adam(0.1))
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
    state = jstep.TrainState.create(
        params, optimizer, mesh=mesh, param_specs=[("w", P("data", "model"))], slot_axis="data"
    )
    for _ in range(2):
        assert state.slots["optax/0/mu"]["w"].sharding.spec == P("data", "model")
        assert state.slots["optax/0/nu"]["b"].sharding.spec == P("data")
        assert state.slots["optax/0/count"].sharding.spec == P()
        state, _ = jstep.minimize(lambda p: jnp.sum(p["w"]) + jnp.sum(p["b"]), optimizer)(state)


# Hyperparameters of Optax transformations are reported at the global step; a chain reports those at
# any count.

RATE = optax.linear_schedule(0.0, 1.0, 10)
PARAMS = {"a": jnp.zeros(2), "n": jnp.int32(1)}


def rates(optimizer, data, start=0):
    """The logged and the used rates of the steps that made an update."""
    step = jstep.minimize(lambda params, x: jnp.sum(params["a"] * x), optimizer)
    state = jstep.TrainState.create(PARAMS, optimizer, global_step=start)
    found = []
    for x in data:
        before = np.asarray(state.params["a"])
        state, metrics = step(state, jnp.float32(x))
        if used := float((before - np.asarray(state.params["a"]))[1]):
            found.append((float(metrics["learning_rate"]), used))
    return found


def test_a_schedule_is_reported_at_the_step():
    given = [{"learning_rate": RATE}, lambda n: {"learning_rate": RATE(n), "momentum": 0.5}]
    for hyperparameters in given:
        found = rates(jstep.from_optax(optax.sgd(RATE), hyperparameters), [1.0] * 4)
        np.testing.assert_allclose(*zip(*found, strict=True), rtol=1e-5)


def test_the_recommended_chain_reports_the_rate_that_is_used():
    chained = jstep.chain(
        jstep.from_optax(optax.scale_by_sign()), jstep.scale_by_learning_rate(RATE)
    )
    found = rates(jstep.skip_nonfinite(chained), [1.0, np.nan, np.nan, 1.0, 1.0, 1.0], start=5)
    assert len(found) == 4
    np.testing.assert_allclose(*zip(*found, strict=True), rtol=1e-5)


# Transformations of Optax where an optimizer is taken: the same as `from_optax` of them, by hand.

X = jnp.array([0.5, -1.0, 2.0, 1.0])
PARAMS_AS_IT_IS = {
    "a": jnp.array([1.0, 2.0]),
    "ab": {"w": jnp.array([-1.0, 0.5], jnp.bfloat16)},
    "n": jnp.array(3),
}
TRANSFORMATIONS_AS_IT_IS = {
    "adam": lambda: optax.adam(1e-2),
    "scheduled": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.sgd(optax.linear_schedule(0.1, 0.01, 3), momentum=0.9)
    ),
    "with the loss": lambda: optax.polyak_sgd(0.1),  # takes extra arguments
    "an object": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}


def label_of(path, leaf):
    return "a" if path == "a" else "ab"


TAKERS = {
    "minimize": lambda one: one,
    "chain": lambda one: jstep.chain(jstep.clip_gradients(by_norm=1.0), one),
    "partition": lambda one: jstep.partition(
        {"a": one, "ab": jstep.chain(one, jstep.scale(0.5))}, label_of
    ),
    "scope": lambda one: jstep.scope(one, "s"),
    "cautious": jstep.cautious,
    "with_projection": lambda one: jstep.with_projection(
        one, lambda params: jax.tree.map(lambda p: p * 1, params)
    ),
    "with_moving_average": lambda one: jstep.with_moving_average(
        one, jstep.ExponentialMovingAverage(0.9)
    ),
    "lookahead": lambda one: jstep.lookahead(one, 2),
    "master_weights": jstep.master_weights,
    "stochastic_rounding": lambda one: jstep.stochastic_rounding(one, jax.random.key(0)),
    "compact": lambda one: jstep.compact(one, min_size=1),
    "skip_nonfinite": jstep.skip_nonfinite,
    "dynamic_loss_scale": lambda one: jstep.dynamic_loss_scale(one, initial=8.0),
    "with_noise_scale": jstep.with_noise_scale,
    "update_every": lambda one: jstep.update_every(one, 2, accumulate=True),
}


def loss_fn(params, x):
    return jnp.sum((params["a"] - x[:2]) ** 2) + jnp.sum(
        (params["ab"]["w"].astype(jnp.float32) * x[2:]) ** 2
    )


def trained(optimizer, again):
    """The state after three steps, and the metrics of the last one."""
    step = jstep.minimize(loss_fn, again)
    state = jstep.TrainState.create(PARAMS_AS_IT_IS, optimizer)
    before = jax.tree.structure(state)
    for _ in range(3):
        state, metrics = step(state, X)
    assert step._cache_size() == 1
    assert jax.tree.structure(state) == before
    return state, metrics


def require_same(one, other):
    assert one[0] == other[0]
    assert list(one[0].slots) == list(other[0].slots)
    assert one[0].roles == other[0].roles
    assert jax.tree.map(float, one[1]) == jax.tree.map(float, other[1])


@pytest.mark.thorough(except_for=["minimize-with the loss"])
@pytest.mark.parametrize("name", TRANSFORMATIONS_AS_IT_IS)
@pytest.mark.parametrize("taker", TAKERS)
def test_a_transformation_is_taken_as_it_is(taker, name):
    make, transformation = TAKERS[taker], TRANSFORMATIONS_AS_IT_IS[name]()
    by_hand = make(jstep.from_optax(transformation))
    require_same(trained(make(transformation), make(transformation)), trained(by_hand, by_hand))


@pytest.mark.thorough
def test_state_and_step_each_convert_their_transformation():
    """Also with another object of the same kind, and mixed with one that was converted by hand."""
    adam = optax.adam(1e-2)
    require_same(trained(adam, optax.adam(1e-2)), trained(jstep.from_optax(adam), adam))
    grads = jax.grad(loss_fn, allow_int=True)(PARAMS_AS_IT_IS, X)
    state = jstep.TrainState.create(PARAMS_AS_IT_IS, adam)
    assert jstep.apply_gradients(state, grads, adam) == jstep.apply_gradients(
        state, grads, jstep.from_optax(adam)
    )
    compiled = jax.jit(lambda state: jstep.apply_gradients(state, grads, adam))
    for _ in range(2):
        state = compiled(state)
    assert compiled._cache_size() == 1


# Transformations of Optax do not see leaves without a gradient: their numbers are those with these
# as constants.

RANDOM = np.random.default_rng(0)
PARAMS_OF_CONSTANTS = {
    "lora_a": jnp.asarray(RANDOM.normal(size=(4, 2)), jnp.float32),
    "lora_b": jnp.zeros((2, 10)),
    "base": jnp.asarray(RANDOM.normal(size=(4, 10)), jnp.float32),
}
TRAINED = ("lora_a", "lora_b")
X_OF_CONSTANTS, Y = jnp.ones((1, 4)), jnp.ones((1, 10))


def loss_fn_of_constants(params, x, y):
    return jnp.mean((x @ params["base"] + x @ params["lora_a"] @ params["lora_b"] - y) ** 2)


def closed_over(params, x, y):
    return loss_fn_of_constants({**params, "base": PARAMS_OF_CONSTANTS["base"]}, x, y)


def trained_of_constants(params, loss, optimizer, **options):
    state, step = (
        jstep.TrainState.create(params, optimizer),
        jstep.minimize(loss, optimizer, **options),
    )
    losses = []
    for _ in range(5):
        state, metrics = step(state, X_OF_CONSTANTS, Y)
        losses.append(float(metrics["loss"]))
    return losses, state


def by_optax(transformation):
    params, losses = {name: PARAMS_OF_CONSTANTS[name] for name in TRAINED}, []
    kept = transformation.init(params)
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(5):
            loss, grads = jax.value_and_grad(closed_over)(params, X_OF_CONSTANTS, Y)
            losses.append(float(loss))
            extra = {
                "value": loss,
                "grad": grads,
                "value_fn": lambda p: closed_over(p, X_OF_CONSTANTS, Y),
            }
            updates, kept = optax.with_extra_args_support(transformation).update(
                grads, kept, params, **extra
            )
            params = optax.apply_updates(params, updates)
    return losses


TRANSFORMATIONS_OF_CONSTANTS = {
    "lbfgs": optax.lbfgs,
    "polyak": lambda: optax.polyak_sgd(max_learning_rate=0.1),
    "plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
    "chain": lambda: optax.chain(
        optax.contrib.reduce_on_plateau(patience=1), optax.clip(100.0), optax.lbfgs()
    ),
    "backtracking": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
}


HOW = {
    "var_list": (lambda one: one, {"var_list": "lora_*"}),
    "partition": (
        lambda one: jstep.partition(
            {"a": one}, lambda path, leaf: "a" if path in TRAINED else None
        ),
        {},
    ),
    "labels": (
        lambda one: jstep.partition({"a": one}, {"lora_a": "a", "lora_b": "a", "base": None}),
        {},
    ),
}


@pytest.mark.thorough(except_for=["lbfgs-var_list"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", TRANSFORMATIONS_OF_CONSTANTS)
def test_a_frozen_leaf_is_a_constant(name, how):
    make = TRANSFORMATIONS_OF_CONSTANTS[name]
    wanted, state = trained_of_constants(
        {name: PARAMS_OF_CONSTANTS[name] for name in TRAINED}, closed_over, make()
    )
    wrap, options = HOW[how]
    found, frozen = trained_of_constants(
        PARAMS_OF_CONSTANTS, loss_fn_of_constants, wrap(make()), **options
    )
    assert found == wanted
    for leaf in TRAINED:
        np.testing.assert_array_equal(frozen.params[leaf], state.params[leaf])
    np.testing.assert_array_equal(frozen.params["base"], PARAMS_OF_CONSTANTS["base"])
    np.testing.assert_allclose(found, by_optax(make()), rtol=1e-4)


# Transformations of other libraries: what they are given, and what is said of those that do not
# fit.


class Transformation(NamedTuple):
    init: Any
    update: Any


def apply(transformation: Any, params: Any, grads: Any, context: Any = None) -> Any:
    optimizer = jstep.from_optax(transformation)
    state = jstep.TrainState.create(params, optimizer)
    return jstep.apply_gradients(
        state, grads, optimizer, **({} if context is None else {"context": context}), scaled=True
    )


NEEDS = "needy() missing 2 required keyword-only arguments: 'value' and 'grad'"


def needy(updates: Any, state: Any, params: Any, *, value: Any, grad: Any) -> Any:
    return jax.tree.map(lambda g: -value * g, grad), state


def grown(updates: Any, state: Any, params: Any) -> Any:
    return updates, {"a": state["a"], "b": state["a"]}


@pytest.mark.parametrize(
    ("transformation", "kind", "message"),
    [
        (Transformation(lambda p: {}, raising(TypeError("another"))), TypeError, "another"),
        (Transformation(lambda p: {}, needy), TypeError, NEEDS),
        (Transformation(lambda p: {"a": jnp.ones(())}, grown), ValueError,
         "transformation: its update returned ['optax/a', 'optax/b'], its init returned "
         "['optax/a']; a compiled step needs the same structure after each update"),
    ],
)  # fmt: skip
def test_what_does_not_fit(transformation: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        apply(transformation, {"w": jnp.ones(2)}, {"w": jnp.ones(2)})
    assert str(caught.value) == message
    notes = getattr(caught.value, "__notes__", ())
    assert any("train with jstep.minimize" in one for one in notes) == (message == NEEDS)


def test_the_loss_as_a_function_is_that_of_the_step_and_has_its_derivative() -> None:
    """In the dtypes of the parameters, without the leaves that are not trained."""
    params = {"n": jnp.int32(3), "w": jnp.array([1.0, 2.0], jnp.bfloat16), "v": jnp.float32(2)}
    seen: list[Any] = []

    def value_and_grad(params: Any) -> Any:
        seen.append([(name, str(leaf.dtype)) for name, leaf in sorted(params.items())])
        grads = {"n": None, "w": 2 * params["w"] * params["v"], "v": None}
        return (jnp.sum(params["w"] ** 2) * params["v"]).astype(jnp.bfloat16), grads

    found: dict[str, Any] = {}

    def update(
        updates: Any, state: Any, params: Any, *, value: Any, grad: Any, value_fn: Any
    ) -> Any:
        found.update(
            value=value, grad=grad, loss=value_fn(params), slope=jax.grad(value_fn)(params)
        )
        return updates, state

    context = jstep.Context(jnp.bfloat16(7), value_and_grad)
    made = apply(
        Transformation(lambda params: {}, update),
        params,
        {"n": None, "w": jnp.ones(2), "v": None},
        context,
    )
    assert seen == [[("n", "int32"), ("v", "float32"), ("w", "bfloat16")]] * 2
    assert (found["value"].dtype, float(found["value"])) == (jnp.float32, 7)
    assert (found["loss"].dtype, float(found["loss"])) == (jnp.float32, 10)
    assert found["grad"]["n"] is found["slope"]["n"] is None
    np.testing.assert_array_equal(found["grad"]["w"], [1, 1])
    np.testing.assert_array_equal(found["slope"]["w"], [4, 8])
    assert {found[name]["w"].dtype for name in ("grad", "slope")} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(made.params["w"], np.array([2, 3], jnp.bfloat16))
    assert float(made.params["v"]) == 2


# What `dpsgd` makes of its deprecated argument `seed`.
PRIVATE = optax.chain(
    optax.contrib.differentially_private_aggregate(1.0, 0.5, jax.random.key(0)),
    optax.scale_by_learning_rate(0.1),
)


@pytest.mark.parametrize("transformation", [PRIVATE, optax.multi_transform({"a": PRIVATE}, "a")])
def test_a_transformation_of_the_gradients_of_examples_is_rejected_by_create(
    transformation: Any,
) -> None:
    """A leaf with an axis would train on wrong numbers: the axis is taken for the examples."""
    with pytest.raises(
        TypeError,
        match=r"^transformation: .*needs the gradient of each example.*jax\.vmap\(jax\.grad",
    ):
        jstep.TrainState.create({"w": jnp.ones(4)}, jstep.from_optax(transformation))
