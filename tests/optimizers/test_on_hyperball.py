"""`on_hyperball`: precision of the norms, radius and axes, and rejected inputs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep


def random_normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.float32(np.random.default_rng(seed).normal(size=shape))


def norms(x: Any, axes: Any = (-2, -1)) -> np.ndarray:
    return np.sqrt(np.sum(np.square(np.float64(x)), axis=axes))


def trained(params: Any, optimizer: jstep.Optimizer, steps: int, size: Callable[[int], float] = lambda n: 1.0) -> Any:
    state = jstep.TrainState.create(params, optimizer)
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))
    for n in range(steps):
        grads = jax.tree.map(lambda p, n=n: np.float32(size(n)) * random_normal(*p.shape, seed=100 + n), params)
        state = step(state, grads)
    return state.params


@pytest.mark.thorough
@pytest.mark.parametrize("radius", [None, 2.5])
def test_norms_are_preserved_for_300_steps(radius: Any) -> None:
    """Each matrix of a stack keeps its norm for updates of any size; those below 1e-10 rotate it less."""
    params = {"w": random_normal(48, 32), "stack": random_normal(2, 3, 8, 16) * jnp.arange(1, 7.0).reshape(2, 3, 1, 1)}
    found = trained(params, jstep.on_hyperball(0.02, radius), 300, lambda n: 10.0 ** (n % 37 - 20))
    for name, before in params.items():
        expected = norms(before) if radius is None else radius
        np.testing.assert_allclose(norms(found[name]), expected, rtol=1e-6)
        assert np.max(np.abs(found[name] - before)) > 0.1


def test_radius_by_path_and_axes() -> None:
    params = {"a": random_normal(3, 4, 5), "b": random_normal(4, 6), "ab": random_normal(4, 6)}
    optimizer = jstep.on_hyperball(
        0.1,
        lambda path, leaf: {"a": 1.0, "b": 2, "ab": np.float32(3)}[path],
        axes=lambda path, leaf: ((0, 1), 2) if path == "a" else (1, 0),
    )
    found = trained(params, optimizer, 3)
    for name, radius in {"a": 1.0, "b": 2.0, "ab": 3.0}.items():
        np.testing.assert_allclose(norms(found[name], None), radius, rtol=1e-6)
    per_row = trained({"a": params["a"]}, jstep.on_hyperball(0.1, axes=lambda path, leaf: (0, 2)), 3)
    np.testing.assert_allclose(norms(per_row["a"], (0, 2)), norms(params["a"], (0, 2)), rtol=1e-6)


def test_zero_and_missing_updates_change_nothing() -> None:
    params = {"w": random_normal(4, 4), "n": jnp.arange(3), "none": None, "x": random_normal(4, 4, seed=1)}
    optimizer = jstep.on_hyperball(0.1)
    state = jstep.TrainState.create(params, optimizer)
    grads = {"w": jnp.zeros((4, 4)), "n": None, "none": None, "x": None}
    new = jstep.apply_gradients(state, grads, optimizer)
    jax.tree.map(np.testing.assert_array_equal, new.params, state.params)
    still = jstep.on_hyperball(0.0).update({"w": params["x"]}, {}, {"w": params["w"]}, jnp.int32(0))[0]["w"]
    np.testing.assert_array_equal(still, 0.0)
    against = jstep.on_hyperball(1.0).update({"w": params["w"]}, {}, {"w": params["w"]}, jnp.int32(0))[0]["w"]
    np.testing.assert_array_equal(against, 0.0)  # the result would be zero, without a direction


ZEROS: dict[str, tuple[Any, str]] = {
    "prefix": ({"w": jnp.ones((2, 3)), "wx": jnp.zeros((2, 2))}, "the leaf at 'wx' has norm 0"),
    "one of a stack": ({"s": jnp.ones((2, 3, 2, 2)).at[1, 2].set(0)}, r"the matrix \(1, 2\) of the leaf at 's'"),
    "bfloat16": ({"w": jnp.zeros((2, 3), jnp.bfloat16)}, "the leaf at 'w' has norm 0"),
}
WRAPPERS: dict[str, Callable[[jstep.Optimizer], jstep.Optimizer]] = {
    "alone": lambda one: one,
    "chain": lambda one: jstep.chain(jstep.scale_by_adam(), one),
    "masters": jstep.master_weights,
    "label": lambda one: jstep.skip_nonfinite(
        jstep.partition({"a": jstep.scope("s", one)}, lambda path, leaf: None if path == "x" else "a")
    ),
}


@pytest.mark.thorough(except_for=["prefix-alone", "one of a stack-label", "bfloat16-masters"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("zeros", ZEROS)
def test_zero_matrices_are_rejected(zeros: str, wrapper: str) -> None:
    params, message = ZEROS[zeros]
    optimizer = WRAPPERS[wrapper](jstep.on_hyperball(0.1))
    with pytest.raises(ValueError, match=f"params: {message}.*jstep.partition"):
        jstep.TrainState.create(params, optimizer)


def test_zeros_of_other_labels_and_abstract_zeros_are_ignored() -> None:
    params = {"w": random_normal(2, 2), "zero": jnp.zeros((2, 2)), "b": jnp.zeros(2), "n": jnp.zeros((2, 2), jnp.int32)}
    optimizer = jstep.partition(
        {"ball": jstep.on_hyperball(0.1), "adam": jstep.adam()}, lambda path, leaf: "ball" if path == "w" else "adam"
    )
    jstep.TrainState.create(params, optimizer)
    zeros, alone = {"w": jnp.zeros((2, 2))}, jstep.on_hyperball(0.1, 3.0)
    jax.eval_shape(lambda params: jstep.TrainState.create(params, alone), zeros)
    jax.jit(alone.init)(zeros)
    jax.vmap(alone.init)({"w": jnp.zeros((3, 2, 2))})
    jstep.TrainState.create({"w": jax.ShapeDtypeStruct((2, 2), jnp.float32)}, alone)


@pytest.mark.parametrize("leaf", [jnp.ones(3), jnp.ones(()), 2.0], ids=["vector", "scalar", "number"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jstep.on_hyperball(0.1), "to keep its norm.*jstep.on_hyperball"),
        (lambda: jstep.normalize_neurons(), "neurons.*jstep.normalize_neurons"),
        (lambda: jstep.orthogonalize(), "orthogonal.*jstep.muon"),
    ],
)
def test_leaves_that_are_not_matrices_are_named(make: Any, message: str, leaf: Any) -> None:
    params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": leaf}}
    with pytest.raises(ValueError, match=rf"'dense/bias' has shape \(.*: must have two axes.*{message}.*jstep.adamw"):
        jstep.TrainState.create(params, jstep.scope("s", jstep.chain(jstep.trace(0.9), make())))
