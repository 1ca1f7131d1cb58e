"""Slots that begin as copies of parameters: a partial restore without them copies what it restored."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    "chain": (jstep.chain(jstep.clip_gradients(by_norm=1.0), jstep.schedule_free_sgd(0.1)), "z"),
    "guarded": (jstep.skip_nonfinite(jstep.with_moving_average(base(), EMA)), AVERAGE),
    "deep": (
        jstep.dynamic_loss_scale(jstep.update_every(2, jstep.scope("s", jstep.lookahead(base())), accumulate=True)),
        "s/slow",
    ),
    "late": (
        jstep.with_moving_average(base(), jstep.ExponentialMovingAverage(0.5, zero_debias=True, start_step=9)),
        AVERAGE,
    ),
    "initial": (jstep.madgrad(0.1), "initial"),
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


def test_the_log_says_so(saver, caplog):
    save(saver).restore(target_of(jstep.lookahead(base())), partial=True)
    assert "started as copies of what was restored (2): 'slots/slow/a', 'slots/slow/b/c'" in caplog.text
    assert "left unchanged in target (1): 'slots/start_step'" in caplog.text
    assert "Fresh slots meet an old age" not in caplog.text


def test_a_missing_copy_is_still_an_error_without_partial(saver):
    with pytest.raises(ValueError, match=r"missing in the checkpoint \(2\): 'slots/master/a', 'slots/master/b/c'"):
        save(saver).restore(target_of(jstep.master_weights(base())))


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


def test_what_is_in_the_checkpoint_is_restored(saver):
    optimizer = jstep.master_weights(base())
    state = target_of(optimizer, 10.0)
    masters = jax.tree.map(lambda x: x + 0.001, state.slots["master"])
    saver.save(state.replace(slots={"master": masters}))
    back = saver.restore(target_of(jstep.master_weights(jstep.lookahead(base()))), partial=True)
    assert values_of(back.slots["master"]) == values_of(masters)
    # Inside master_weights, the masters are the parameters.
    assert values_of(back.slots["slow"]) == values_of(masters)


def test_parameters_that_are_not_restored_keep_their_copies(saver):
    optimizer = jstep.master_weights(base())
    target = jstep.TrainState.create(params_of(2.0) | {"head": jnp.full(2, 3.0, "bfloat16")}, optimizer)
    target = target.replace(slots={"master": jax.tree.map(lambda x: x + 0.001, target.slots["master"])})
    back = save(saver).restore(target, partial=True)
    assert values_of({**back.slots["master"], "head": None}) == {10.0}
    assert values_of(back.slots["master"]["head"]) == values_of(target.slots["master"]["head"])


def test_a_copy_of_another_shape_or_dtype_is_not_used(saver):
    state = target_of(jstep.master_weights(base()), 10.0)
    half = jax.tree.map(lambda x: (x + 1).astype("bfloat16"), state.slots["master"])
    saver.save(state.replace(slots={"master": half}))
    back = saver.restore(target_of(jstep.master_weights(base())), partial=True)
    assert values_of(back.slots["master"]) == {10.0}


def test_renamed_parameters(saver):
    target = jstep.TrainState.create({"new": jnp.zeros((4, 2), "bfloat16")}, jstep.master_weights(base()))
    back = save(saver).restore(target, partial=True, names={"params/new": "params/a"})
    assert values_of(back.params) == values_of(back.slots["master"]) == {10.0}


def test_averages_in_place_of_parameters(saver):
    averaging = jstep.with_moving_average(base(), EMA)
    state = target_of(averaging, 10.0)
    state = state.replace(slots={AVERAGE: jax.tree.map(lambda x: x / 2, state.slots[AVERAGE])})
    saver.save(state)
    back = saver.restore(target_of(jstep.master_weights(base())), partial=True, use_averages=True)
    assert values_of(back.slots["master"]) == {5.0}


def test_leaves_that_were_left_out_come_from_the_target(tmp_path):
    with Saver(tmp_path, leave_out="a") as saver:
        back = save(saver).restore(target_of(jstep.master_weights(base()), 2.0), partial=True)
    assert values_of(back.slots["master"]["a"]) == {2.0}
    assert values_of(back.slots["master"]["b"]) == {10.0}


def test_custom_optimizers(saver):
    """A copy is recognized where `init` is traced, or declared."""

    def update(updates, slots, params, step):
        return jax.tree.map(lambda g: -g, updates), slots

    def traced(params, global_step=0):
        return {
            "slow": jstep.map_leaves(lambda path, p: p.astype("float32").copy(), params),
            "zero": jstep.map_leaves(lambda path, p: p - p, params),
            "other": {"first": jnp.array(params["a"])},
        }

    def concrete(params, global_step=0):
        assert bool(params["b"]["n"] == 3)
        return traced(params)

    def declared(params, global_step=0):
        return concrete(params)

    declared.copies = ("slow",)
    for init, want in ((traced, 10.0), (concrete, 0.0), (declared, 10.0)):
        optimizer = jstep.scope("mine", jstep.Optimizer(init, update, lambda step: {}))
        back = save(saver).restore(target_of(optimizer), partial=True)
        assert values_of(back.slots["mine/slow"]) == {want}, init.__name__
        assert values_of(back.slots["mine/zero"]) == values_of(back.slots["mine/other"]) == {0.0}
        saver.delete(STEP)


def test_optax(saver):
    """The states of Optax that are copies of the parameters are found by tracing its `init`."""
    optimizer = jstep.from_optax(optax.contrib.schedule_free(optax.sgd(0.1), 0.1))
    back = save(saver).restore(target_of(optimizer), partial=True)
    assert values_of(back.slots["optax/z"]) == {10.0}
    optimizer = jstep.from_optax(optax.contrib.prodigy())
    back = saver.restore(target_of(optimizer), partial=True)
    copies = [name for name in jstep.get_slot_names(back) if values_of(back.slots[name]) == {10.0}]
    assert copies == ["optax/params0"]


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


def test_numpy_leaves_and_several_states(saver):
    optimizer = jstep.master_weights(base())
    state = {"one": target_of(base(), 10.0), "two": target_of(base(), 20.0), "global_step": jnp.int32(STEP)}
    saver.save(state)
    host = jax.tree.map(np.asarray, target_of(optimizer))
    back = saver.restore({**state, "one": host, "two": target_of(optimizer)}, partial=True)
    assert isinstance(back["one"].slots["master"]["a"], np.ndarray)
    assert values_of(back["one"].slots["master"]) == {10.0}
    assert values_of(back["two"].slots["master"]) == {20.0}


def test_a_population(saver):
    optimizer = jstep.lookahead(base())

    def make(value, optimizer):
        return jstep.TrainState.create({"w": jnp.full(3, value)}, optimizer, global_step=STEP)

    saver.save(jax.vmap(lambda value: make(value, base()))(jnp.array([1.0, 2.0])), step=STEP)
    target = jax.vmap(lambda value: make(value, optimizer))(jnp.zeros(2))
    back = saver.restore(target, partial=True)
    assert back.slots["slow"]["w"].tolist() == [[1.0] * 3, [2.0] * 3]


def test_states_with_and_without_copies_have_one_structure():
    copies = jstep.with_moving_average(base(), EMA)
    own = jstep.with_moving_average(base(), EMA, initial=params_of(1.0))
    assert jax.tree.structure(target_of(copies)) == jax.tree.structure(target_of(own))
