"""Transformations of other libraries as optimizers: what they are given, and what is said of those that do not fit."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from doubles import raising

import jstep


class Transformation(NamedTuple):
    init: Any
    update: Any


def apply(transformation: Any, params: Any, grads: Any, context: Any = None) -> Any:
    optimizer = jstep.from_optax(transformation)
    state = jstep.TrainState.create(params, optimizer)
    return jstep.apply_gradients(state, grads, optimizer, **({} if context is None else {"context": context}))


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
        (Transformation(lambda p: {"a": jnp.ones(())}, grown), ValueError, "the optimizer's slots are not those of the "
         "state: it returned a tree with 'optax/b'; use the optimizer that the state was created with"),
    ],
)  # fmt: skip
def test_what_does_not_fit(transformation: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        apply(transformation, {"w": jnp.ones(2)}, {"w": jnp.ones(2)})
    assert str(caught.value) == message
    assert any("train with jstep.minimize" in one for one in getattr(caught.value, "__notes__", ())) == (
        message == NEEDS
    )


def test_the_loss_as_a_function_is_that_of_the_step_and_has_its_derivative() -> None:
    """In the dtypes of the parameters, without the leaves that are not trained."""
    params = {"n": jnp.int32(3), "w": jnp.array([1.0, 2.0], jnp.bfloat16), "v": jnp.float32(2)}
    seen: list[Any] = []

    def value_and_grad(params: Any) -> Any:
        seen.append([(name, str(leaf.dtype)) for name, leaf in sorted(params.items())])
        grads = {"n": None, "w": 2 * params["w"] * params["v"], "v": None}
        return (jnp.sum(params["w"] ** 2) * params["v"]).astype(jnp.bfloat16), grads

    found: dict[str, Any] = {}

    def update(updates: Any, state: Any, params: Any, *, value: Any, grad: Any, value_fn: Any) -> Any:
        found.update(value=value, grad=grad, loss=value_fn(params), slope=jax.grad(value_fn)(params))
        return updates, state

    context = jstep.Context(jnp.bfloat16(7), value_and_grad)
    made = apply(Transformation(lambda params: {}, update), params, {"n": None, "w": jnp.ones(2), "v": None}, context)
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
    optax.contrib.differentially_private_aggregate(1.0, 0.5, jax.random.key(0)), optax.scale_by_learning_rate(0.1)
)


@pytest.mark.parametrize("transformation", [PRIVATE, optax.multi_transform({"a": PRIVATE}, "a")])
def test_a_transformation_of_the_gradients_of_examples_is_rejected_by_create(transformation: Any) -> None:
    """A leaf with an axis would train on wrong numbers: the axis is taken for the examples."""
    with pytest.raises(TypeError, match=r"^transformation: .*needs the gradient of each example.*jax\.vmap\(jax\.grad"):
        jstep.TrainState.create({"w": jnp.ones(4)}, jstep.from_optax(transformation))
