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


@pytest.mark.thorough
def test_a_module_that_can_be_called() -> None:
    import equinox as eqx

    model = eqx.filter(eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0)), eqx.is_inexact_array)
    labels = jax.tree.map(lambda leaf: "x" if leaf.ndim == 2 else "y", model)
    assert rates(model, labels) == [1 + (leaf.ndim == 1) for leaf in jax.tree.leaves(model)]
    mask = jax.tree.map(lambda leaf: leaf.ndim == 2, model)
    optimizer = jstep.adamw(1e-9, weight_decay=5e8, weight_decay_mask=mask)
    state = jstep.TrainState.create(model, optimizer)
    after = jstep.apply_gradients(state, jax.tree.map(jnp.zeros_like, model), optimizer)
    changed = [bool((a != b).any()) for a, b in zip(*map(jax.tree.leaves, (state.params, after.params)), strict=True)]
    assert changed == jax.tree.leaves(mask)


def test_inside_another_partition_and_in_steps() -> None:
    params = {"a": {"w": w(), "b": w()}, "c": w()}
    inner = jstep.partition({"x": jstep.adam(0.1), "y": jstep.sgd(0.1)}, {"a": {"w": "x", "b": "y"}, "c": None})
    tree = jstep.partition({"in": inner, "out": jstep.adamw(0.1)}, {"a": "in", "c": "out"})
    by_path = jstep.partition(
        {
            "in": jstep.partition(
                {"x": jstep.adam(0.1), "y": jstep.sgd(0.1)}, lambda path, leaf: "x" if path == "a/w" else "y"
            ),
            "out": jstep.adamw(0.1),
        },
        lambda path, leaf: "in" if path.startswith("a") else "out",
    )
    found = []
    for optimizer in (tree, by_path):
        step = jstep.minimize(lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p)), optimizer)
        state = jstep.TrainState.create(params, optimizer)
        for _ in range(3):
            state, _ = step(state)
        found.append(state)
    assert found[0] == found[1]


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
