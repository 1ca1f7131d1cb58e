"""Leaves of unusual kinds: each is saved and restored as it was, or refused with its path and what
to do."""

import dataclasses
import json
import logging
import os
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import assert_same
from jax.sharding import PartitionSpec as P

import jstep
from jstep.checkpoint.saver import Saver


class Pair(typing.NamedTuple):
    a: typing.Any
    b: typing.Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    a: typing.Any
    b: typing.Any


def saved_state(params):
    return jstep.TrainState(params, {}, jnp.int32(1))


@pytest.mark.parametrize(
    "params",
    [
        {"keys": jax.random.split(jax.random.key(1, impl="rbg"), 3)}, {"weak": jnp.asarray(2.0)},
        jnp.ones(3), {}, None, Pair(jnp.ones(2), {"x": None}),
        Layer(jnp.ones(2), (jnp.zeros(1), [jnp.ones(1)])), {"a": 3, "b": 2.5}, {"a": 1 + 2j},
        {"a": jnp.zeros((0, 3)), "b": np.zeros((2, 0), np.int8)}, {"a": np.float32(2)},
        {"a": np.arange(3, dtype=">f4"), "b": np.arange(3, dtype=">i8")},
        {0: jnp.ones(1), 1: jnp.zeros(1)},
        {"0": jnp.ones(1), "a.b": jnp.ones(1), "": jnp.zeros(1), "a/b": jnp.ones(1),
         "a": {"b": jnp.zeros(1)}},
        {"a": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))},
    ],
    ids=str,
)  # fmt: skip
def test_odd_leaves_are_restored_as_they_were(tmp_path, params):
    state = saved_state(params)
    with jstep.Saver(tmp_path) as saver:
        saver.save(state)
        back = saver.restore(state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        assert np.shape(after) == np.shape(before)
        dtype = before.dtype if hasattr(before, "dtype") else jnp.result_type(before)
        assert after.dtype == (dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype)
        if jnp.issubdtype(after.dtype, jax.dtypes.prng_key):
            before, after = jax.random.key_data(before), jax.random.key_data(after)
        assert np.array_equal(after, before)


@pytest.mark.parametrize("leaf", [np.ma.ones(2), 2**40], ids=["masked", "a large integer"])
def test_weights_refuse_them_too(tmp_path, leaf):
    pytest.importorskip("safetensors")
    with pytest.raises(
        (TypeError, ValueError),
        match=r"params: 'a' is .*(masked array|cannot hold)",
    ):
        jstep.save_weights(tmp_path / "w.safetensors", {"a": leaf})


# Checkpoints of states that `compact` stores: averages are read with both halves, and formats are
# never mixed.

EMA = jstep.ExponentialMovingAverage(0.9)
AVERAGE = "ExponentialMovingAverage"
INNER = jstep.adamw(1e-2)
AVERAGED = jstep.compact(jstep.with_moving_average(INNER, EMA))
both_dtypes = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])


def trained(optimizer, dtype, steps=3, mesh=None, scope="remainder"):
    rng = np.random.default_rng(0)
    # Slots of a parameter `remainder/w` have the paths of the halves of `w`: nothing is found by
    # its spelling.
    params = {
        scope: {"w": jnp.asarray(rng.normal(size=(64, 128)), dtype)},
        "w": jnp.ones((64, 128), dtype),
    }
    params["b"] = jnp.ones(8, dtype)
    state = jstep.TrainState.create(
        params, optimizer, mesh=mesh, param_specs=None if mesh is None else P("data")
    )
    for _ in range(steps):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), dtype), params)
        state = jstep.apply_gradients(state, grads, optimizer)
    return state


def is_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.thorough(except_for=["bfloat16"])
@both_dtypes
def test_averages_are_restored_with_their_remainder(dtype, tmp_path):
    state = trained(AVERAGED, dtype)
    wanted = jstep.averaged_params(state)
    on_host = jax.tree.map(np.asarray, state)
    with jstep.Saver(tmp_path) as saver:
        path = saver.save(state)
        is_same(saver.restore(state, use_averages=True).params, wanted)
        is_same(saver.restore(on_host, use_averages=True).params, wanted)
        is_same(saver.restore(jax.eval_shape(lambda: state), use_averages=True).slots, state.slots)
        is_same(saver.restore_params(state.params, use_averages=True), wanted)
        is_same(saver.restore(None, use_averages=True)["params"], wanted)
    names = lambda name: f"slots/{AVERAGE}/{name}"  # noqa: E731
    is_same(jstep.load_weights(path, state.params, names=names, dtype=dtype), wanted)
    moments = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), state.params)
    loaded = jstep.load_weights(
        path, moments, names=lambda name: f"slots/v/{name}", dtype=jnp.float32
    )
    is_same(loaded, jax.tree.map(lambda x: x.astype(jnp.float32), jstep.get_slot(state, "v")))


def test_a_leaf_without_a_name_is_no_half_of_another(tmp_path):
    average = {"w": jnp.full(2, 3.0)}
    state = {
        "": jnp.ones(2),
        "params": {"w": jnp.ones(2)},
        "slots": {"ema": average},
        "global_step": jnp.int32(1),
    }
    with jstep.Saver(tmp_path) as saver:
        saver.save(state)
        is_same(saver.restore(None, use_averages="ema")["params"], average)


