"""`find_nonfinite` with nonfinite constants: literals and arrays that a function closes over."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

NAN = np.array([0, np.nan, 0], np.float32)
MASK = np.array([0, -np.inf, 0], np.float32)
X = jnp.ones(3)


def test_constant_with_a_nan_in_a_step() -> None:
    optimizer = jstep.adam(0.1)
    state = jstep.TrainState.create({"a": jnp.ones(3)}, optimizer)

    def loss_fn(params: Any, x: Any) -> Any:
        return jnp.sum((params["a"] * (x - NAN)) ** 2)

    found = jstep.find_nonfinite(jstep.minimize(loss_fn, optimizer), state, X)
    assert found is not None
    assert found.constant is not None
    assert (found.primitive, found.constant.nans, found.constant.shape) == ("sub", 1, (3,))
    assert found.constant.dtype == "float32"
    assert found.reaches
    assert "test_nonfinite_constants.py" in found.source
    assert "loss_fn" in found.source
    assert "a constant is not finite: float32[3] all 0, 1 NaN, first read by sub at" in str(found)


@jax.custom_vjp
def _poisoned(x: Any) -> Any:
    return x


_poisoned.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.float32(np.nan),))


def _while(x: Any) -> Any:
    return jax.lax.while_loop(
        lambda s: s[0] < 5, lambda s: (s[0] + 1, jnp.where(s[0] == 3, s[1] * jnp.nan, s[1])), (0, x)
    )[1]


def _with_nan() -> Any:
    xs = np.ones(6, np.float32)
    xs[4] = np.nan
    return xs


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "literal": (lambda x: x * jnp.nan, "mul", ""),
    "scan, carried": (
        lambda x: jax.lax.scan(lambda c, y: ((c[1], c[0] * y), None), (x, x), _with_nan())[0],
        "mul",
        "scan iteration 4",
    ),
    "while": (_while, "mul", "while iteration 3"),
    "custom_vjp": (jax.grad(lambda x: (_poisoned(x) * 2).sum()), "mul", ""),
    "after a mask": (lambda x: jax.nn.softmax(x + MASK) * NAN, "mul", ""),
}


@pytest.mark.thorough(except_for=["scan, carried"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_constant_is_found_where_it_is_read(name: str) -> None:
    fn, primitive, where = FUNCTIONS[name]
    found = jstep.find_nonfinite(fn, X)
    assert found is not None
    assert found.constant is not None
    assert (found.primitive, found.where, found.constant.nans) == (primitive, where, 1)
    assert "test_nonfinite_constants.py" in found.source


def test_operation_on_constants_only() -> None:
    key = jax.random.key(0)
    found = jstep.find_nonfinite(lambda x: x + jax.random.normal(key, (3,)) / 0, X)
    assert found is not None
    assert found.constant is None
    assert (found.primitive, str(found.inputs[1])) == ("div", "float32[] 0")


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.nn.softmax(x + MASK),
        lambda x: jnp.maximum(x, -jnp.inf),
        lambda x: (x, MASK),
        lambda x: (x, jnp.full(3, jnp.inf)),
        lambda x: jax.lax.scan(lambda c, y: (jnp.maximum(c, y), c.astype(int)), -jnp.inf, x)[0],
    ],
)
def test_infinite_bounds_and_masks_are_not_reported(fn: Any) -> None:
    assert jstep.find_nonfinite(fn, X) is None


def test_nan_returned_unchanged() -> None:
    found = jstep.find_nonfinite(lambda x: (x, np.float32(np.nan)), X)
    assert found is not None
    assert found.constant is not None
    assert str(found) == "a constant is not finite, and is returned unchanged: float32[] 1 NaN"


def test_infinite_hyperparameters_are_not_reported() -> None:
    optimizer = jstep.prodigy()  # growth_rate=inf
    state = jstep.TrainState.create({"a": jnp.ones(3)}, optimizer)
    step = jstep.minimize(lambda p, x: jnp.sum((p["a"] * x) ** 2), optimizer)
    assert jstep.find_nonfinite(step, state, X) is None
