"""Slots of few parameters are stored without a None for each of the others, and nobody sees it."""

import dataclasses
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jstep
from jstep.state import packed_slots

COUNT = 40


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Fields:
    """A class whose fields are not in alphabetical order."""

    zeta: object
    alpha: object


def as_dict(leaves):
    return {f"l{i:02d}": leaf for i, leaf in enumerate(leaves)}


def as_nested(leaves):
    return {"b": {f"l{i:02d}": {"w": leaf} for i, leaf in enumerate(leaves)}, "a/b": {"n": None}}


def as_fields(leaves):
    half = len(leaves) // 2
    return Fields(zeta=list(leaves[:half]), alpha=tuple(leaves[half:]))


MAKERS = [as_dict, as_nested, as_fields]


def new_params(make=as_dict, count=COUNT):
    return make([np.arange(4.0, dtype=np.float32) + i for i in range(count)])


def partition_of(params, optimizer=None):
    """Return a partition with a label for each leaf."""
    labels = [path for path, _ in jstep_paths(params)]
    parts = {label: optimizer or jstep.momentum(0.1, 0.9) for label in labels}
    return jstep.partition(parts, lambda path, leaf: path)


def jstep_paths(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(keys, simple=True, separator="/"), leaf) for keys, leaf in leaves]


def loss_fn(params, x):
    return sum(jnp.sum((leaf - x) ** 2) for leaf in jax.tree.leaves(params))


def trained(state, optimizer, steps=3):
    train_step = jstep.minimize(loss_fn, optimizer)
    for step in range(steps):
        state, _ = train_step(state, jnp.float32(step))
    return state


def nodes_of(tree):
    return len(jax.tree.leaves(tree, is_leaf=lambda node: node is None))


def test_nodes_of_a_state_grow_with_its_leaves():
    counts = []
    for count in (40, 160):
        params = new_params(count=count)
        counts.append(nodes_of(jstep.TrainState.create(params, partition_of(params))))
    assert math.log(counts[1] / counts[0], 4) < 1.1


@pytest.mark.parametrize("make", MAKERS)
def test_slots_have_the_structure_of_the_parameters(make):
    params = new_params(make)
    state = jstep.TrainState.create(params, partition_of(params))
    paths = [path for path, _ in jstep_paths(params)]
    assert len(state.slots) == COUNT
    for path in paths:
        slot = state.slots[f"{path}/momentum"]
        leaves = jax.tree.structure(params).flatten_up_to(slot)
        assert [i for i, leaf in enumerate(leaves) if leaf is not None] == [paths.index(path)]
        assert jstep.get_slot(state, f"{path}/momentum", path) is leaves[paths.index(path)]


@pytest.mark.parametrize("make", MAKERS)
def test_paths_and_order_of_leaves_are_those_of_whole_slots(monkeypatch, make):
    params = new_params(make)
    packed = jstep.TrainState.create(params, partition_of(params))
    monkeypatch.setattr(packed_slots, "MIN_ABSENT", 10**9)
    whole = jstep.TrainState.create(params, partition_of(params))
    assert nodes_of(whole) > 10 * nodes_of(packed)
    assert [path for path, _ in jstep_paths(packed)] == [path for path, _ in jstep_paths(whole)]
    assert repr(packed) == repr(whole)


def test_a_run_is_the_same_bits_as_with_whole_slots(monkeypatch):
    params = new_params()
    results = []
    for least in (packed_slots.MIN_ABSENT, 10**9):
        monkeypatch.setattr(packed_slots, "MIN_ABSENT", least)
        optimizer = partition_of(params)
        state = trained(jstep.TrainState.create(params, optimizer), optimizer)
        results.append({path: np.asarray(leaf).tobytes() for path, leaf in jstep_paths(state)})
    assert results[0] == results[1]


@pytest.mark.parametrize("make", MAKERS)
def test_a_step_compiles_once_for_states_made_in_different_ways(make):
    params = new_params(make)
    optimizer = partition_of(params)
    state = jstep.TrainState.create(params, optimizer)
    traces = []

    @jax.jit
    def step(state):
        traces.append(None)
        return state.replace(global_step=state.global_step + 1)

    again = jstep.TrainState.create(params, optimizer)
    by_hand = jstep.TrainState(state.params, state.slots, state.global_step, state.roles)
    copied = jax.tree.map(lambda leaf: leaf, state)
    for other in (state, again, by_hand, copied, step(state), state.replace(slots=state.slots)):
        assert jax.tree.structure(other) == jax.tree.structure(state)
        step(other)
    assert len(traces) == 1
    assert state == again == by_hand
    changed = state.slots
    changed.pop(next(iter(changed)))
    assert jax.tree.structure(state.replace(slots=changed)) != jax.tree.structure(state)


