"""`Saver(leave_out=…)`: parameters and slots that are not saved and are taken from the target on restore."""

import json
import logging
import os

import jax
import jax.numpy as jnp
import pytest
from checkpoint_states import assert_same

import jstep
from jstep.checkpoint.saver import Saver

EMA = jstep.ExponentialMovingAverage(0.5)


def params_of(base=1.0, lora=2.0):
    return {
        "base": {"w": jnp.full((3, 2), base), "scale": jnp.int8(4)},
        "base_norm": jnp.full(2, base),
        "lora": {"base": {"w": jnp.full((3, 1), lora)}},
    }


def state_of(base=1.0, lora=2.0, optimizer=None, step=5):
    optimizer = optimizer or jstep.with_moving_average(jstep.adam(), EMA)
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
            assert getattr(restored, "params", restored)["base"]["w"][0, 0] == 7  # the values of the target
            assert getattr(restored, "params", restored)["lora"]["base"]["w"][0, 0] == 2
            (record,) = caplog.records
            assert "target has other values" in record.getMessage()
            assert "'params/base/w'" in record.getMessage()
            assert "'params/base/scale'" not in record.getMessage()


@pytest.mark.parametrize("options", [{}, {"partial": True}], ids=repr)
def test_a_target_without_values_is_an_error(tmp_path, options):
    with Saver(tmp_path, leave_out="base/*") as saver:
        saver.save(state_of())
        with pytest.raises(ValueError, match=r"left out of .*model-5.*'params/base/scale'") as error:
            saver.restore(jax.eval_shape(state_of), **options)
        assert "lora" not in str(error.value)
        with pytest.raises(ValueError, match="not only shapes"):
            saver.restore_params(jax.eval_shape(params_of))
        donated = state_of()
        jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(donated)
        with pytest.raises(ValueError, match="not only shapes"):
            saver.restore(donated, **options)


def test_the_state_may_be_donated_after_save(tmp_path):
    """The fingerprints are those of the state as it was passed, although the next steps reuse its memory."""
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with Saver(tmp_path, leave_out="base/w", max_to_keep=None) as saver:
        state = state_of()
        saver.save(state)
        for _ in range(3):
            state = step(state)
        saver.wait()
        (record, *_) = [leaf for leaf in saved_paths(saver)[1] if leaf["path"] == "params/base/w"]
        expected = jstep.fingerprint({"params": {"base": {"w": state_of().params["base"]["w"]}}}, per_leaf=True)
        assert record["fingerprint"] == "".join(f"{int(word):08x}" for word in expected["params/base/w"])
