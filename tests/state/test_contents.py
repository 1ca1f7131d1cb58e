"""What a state holds, in words: NaN and infinity."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jstep
from jstep.state import nonfinite as contents
from jstep.state.leaves import StateLeaves
from jstep.state.nonfinite import FINITE, INFINITE, NAN, StateContents, describe_contents
from jstep.state.sharding import put_leaf


def state_of(**slots):
    params = {"n": np.arange(2), "w": jnp.ones(2), "x": np.float32([1, 2])}
    return {
        "params": params,
        "slots": slots | {"model_state": {"m": jnp.float32(np.nan)}},
        "other": np.nan,
    }


@pytest.mark.parametrize("read_cpus", [True, False])
def test_the_contents_of_a_state_and_what_became_worse(read_cpus):
    nan, inf = np.nan, np.inf
    before = StateContents(
        state_of(a={"w": jnp.float32([1, inf])}, b=jnp.float32(nan)), read_cpus=read_cpus
    )
    assert before.contents() == {
        "params/w": FINITE,
        "params/x": FINITE,
        "slots/a/w": INFINITE,
        "slots/b": NAN,
    }
    assert before.paths_with_nan() == ["slots/b"]
    assert not before.are_finite()
    assert before.worse_since(None) == ({"slots/b": NAN}, ["slots/a/w"])
    state = state_of(a={"w": jnp.float32([-inf, nan])}, b=jnp.float32(nan), c=np.float32([inf]))
    state["params"]["w"], state["params"]["x"] = jnp.float32([inf, 0]), np.float32([nan, inf])
    after = StateContents(state, read_cpus=read_cpus)
    assert after.worse_since(before) == (
        {"params/w": INFINITE, "params/x": NAN, "slots/a/w": NAN},
        ["slots/c"],
    )
    assert StateContents(state, params_only=True, read_cpus=read_cpus).contents() == {
        "params/w": INFINITE,
        "params/x": NAN,
    }
    leaves = StateLeaves(state)
    assert StateContents(leaves, read_cpus=read_cpus).contents() == after.contents()
    assert set(StateContents(leaves, params_only=True).contents()) == {"params/w", "params/x"}
    assert StateContents({}).contents() == {}
    assert StateContents(jstep.TrainState.create({"w": 1.0}, jstep.adam())).are_finite()


@pytest.mark.parametrize("count", [10, 40, 600])
def test_any_number_of_leaves_takes_few_programs_and_one_reduction(count, monkeypatch):
    """Each waits until few enough are running: JAX's CPU client hangs where too many communicate at
    once."""
    running, most, reductions = [], [], []
    check, reduce = contents._check_locally, contents._worst_of_devices

    class Running:
        def __init__(self, mesh, leaves):
            self.rows = check(mesh, leaves)
            running.append(self)
            most.append(len(running))

        def block_until_ready(self):
            running.remove(self)

    def reduced(mesh, parts):
        reductions.append(len(parts))
        return reduce(mesh, [part.rows for part in parts])

    monkeypatch.setattr(contents, "_check_locally", Running)
    monkeypatch.setattr(contents, "_worst_of_devices", reduced)
    monkeypatch.setattr(contents, "_TOGETHER", 2)
    mesh = jax.make_mesh((8,), ("data",))
    split, whole = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("data", None))
    values = [np.full(8, np.nan if i == 7 else 1.0, np.float32) for i in range(count)]
    params = {
        f"{i}": jax.device_put(value, [split, whole][i % 2]) for i, value in enumerate(values)
    }
    found = StateContents({"params": params}, read_cpus=False)
    assert found.paths_with_nan() == ["params/7"]
    assert max(most) <= 16
    assert len(reductions) == 1
    assert reductions[0] <= 2 * 17


def test_leaves_that_are_not_finite_in_words():
    assert describe_contents({}) == ""
    assert describe_contents({"a": INFINITE}) == "a contains infinity"
    assert describe_contents({"a": INFINITE, "b": NAN}) == "a and 1 more contain NaN"


def test_the_error_of_a_loss_that_is_not_finite_can_be_copied():
    error = contents.NanLossDuringTrainingError("the loss is NaN", 7, may_save=True)
    for again in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(again), again.step, again.may_save) == ("the loss is NaN", 7, True)
    assert not contents.NanLossDuringTrainingError("", 1).may_save


def test_a_leaf_of_several_processes_is_made_of_the_parts_of_each(monkeypatch):
    mesh = jax.make_mesh((8,), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    key = jax.random.split(jax.random.key(3), 8)
    monkeypatch.setattr(NamedSharding, "is_fully_addressable", False)
    asked = []
    made = jax.make_array_from_callback
    monkeypatch.setattr(
        jax,
        "make_array_from_callback",
        lambda shape, *rest: asked.append(shape) or made(shape, *rest),
    )
    values, keys = put_leaf(np.arange(8.0, dtype=np.float32), split), put_leaf(key, split)
    monkeypatch.undo()
    assert asked == [(8,), (8, 2)]
    assert (values.sharding, values.tolist()) == (split, list(range(8)))
    assert jax.random.key_data(keys).tolist() == jax.random.key_data(key).tolist()
