"""Runs whose checkpoints contain only the adapters (`Saver(leave_out=…)`)."""

import json
import logging
import os

import jax
import jax.numpy as jnp
import pytest
from comparisons import bits

import jstep

LABELS = {"lora": jstep.adamw(1e-2)}
OPTIMIZER = jstep.partition(
    LABELS, labels=lambda path, leaf: "lora" if path.startswith("lora/") else None
)


def loss_fn(params, x):
    return jnp.mean((x @ params["base"]["w"] + x @ params["lora"]["a"]) ** 2)


STEP = jstep.minimize(loss_fn, OPTIMIZER, var_list="lora/*")


def state(base=1.0):
    params = {"base": {"w": jnp.full((4, 4), base)}, "lora": {"a": 0.1 * jnp.eye(4)}}
    return jstep.TrainState.create(params, OPTIMIZER)


def batches(step):
    return jax.random.normal(jax.random.key(step), (8, 4))


def train(directory, last_step, initial=None, leave_out="base/*", **options):
    with jstep.Saver(directory, leave_out=leave_out) as saver:
        initial = state() if initial is None else initial
        return jstep.train(
            STEP, initial, batches, last_step, checkpoint_dir=saver, progress=False, **options
        )


def leaves(path):
    with open(os.path.join(path, "manifest.json")) as file:
        manifest = json.load(file)
    return {leaf["path"] for leaf in manifest["leaves"]}, {
        leaf["path"] for leaf in manifest.get("left_out", ())
    }


@pytest.mark.parametrize("leave_out", ["base/*", "frozen"])
def test_resume_is_bitwise(leave_out, tmp_path, caplog):
    uninterrupted = train(tmp_path / "uninterrupted", 12, leave_out=leave_out)
    best = jstep.KeepBest(tmp_path / "best", "loss")
    hooks = [jstep.EvaluationHook(lambda state: {"loss": 1.0}, every_n_steps=5, callbacks=[best])]
    train(tmp_path / "run", 5, leave_out=leave_out, hooks=hooks)
    assert bits(train(tmp_path / "run", 12, leave_out=leave_out, hooks=hooks)) == bits(
        uninterrupted
    )
    saved, absent = leaves(tmp_path / "run" / "model-12")
    assert absent == leaves(tmp_path / "best" / "best-5")[1] == {"params/base/w"}
    assert not any("base" in path for path in saved)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_another_base_is_a_warning_and_shapes_are_an_error(tmp_path, caplog):
    train(tmp_path, 5)
    with pytest.raises(ValueError, match="'params/base/w' stays as it is, since it was left out"):
        train(tmp_path, 8, jax.eval_shape(state))
    train(tmp_path, 8, state(2.0))
    assert "target has other values" in caplog.text


SGD = jstep.partition({"lora": jstep.sgd(0.1)}, {"base": None, "lora": "lora"})
ALL = {"params/base/w", "params/lora/a"}


@pytest.mark.parametrize(
    ("optimizer", "absent"),
    [
        (SGD, {"params/base/w"}),
        (jstep.chain(jstep.scale_by_adam(), SGD), {"params/base/w"}),
        (
            jstep.skip_nonfinite(
                jstep.master_weights(jstep.partition({"x": OPTIMIZER}, lambda path, leaf: "x"))
            ),
            None,
        ),
        (jstep.adam(), set()),
    ],
    ids=["no slots", "chain", "wrapped", "nothing"],
)
def test_what_no_label_trains_is_left_out(optimizer, absent, tmp_path):
    absent = {"params/base/w"} if absent is None else absent
    created = jstep.TrainState.create(state().params, optimizer, model_state={"n": jnp.zeros(2)})
    with jstep.Saver(tmp_path, leave_out="frozen") as saver:
        path = saver.save(jax.jit(jstep.increment_global_step)(created))
        restored = saver.restore(created)
    saved, left_out = leaves(path)
    assert left_out == absent
    assert ALL - left_out <= saved
    assert restored.global_step == 1
    assert jax.tree.structure(restored) == jax.tree.structure(created)


def test_what_is_frozen_must_be_known(tmp_path):
    made = jstep.TrainState(state().params, state().slots, jnp.int32(3))
    with jstep.Saver(tmp_path, leave_out="frozen") as saver:
        for unknown in (made, {"params": state().params, "global_step": jnp.int32(3)}):
            for call in (saver.claim, saver.save):
                with pytest.raises(
                    ValueError,
                    match=r"leave_out='frozen': the state must come from TrainState\.create",
                ):
                    call(unknown)
    named = {"frozen": jnp.ones(2), "head": jnp.ones(2)}
    with jstep.Saver(tmp_path, leave_out=["frozen"]) as saver:
        path = saver.save(jstep.TrainState.create(named, jstep.sgd(0.1)))
    assert leaves(path)[1] == {"params/frozen"}  # a list has paths
