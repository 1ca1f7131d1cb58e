"""Restore converts step counters between 32 and 64 bits, and initializes the slots of a guard added
later."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jstep
from jstep.checkpoint.saver import Saver

ADAM = jstep.adam(0.1)


def _state(optimizer, step=0, params=None):
    return jstep.TrainState.create(
        params or {"a": jnp.ones(3, jnp.float32)}, optimizer, global_step=step
    )


def _save(directory, state):
    saver = jstep.Saver(directory, async_save=False)
    saver.save(state)
    return saver


@pytest.mark.parametrize("partial", [False, True])
def test_step_counters_convert_both_ways(tmp_path, partial):
    saver = _save(tmp_path / "32", _state(ADAM, 6))
    with jax.enable_x64(True):
        wide = saver.restore(_state(ADAM), partial=partial)
        assert (wide.global_step.dtype, int(wide.global_step)) == (jnp.int64, 6)
        assert (wide.slots["start_step"].dtype, int(wide.slots["start_step"])) == (jnp.int64, 6)
        other = _save(tmp_path / "64", wide)
    narrow = other.restore(_state(ADAM), partial=partial)
    assert (narrow.global_step.dtype, int(narrow.global_step)) == (jnp.int32, 6)
    assert (narrow.slots["start_step"].dtype, int(narrow.slots["start_step"])) == (jnp.int32, 6)


def test_a_step_that_overflows_32_bits_is_an_error(tmp_path):
    with jax.enable_x64(True):
        saver = _save(tmp_path, _state(ADAM).replace(global_step=jnp.asarray(2**40)))
    with pytest.raises(
        ValueError,
        match=r"'global_step' is int32 and cannot represent 1099511627776; enable jax_enable_x64",
    ):
        saver.restore(_state(ADAM))


def test_weights_never_convert(tmp_path):
    params = {
        "n": jnp.int32(7),
        "table": jnp.arange(3, dtype=jnp.int32),
        "a": jnp.ones(3, jnp.float32),
    }
    saver = _save(tmp_path, _state(ADAM, 6, params))
    with jax.enable_x64(True):
        for name in ("n", "table"):
            target = _state(ADAM, 0, params | {name: params[name].astype(jnp.int64)})
            with pytest.raises(ValueError, match=rf"params/{name}' \(int32\[.*int64"):
                saver.restore(target)
        with pytest.raises(ValueError, match=r"differing .*'slots/m/a'"):
            saver.restore(_state(ADAM, 0, params | {"a": jnp.ones(3, jnp.float64)}))


def test_a_partial_restore_requires_a_step_that_fits(tmp_path):
    saver = _save(tmp_path, _state(ADAM, 6))
    target = {"global_step": jnp.zeros(2, jnp.int32), "params": {"a": jnp.zeros(3)}}
    with pytest.raises(
        ValueError,
        match=r"no global_step that fits.*int32\[2\] in target.*without a step",
    ):
        saver.restore(target, partial=True)
    assert saver.restore({"params": {"a": jnp.zeros(3)}}, partial=True)["params"]["a"].tolist() == [
        1,
        1,
        1,
    ]


GUARDS = {
    "skip": jstep.skip_nonfinite(ADAM),
    "scale": jstep.dynamic_loss_scale(ADAM, initial=8.0),
    "both": jstep.dynamic_loss_scale(jstep.skip_nonfinite(ADAM), initial=8.0),
    "scope": jstep.scope(jstep.skip_nonfinite(jstep.gradient_descent(0.1)), "x/y"),
}


@pytest.mark.thorough(except_for=["False-both", "True-scale"])
@pytest.mark.parametrize("name", GUARDS)
@pytest.mark.parametrize("abstract", [False, True])
def test_a_guard_added_later(tmp_path, caplog, name, abstract):
    plain = _state(jstep.gradient_descent(0.1) if name == "scope" else ADAM, 6)
    saver = _save(tmp_path, plain)
    target = _state(GUARDS[name])
    if abstract and name in ("scale", "both"):  # shapes have no initial loss scale
        with pytest.raises(ValueError, match=r"loss_scale'.* must have a value, got a shape"):
            saver.restore(jax.eval_shape(lambda: target))
        return
    with caplog.at_level(logging.INFO, "jstep"):
        restored = saver.restore(jax.eval_shape(lambda: target) if abstract else target)
    assert restored.global_step == 6
    assert {one.levelname for one in caplog.records} == {"INFO"}
    assert "saved without a guard" in caplog.text
    fresh = {slot for slot in restored.slots if slot not in plain.slots}
    assert fresh
    for slot in fresh:
        assert restored.slots[slot] == (8.0 if slot.endswith("loss_scale") else 6)
    updated = jstep.apply_gradients(
        restored, {"a": jnp.full(3, jnp.nan)}, GUARDS[name], scaled=True
    )
    assert updated.params["a"].tolist() == [1, 1, 1]


EMA = jstep.ExponentialMovingAverage(0.5, zero_debias=True)


def loss(params):
    return jnp.sum((params["w"] - 1.0) ** 2)


@pytest.mark.thorough(except_for=["own age-a/b", "sgd-None"])
@pytest.mark.parametrize("scope", [None, "a/b"])
@pytest.mark.parametrize(
    "inner",
    [jstep.gradient_descent(0.1), jstep.update_every(jstep.adam(0.1), 2)],
    ids=["sgd", "own age"],
)
def test_restore_averages_into_a_plain_state(tmp_path, inner, scope):
    averaged = jstep.with_moving_average(inner, EMA)
    optimizer = jstep.scope(averaged, scope) if scope else averaged
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
    step = jstep.minimize(loss, optimizer)
    for _ in range(3):
        state, _ = step(state)
    slot = f"{scope}/{EMA.name}" if scope else EMA.name
    with jstep.Saver(tmp_path) as saver:
        saver.save(state)
    plain = jstep.TrainState.create(
        {"w": jnp.zeros(3)}, jstep.scope(inner, scope) if scope else inner
    )
    restored = jstep.Saver(tmp_path).restore(plain, use_averages=slot)
    np.testing.assert_array_equal(restored.params["w"], state.slots[slot]["w"])


# Slots that begin as copies of parameters: a partial restore without them copies what it restored.

EMA_COPIED = jstep.ExponentialMovingAverage(0.5)
AVERAGE = EMA_COPIED.name
STEP = 7


def base():
    return jstep.gradient_descent(0.1)


def params_of(value, dtype="bfloat16"):
    return {
        "a": jnp.full((4, 2), value, dtype),
        "b": {"c": jnp.full(3, value, "float32"), "n": jnp.array(3)},
    }


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
    return {
        float(x) for leaf in jax.tree.leaves(slot) for x in np.asarray(leaf, np.float32).ravel()
    }


WRAPPED = {
    "masters": (jstep.master_weights(base()), "master"),
    "scope": (jstep.scope(jstep.lookahead(base()), "all"), "all/slow"),
    "label": (
        jstep.partition({"x": jstep.master_weights(base()), "x/y": base()}, lambda path, leaf: "x"),
        "x/master",
    ),
    "deep": (
        jstep.dynamic_loss_scale(
            jstep.update_every(jstep.scope(jstep.lookahead(base()), "s"), 2, accumulate=True)
        ),
        "s/slow",
    ),
    "late": (
        jstep.with_moving_average(
            base(), jstep.ExponentialMovingAverage(0.5, zero_debias=True, start_step=9)
        ),
        AVERAGE,
    ),
    "leafwise": (
        jstep.leafwise(lambda g, p, s, h: (-g, {}), hyper={}, slots={"first": jstep.Slot("copy")}),
        "first",
    ),
}


@pytest.mark.thorough(except_for=["scope-True", "label-False"])
@pytest.mark.parametrize("abstract", [False, True])
@pytest.mark.parametrize("name", WRAPPED)
def test_under_wrappers(saver, name, abstract):
    optimizer, slot = WRAPPED[name]
    target = target_of(optimizer)
    if abstract:  # only the leaves that nothing is restored into need values
        slots = {
            other: jax.eval_shape(lambda t: t, tree) if other == slot else tree
            for other, tree in target.slots.items()
        }
        target = jax.eval_shape(lambda: target).replace(slots=slots)
    back = save(saver).restore(target, partial=True)
    assert values_of(back.slots[slot]) == {10.0}
    assert {leaf.dtype for leaf in jax.tree.leaves(back.slots[slot])} == {jnp.dtype("float32")}
    # No buffer is there twice.
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(back)


def test_slots_that_do_not_begin_as_copies_are_kept(saver):
    def ones(params):
        return jax.tree.map(jnp.ones_like, params)

    for ema, initial, kept in (
        (EMA_COPIED, ones, 1.0),
        (jstep.ExponentialMovingAverage(0.5, zero_debias=True), None, 0.0),
    ):
        optimizer = jstep.with_moving_average(base(), ema, initial=initial)
        back = save(saver).restore(target_of(optimizer), partial=True)
        assert values_of(back.slots[AVERAGE]) == {kept}
        saver.delete(STEP)


def test_parameters_that_are_not_restored_keep_their_copies(saver):
    optimizer = jstep.master_weights(base())
    target = jstep.TrainState.create(
        params_of(2.0) | {"head": jnp.full(2, 3.0, "bfloat16")}, optimizer
    )
    target = target.replace(
        slots={"master": jax.tree.map(lambda x: x + 0.001, target.slots["master"])}
    )
    back = save(saver).restore(target, partial=True)
    assert values_of({**back.slots["master"], "head": None}) == {10.0}
    assert values_of(back.slots["master"]["head"]) == values_of(target.slots["master"]["head"])


@pytest.mark.thorough(except_for=["None"])
@pytest.mark.parametrize("slots_memory", [None, "pinned_host"])
def test_copies_are_sharded_like_the_slot(saver, slots_memory):
    mesh = jax.make_mesh(
        (2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,)
    )
    optimizer = jstep.master_weights(jstep.lookahead(base()))
    target = jstep.shard_state(
        target_of(optimizer), mesh, slot_axis="data", slots_memory=slots_memory
    )
    back = save(saver).restore(target, partial=True)
    split = NamedSharding(mesh, PartitionSpec("data"), memory_kind=slots_memory)
    for name in ("master", "slow"):
        assert back.slots[name]["a"].sharding.is_equivalent_to(split, 2)
        assert (
            back.slots[name]["a"].sharding.memory_kind
            == target.slots[name]["a"].sharding.memory_kind
        )
        assert values_of(back.slots[name]) == {10.0}
