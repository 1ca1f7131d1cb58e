"""Metrics that are any mapping, and nested: a flat dict for whatever reads them."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

OPTIMIZER = jstep.sgd(0.1)
UPDATE = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), OPTIMIZER, jit=False)


def nested(loss):
    return {"loss": loss, "world": {"kl": loss, "parts": {"a": 2 * loss}}, "rate": 0.5}


class Frozen(collections.UserDict):
    """A mapping that is no dict; registered below, so that a traced step may return it."""


jax.tree_util.register_pytree_with_keys(
    Frozen,
    lambda tree: (
        [(jax.tree_util.DictKey(key), value) for key, value in tree.data.items()],
        tuple(tree.data),
    ),
    lambda keys, values: Frozen(zip(keys, values, strict=True)),
)

KINDS = {
    "dict": lambda metrics: metrics,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": lambda metrics: collections.defaultdict(float, metrics),
    "Mapping": Frozen,
    "nested Mapping": lambda metrics: metrics | {"world": Frozen(metrics["world"])},
}
MAKERS = {"TrainStep": jstep.TrainStep, "jax.jit": jax.jit, "not compiled": lambda step: step}


def rows_of(step, steps_per_call=1):
    rows = []
    seen = []
    hooks = [
        jstep.MetricsHook(lambda step, row: rows.append(row), every_n_steps=2),
        jstep.every(2, lambda step, state, metrics: seen.append((type(metrics), set(metrics)))),
    ]
    state = jstep.TrainState.create({"w": jnp.zeros(4)}, OPTIMIZER)
    jstep.train(
        step,
        state,
        lambda n: np.ones(4, np.float32),
        4,
        log_steps=None,
        hooks=hooks,
        steps_per_call=steps_per_call,
    )
    return rows, seen


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_mapping_reaches_hooks_as_a_flat_dict(kind, make, steps_per_call):
    if steps_per_call == 4 and make == "not compiled":
        make = "TrainStep"

    def step(state, x):
        state, metrics = UPDATE(state, x)
        return state, KINDS[kind](nested(metrics["loss"]))

    rows, seen = rows_of(MAKERS[make](step), steps_per_call)
    names = {"loss", "world/kl", "world/parts/a", "rate"}
    # The step shows the hyperparameters of the optimizer that it calls, too; rows have what
    # changes, and rates.
    assert seen == [(dict, names | {"learning_rate", "momentum", "dampening", "weight_decay"})] * 2
    assert [set(row) for row in rows] == [names | {"learning_rate"}] * 2
    assert rows[1]["world/parts/a"] == pytest.approx(2 * rows[1]["loss"])


def test_aux_of_minimize_is_flattened():
    def loss_fn(params, x):
        loss = jnp.mean((params["w"] - x) ** 2)
        return loss, Frozen({"world": {"kl": loss}})

    step = jstep.minimize(loss_fn, OPTIMIZER, has_aux=True, donate=False)
    state = jstep.TrainState.create({"w": jnp.zeros(4)}, OPTIMIZER)
    _, metrics = step(state, jnp.ones(4))
    assert metrics["world/kl"] == metrics["loss"]
    several = jstep.minimize({"model": (loss_fn, "w")}, OPTIMIZER, has_aux=True, donate=False)
    _, metrics = several(state, jnp.ones(4))
    assert metrics["model/world/kl"] == metrics["loss"]
    _, stacked = jstep.scan_steps(step)(state, jnp.ones((3, 4)))
    assert stacked["world/kl"].shape == (3,)


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("make", MAKERS)
def test_two_metrics_of_one_name_are_an_error(make, steps_per_call):
    def step(state, x):
        state, metrics = UPDATE(state, x)
        return state, {"world/kl": metrics["loss"], "world": {"kl": metrics["loss"]}}

    with pytest.raises(ValueError, match="two have the name 'world/kl'"):
        rows_of(MAKERS[make](step), steps_per_call)


def test_aux_with_the_name_of_a_hyperparameter_is_an_error():
    optimizer = jstep.partition({"head": jstep.sgd(0.1)}, lambda path, leaf: "head")

    def loss_fn(params):
        return jnp.sum(params["w"]), {"head": {"learning_rate": 1.0}}

    state = jstep.TrainState.create({"w": jnp.zeros(4)}, optimizer)
    with pytest.raises(ValueError, match="head/learning_rate"):
        jstep.minimize(loss_fn, optimizer, has_aux=True)(state)