@pytest.mark.thorough(except_for=["other0-bfloat16"])
@both_dtypes
@pytest.mark.parametrize(
    "other", [INNER, jstep.compact(INNER, block=32), jstep.master_weights(INNER)]
)
def test_a_partial_restore_into_another_format_shows_repack(dtype, other, tmp_path):
    compact = jstep.compact(INNER)
    for number, (old, new) in enumerate([(compact, other), (other, compact)]):
        with jstep.Saver(tmp_path / str(number)) as saver:
            saver.save(trained(old, dtype))
            for partial in (False, True):
                with pytest.raises(
                    ValueError,
                    match=r"state = jstep.repack\(state, old_optimizer, new_optimizer\)",
                ):
                    saver.restore(trained(new, dtype, 0), partial=partial)
            is_same(saver.restore_params(trained(new, dtype, 0).params), trained(old, dtype).params)
            target = {"params": trained(new, dtype, 0).params}
            is_same(saver.restore(target, partial=True)["params"], trained(old, dtype).params)


# `Saver(leave_out=…)`: parameters and slots that are not saved and are taken from the target on
# restore.

EMA_LEFT_OUT = jstep.ExponentialMovingAverage(0.5)


def params_of(base=1.0, lora=2.0):
    return {
        "base": {"w": jnp.full((3, 2), base), "scale": jnp.int8(4)},
        "base_norm": jnp.full(2, base),
        "lora": {"base": {"w": jnp.full((3, 1), lora)}},
    }


def state_of(base=1.0, lora=2.0, optimizer=None, step=5):
    optimizer = optimizer or jstep.with_moving_average(jstep.adam(), EMA_LEFT_OUT)
    return jstep.TrainState.create(params_of(base, lora), optimizer, global_step=step)


def saved_paths(saver):
    path = os.path.join(saver.directory, f"{saver.prefix}-{saver.latest_step()}")
    with open(os.path.join(path, "manifest.json")) as file:
        manifest = json.load(file)
    return [leaf["path"] for leaf in manifest["leaves"]], manifest.get("left_out")


@pytest.mark.parametrize("options", [{"leave_out": "base/*"}, {}], ids=["same Saver", "any Saver"])
def test_restore_takes_left_out_leaves_from_the_target(tmp_path, options, caplog):
    with Saver(tmp_path, leave_out="base/*") as saver:
        saver.save(state_of())
    with Saver(tmp_path, **options) as saver, caplog.at_level(logging.WARNING):
        target = state_of(lora=0.0, step=0)
        restored = saver.restore(target)
        assert_same(restored, state_of())
        assert not caplog.records
        jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(restored)
        assert_same(target, state_of(lora=0.0, step=0))
        assert_same(saver.restore_params(params_of(lora=0.0)), params_of())
        assert not caplog.records
        restored = saver.restore(None)
        assert set(restored["params"]) == {"base_norm", "lora"}


def test_other_values_in_the_target_are_warned_about(tmp_path, caplog):
    with Saver(tmp_path, leave_out="base/*") as saver:
        saver.save(state_of())
        for restore in (saver.restore, lambda state: saver.restore_params(state.params)):
            caplog.clear()
            restored = restore(state_of(base=7.0, lora=0.0, step=0))
            # These are the values of the target.
            assert getattr(restored, "params", restored)["base"]["w"][0, 0] == 7
            assert getattr(restored, "params", restored)["lora"]["base"]["w"][0, 0] == 2
            (record,) = caplog.records
            assert "target has other values" in record.getMessage()
            assert "'params/base/w'" in record.getMessage()
            assert "'params/base/scale'" not in record.getMessage()


@pytest.mark.parametrize("options", [{}, {"partial": True}], ids=repr)
def test_a_target_without_values_is_an_error(tmp_path, options):
    with Saver(tmp_path, leave_out="base/*") as saver:
        saver.save(state_of())
        with pytest.raises(
            ValueError, match="'params/base/scale' stays as it is, since it was left out"
        ) as error:
            saver.restore(jax.eval_shape(state_of), **options)
        assert "lora" not in str(error.value)
        with pytest.raises(ValueError, match="must have a value, got a shape or a deleted array"):
            saver.restore_params(jax.eval_shape(params_of))
        donated = state_of()
        jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(donated)
        with pytest.raises(ValueError, match="must have a value, got a shape or a deleted array"):
            saver.restore(donated, **options)


def test_the_state_may_be_donated_after_save(tmp_path):
    """The fingerprints are those of the state as it was passed, although the next steps reuse its
    memory."""
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with Saver(tmp_path, leave_out="base/w", max_to_keep=None) as saver:
        state = state_of()
        saver.save(state)
        for _ in range(3):
            state = step(state)
        saver.wait()
        (record, *_) = [leaf for leaf in saved_paths(saver)[1] if leaf["path"] == "params/base/w"]
        expected = jstep.fingerprint(
            {"params": {"base": {"w": state_of().params["base"]["w"]}}}, per_leaf=True
        )
        assert record["fingerprint"] == "".join(
            f"{int(word):08x}" for word in expected["params/base/w"]
        )
