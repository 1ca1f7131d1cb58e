"""Slots that begin as copies of parameters: a partial restore without them copies what it restored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jstep
from jstep.checkpoint.saver import Saver

EMA = jstep.ExponentialMovingAverage(0.5)
AVERAGE = EMA.name
STEP = 7


def base():
    return jstep.gradient_descent(0.1)


def params_of(value, dtype="bfloat16"):
    return {"a": jnp.full((4, 2), value, dtype), "b": {"c": jnp.full(3, value, "float32"), "n": jnp.array(3)}}


@pytest.fixture
def saver(tmp_path):
    with Saver(tmp_path) as saver:
        yield saver


def save(saver, optimizer=None, value=10.0):
    saver.save(jstep.TrainState.create(params_of(value), optimizer or base(), global_step=STEP))
    return saver


def target_of(optimizer, value=0.0):
    return jstep.TrainState.create(params_of(value), optimizer, global_step=STEP)


def values_of(slot):
    return {float(x) for leaf in jax.tree.leaves(slot) for x in np.asarray(leaf, np.float32).ravel()}


WRAPPED = {
    "masters": (jstep.master_weights(base()), "master"),
    "scope": (jstep.scope("all", jstep.lookahead(base())), "all/slow"),
    "label": (
        jstep.partition({"x": jstep.master_weights(base()), "x/y": base()}, lambda path, leaf: "x"),
        "x/master",
    ),
    "deep": (
        jstep.dynamic_loss_scale(jstep.update_every(2, jstep.scope("s", jstep.lookahead(base())), accumulate=True)),
        "s/slow",
    ),
    "late": (
        jstep.with_moving_average(base(), jstep.ExponentialMovingAverage(0.5, zero_debias=True, start_step=9)),
        AVERAGE,
    ),
    "leafwise": (jstep.leafwise(lambda g, p, s, h: (-g, {}), hyper={}, slots={"first": jstep.Slot("copy")}), "first"),
}


@pytest.mark.thorough(except_for=["scope-True", "label-False", "late-False"])
@pytest.mark.parametrize("abstract", [False, True])
@pytest.mark.parametrize("name", WRAPPED)
def test_under_wrappers(saver, name, abstract):
    optimizer, slot = WRAPPED[name]
    target = target_of(optimizer)
    if abstract:  # only the leaves that nothing is restored into need values
        slots = {
            other: jax.eval_shape(lambda t: t, tree) if other == slot else tree for other, tree in target.slots.items()
        }
        target = jax.eval_shape(lambda: target).replace(slots=slots)
    back = save(saver).restore(target, partial=True)
    assert values_of(back.slots[slot]) == {10.0}
    assert {leaf.dtype for leaf in jax.tree.leaves(back.slots[slot])} == {jnp.dtype("float32")}
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(back)  # no buffer is there twice


def test_slots_that_do_not_begin_as_copies_are_kept(saver):
    def ones(params):
        return jax.tree.map(jnp.ones_like, params)

    for ema, initial, kept in (
        (EMA, ones, 1.0),
        (jstep.ExponentialMovingAverage(0.5, zero_debias=True), None, 0.0),
    ):
        optimizer = jstep.with_moving_average(base(), ema, initial=initial)
        back = save(saver).restore(target_of(optimizer), partial=True)
        assert values_of(back.slots[AVERAGE]) == {kept}
        saver.delete(STEP)


def test_parameters_that_are_not_restored_keep_their_copies(saver):
    optimizer = jstep.master_weights(base())
    target = jstep.TrainState.create(params_of(2.0) | {"head": jnp.full(2, 3.0, "bfloat16")}, optimizer)
    target = target.replace(slots={"master": jax.tree.map(lambda x: x + 0.001, target.slots["master"])})
    back = save(saver).restore(target, partial=True)
    assert values_of({**back.slots["master"], "head": None}) == {10.0}
    assert values_of(back.slots["master"]["head"]) == values_of(target.slots["master"]["head"])


@pytest.mark.parametrize("slots_memory", [None, "pinned_host"])
def test_copies_are_sharded_like_the_slot(saver, slots_memory):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    optimizer = jstep.master_weights(jstep.lookahead(base()))
    target = jstep.shard_state(target_of(optimizer), mesh, slot_axis="data", slots_memory=slots_memory)
    back = save(saver).restore(target, partial=True)
    split = NamedSharding(mesh, PartitionSpec("data"), memory_kind=slots_memory)
    for name in ("master", "slow"):
        assert back.slots[name]["a"].sharding.is_equivalent_to(split, 2)
        assert back.slots[name]["a"].sharding.memory_kind == target.slots[name]["a"].sharding.memory_kind
        assert values_of(back.slots[name]) == {10.0}
