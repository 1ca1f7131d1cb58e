"""The labels of a partition as a tree: in the form of the parameters, or a prefix of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import jstep


class Net(NamedTuple):
    policy: Any
    value: Any


def w() -> jax.Array:
    return jnp.ones((2, 2))


NET = Net({"w": w(), "b": jnp.ones(2)}, [w(), jnp.ones(2), None])


def rates(params: Any, labels: Any, wrap: Any = lambda optimizer: optimizer) -> list[int]:
    """How far each leaf moves: 1 with the label x, 2 with y, 0 if it is frozen."""
    optimizer = wrap(jstep.partition({"x": jstep.sgd(1.0), "y": jstep.sgd(2.0)}, labels))
    state = jstep.TrainState.create(params, optimizer)
    moved = jstep.apply_gradients(state, jax.tree.map(jnp.ones_like, params), optimizer)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(moved.params), strict=True)
    return [round(float(jnp.max(jnp.abs(before - after)))) for before, after in pairs]


@pytest.mark.parametrize(
    ("params", "labels", "wanted"),
    [
        ({"a": w(), "b": w()}, {"a": "x", "b": "y"}, [1, 2]),
        ([w(), w()], ["y", "x"], [2, 1]),
        (NET, Net({"w": "x", "b": None}, ["y", "x", None]), [0, 1, 2, 1]),
        (NET, Net(None, "x"), [0, 0, 1, 1]),
        ({"a": w(), "b": w()}, "y", [2, 2]),
        (w(), "x", [1]),
    ],
)
def test_each_leaf_has_the_label_of_the_tree(params: Any, labels: Any, wanted: list[int]) -> None:
    assert rates(params, labels) == wanted
    assert rates(params, labels, lambda one: jstep.chain(jstep.clip_gradients(by_global_norm=1e9), one)) == wanted


@pytest.mark.parametrize(
    ("labels", "error", "text"),
    [
        ({"a": "x", "b": {"c": "y"}}, ValueError, "must have the structure of params"),
        ({"a": "x", "b": "z"}, ValueError, "labels: the leaf at 'b' has 'z', must be one of"),
        (None, TypeError, "labels=None: must be a function .* or a tree of labels"),
        (True, TypeError, "labels=True"),
    ],
)
def test_what_is_no_tree_of_labels(labels: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        rates({"a": w(), "b": w()}, labels)
