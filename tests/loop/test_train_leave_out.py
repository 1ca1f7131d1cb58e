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
OPTIMIZER = jstep.partition(LABELS, labels=lambda path, leaf: "lora" if path.startswith("lora/") else None)


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
        return jstep.train(STEP, initial, batches, last_step, checkpoint_dir=saver, progress=False, **options)


def leaves(path):
    with open(os.path.join(path, "manifest.json")) as file:
        manifest = json.load(file)
    return {leaf["path"] for leaf in manifest["leaves"]}, {leaf["path"] for leaf in manifest.get("left_out", ())}


def test_resume_is_bitwise(tmp_path, caplog):
    uninterrupted = train(tmp_path / "uninterrupted", 12)
    train(tmp_path / "run", 5)
    assert bits(train(tmp_path / "run", 12)) == bits(uninterrupted)
    saved, absent = leaves(tmp_path / "run" / "model-12")
    assert absent == {"params/base/w"}
    assert not any("base" in path for path in saved)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_another_base_is_a_warning_and_shapes_are_an_error(tmp_path, caplog):
    train(tmp_path, 5)
    with pytest.raises(ValueError, match="'params/base/w' stays as it is, since it was left out"):
        train(tmp_path, 8, jax.eval_shape(state))
    train(tmp_path, 8, state(2.0))
    assert "target has other values" in caplog.text