def test_checkpoints_have_the_names_of_whole_slots(tmp_path, monkeypatch):
    """Each restores the other."""
    params = new_params()
    optimizer = partition_of(params)
    states = {}
    for name, least in (("packed", packed_slots.MIN_ABSENT), ("whole", 10**9)):
        monkeypatch.setattr(packed_slots, "MIN_ABSENT", least)
        states[name] = trained(jstep.TrainState.create(params, optimizer), optimizer)
        with jstep.Saver(tmp_path / name) as saver:
            saver.save(states[name])
    for least, path in ((32, "whole"), (10**9, "packed")):
        monkeypatch.setattr(packed_slots, "MIN_ABSENT", least)
        with jstep.Saver(tmp_path / path) as saver:
            restored = saver.restore(jstep.TrainState.create(params, optimizer))
        expected = [
            (path, np.asarray(leaf).tolist()) for path, leaf in jstep_paths(states["packed"])
        ]
        found = [(path, np.asarray(leaf).tolist()) for path, leaf in jstep_paths(restored)]
        assert found == expected


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_packed_slots_are_sharded_like_their_parameters(kind):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    params = new_params()
    optimizer = partition_of(params)
    state = jstep.TrainState.create(params, optimizer, mesh=mesh, param_specs=PartitionSpec("data"))
    by_shard_state = jstep.shard_state(
        jstep.TrainState.create(params, optimizer), mesh, PartitionSpec("data")
    )
    for sharded in (state, by_shard_state, trained(state, optimizer, 1)):
        for name in ("l00", "l39"):
            assert sharded.slots[f"{name}/momentum"][name].sharding.spec == PartitionSpec("data")


def test_states_are_copied_mapped_and_vmapped():
    params = new_params()
    optimizer = partition_of(params)
    state = trained(jstep.TrainState.create(params, optimizer), optimizer, 1)
    again = pickle.loads(pickle.dumps(state))
    assert again == state
    nothing = jax.tree.map(lambda leaf: None, state)
    assert nothing.slots["l00/momentum"]["l00"] is None
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), state, state)
    moved = jax.vmap(lambda state: state.slots["l07/momentum"]["l07"])(stacked)
    assert (moved[1] == state.slots["l07/momentum"]["l07"]).all()
    abstract = jax.eval_shape(lambda: jstep.TrainState.create(params, optimizer))
    assert jax.tree.structure(abstract) == jax.tree.structure(state)


def test_frozen_leaves_and_wrappers():
    params = new_params()
    parts = {"first": jstep.adam(0.1), "second": jstep.momentum(0.1, 0.9)}
    labels = {"l00": "first", "l01": "second"}
    optimizer = jstep.with_moving_average(
        jstep.skip_nonfinite(jstep.partition(parts, lambda path, leaf: labels.get(path))),
        jstep.ExponentialMovingAverage(0.5),
    )
    state = trained(jstep.TrainState.create(params, optimizer), optimizer)
    assert (state.params["l05"] == params["l05"]).all()
    assert not (state.params["l00"] == params["l00"]).all()
    assert sum(leaf is not None for leaf in state.slots["first/m"].values()) == 1
    assert jax.tree.structure(state) == jax.tree.structure(
        jstep.TrainState.create(params, optimizer)
    )


@pytest.mark.parametrize("make", [as_dict, as_nested])
def test_a_state_of_shardings_is_a_prefix(make):
    params = new_params(make)
    optimizer = partition_of(params)
    state = jstep.TrainState.create(params, optimizer)
    one = jax.sharding.NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec())
    by_slot = dict.fromkeys(state.slots, one)
    by_child = dict.fromkeys(state.slots, dict.fromkeys(params, one))
    for slots in (one, by_slot, by_child):
        prefix = state.replace(params=one, slots=slots, global_step=one)
        step = jax.jit(lambda state: state, in_shardings=(prefix,), out_shardings=prefix)
        assert step(state) == state
        replaced = state.replace(params=one).replace(slots=slots, global_step=one)
        assert jax.tree.structure(replaced) == jax.tree.structure(prefix)


def test_arrays_of_more_leaves_stay_in_a_slot():
    params = new_params()
    state = jstep.TrainState.create(params, partition_of(params))
    changed = state.replace(slots=dict.fromkeys(state.slots, params))
    assert len(jax.tree.leaves(changed.slots["l00/momentum"])) == COUNT
