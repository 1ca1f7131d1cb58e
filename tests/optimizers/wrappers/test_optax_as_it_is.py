"""Transformations of Optax where an optimizer is taken: the same as `from_optax` of them, by hand."""

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jstep

X = jnp.array([0.5, -1.0, 2.0, 1.0])
PARAMS = {"a": jnp.array([1.0, 2.0]), "ab": {"w": jnp.array([-1.0, 0.5], jnp.bfloat16)}, "n": jnp.array(3)}
TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-2),
    "scheduled": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.sgd(optax.linear_schedule(0.1, 0.01, 3), momentum=0.9)
    ),
    "with the loss": lambda: optax.polyak_sgd(0.1),  # takes extra arguments
    "an object": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}


def label_of(path: str, leaf: Any) -> str:
    return "a" if path == "a" else "ab"


TAKERS: dict[str, Callable[[Any], Any]] = {
    "minimize": lambda one: one,
    "chain": lambda one: jstep.chain(jstep.clip_gradients(by_norm=1.0), one),
    "partition": lambda one: jstep.partition({"a": one, "ab": jstep.chain(one, jstep.scale(0.5))}, label_of),
    "scope": lambda one: jstep.scope("s", one),
    "cautious": jstep.cautious,
    "with_projection": lambda one: jstep.with_projection(one, lambda params: jax.tree.map(lambda p: p * 1, params)),
    "with_moving_average": lambda one: jstep.with_moving_average(one, jstep.ExponentialMovingAverage(0.9)),
    "lookahead": lambda one: jstep.lookahead(one, 2),
    "master_weights": jstep.master_weights,
    "stochastic_rounding": lambda one: jstep.stochastic_rounding(one, jax.random.key(0)),
    "compact": lambda one: jstep.compact(one, min_size=1),
    "skip_nonfinite": jstep.skip_nonfinite,
    "dynamic_loss_scale": lambda one: jstep.dynamic_loss_scale(one, initial=8.0),
    "with_noise_scale": jstep.with_noise_scale,
    "update_every": lambda one: jstep.update_every(2, one, accumulate=True),
}


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.sum((params["a"] - x[:2]) ** 2) + jnp.sum((params["ab"]["w"].astype(jnp.float32) * x[2:]) ** 2)


def trained(optimizer: Any, again: Any) -> tuple[Any, Any]:
    """The state after three steps, and the metrics of the last one."""
    step = jstep.minimize(loss_fn, again)
    state = jstep.TrainState.create(PARAMS, optimizer)
    before = jax.tree.structure(state)
    for _ in range(3):
        state, metrics = step(state, X)
    assert step._cache_size() == 1
    assert jax.tree.structure(state) == before
    return state, metrics


def require_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert one[0] == other[0]
    assert list(one[0].slots) == list(other[0].slots)
    assert one[0].roles == other[0].roles
    assert jax.tree.map(float, one[1]) == jax.tree.map(float, other[1])


@pytest.mark.thorough(except_for=["minimize-with the loss", "update_every-scheduled"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("taker", TAKERS)
def test_a_transformation_is_taken_as_it_is(taker: str, name: str) -> None:
    make, transformation = TAKERS[taker], TRANSFORMATIONS[name]()
    by_hand = make(jstep.from_optax(transformation))
    require_same(trained(make(transformation), make(transformation)), trained(by_hand, by_hand))


def test_state_and_step_each_convert_their_transformation() -> None:
    """Also with another object of the same kind, and mixed with one that was converted by hand."""
    adam = optax.adam(1e-2)
    require_same(trained(adam, optax.adam(1e-2)), trained(jstep.from_optax(adam), adam))
    grads = jax.grad(loss_fn, allow_int=True)(PARAMS, X)
    state = jstep.TrainState.create(PARAMS, adam)
    assert jstep.apply_gradients(state, grads, adam) == jstep.apply_gradients(state, grads, jstep.from_optax(adam))
    compiled = jax.jit(lambda state: jstep.apply_gradients(state, grads, adam))
    for _ in range(2):
        state = compiled(state)
    assert compiled._cache_size() == 1


class Named:
    """Another library's optimizer, with three functions."""

    init = update = hyperparameters = staticmethod(lambda *args: None)


class Unmade:
    """A class of transformations; its functions are those of its objects."""

    def init(self, params: Any) -> Any:
        return ()

    def update(self, updates: Any, state: Any, params: Any = None) -> Any:
        return updates, state


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (optax.adam, r"got a function; call it: adam\(\.\.\.\)"),
        (Unmade, r"got the class Unmade; call it: Unmade\(\.\.\.\)"),
        (Named(), "got a Named$"),
        (types.SimpleNamespace(init=lambda params: ()), "got a SimpleNamespace$"),
        (None, "got None$"),
    ],
    ids=["function", "class", "three", "one", "none"],
)
def test_anything_else_is_refused(wrong: Any, message: str) -> None:
    takers = {
        "optimizer": [lambda: jstep.TrainState.create(PARAMS, wrong), lambda: jstep.minimize(loss_fn, wrong)],
        r"optimizers\[1\]": [lambda: jstep.chain(optax.adam(0.1), wrong)],
        r"optimizers\['a'\]": [lambda: jstep.partition({"a": wrong}, label_of)],
    }
    for argument, makes in takers.items():
        for make in makes:
            with pytest.raises(TypeError, match=f"^{argument}=.*: must be a jstep.Optimizer, {message}"):
                make()
