"""A run whose parameters became NaN or infinite ends where a checkpoint is due, and what its Savers
allow."""

import functools
import json
import logging
import math
import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest
from doubles import raising
from processes import start, wait_for

import jstep

BAD = 25  # this batch is NaN


@functools.cache
def optimizer_and_step(kind):
    optimizer = jstep.skip_nonfinite(jstep.adamw(1e-2)) if kind == "skipped" else jstep.adamw(1e-2)
    return optimizer, jstep.minimize(
        lambda params, x: jnp.mean((x @ params["net"]["w"] - 1.0) ** 2), optimizer
    )


def run(last_step=60, *, at=BAD, value=math.nan, params=None, kind="plain", **options):
    optimizer, step = optimizer_and_step(kind)
    state = jstep.TrainState.create(
        params or {"a": jnp.ones(2), "net": {"w": jnp.zeros((3, 1))}}, optimizer
    )

    def batches(n):
        return np.full((8, 3), value if n == at else 1.0, np.float32)

    options = {
        "save_checkpoint_steps": 10,
        "save_checkpoint_secs": None,
        "progress": False,
    } | options
    return jstep.train(step, state, batches, last_step, **options)


def steps(directory, prefix="model"):
    return jstep.Saver(directory, prefix=prefix).all_steps()


def finite(directory, step, prefix="model"):
    return json.loads((directory / f"{prefix}-{step}" / "manifest.json").read_text())["finite"]


@pytest.mark.thorough(except_for=["inf-7"])
@pytest.mark.parametrize("steps_per_call", [1, 7])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_run_ends_where_the_first_checkpoint_is_due(tmp_path, value, steps_per_call, caplog):
    with pytest.raises(jstep.NanLossDuringTrainingError, match=r"at step 30.*net/w") as caught:
        run(value=value, checkpoint_dir=tmp_path, steps_per_call=steps_per_call)
    error = caught.value
    assert (error.step, error.may_save) == (30, False)
    assert jstep.global_step(error.state) == 30
    assert not jnp.isfinite(error.state.params["net"]["w"]).all()
    assert "params/a" not in str(error)
    for way in ("20 → 30", "jstep.NanLossHook()", "help/errors#not-finite"):
        assert way in str(error)
    assert steps(tmp_path) == [10, 20]
    assert all(finite(tmp_path, step) for step in (10, 20))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with pytest.raises(jstep.NanLossDuringTrainingError, match="at step 30"):
        # A restart meets the same batch.
        run(checkpoint_dir=tmp_path)
    state = run(checkpoint_dir=tmp_path, at=None)
    assert jnp.isfinite(state.params["net"]["w"]).all()


def test_skipped_updates_and_runs_without_checkpoints_do_not_count(tmp_path):
    assert jstep.global_step(run(checkpoint_dir=tmp_path, kind="skipped")) == 60
    assert steps(tmp_path) == [20, 30, 40, 50, 60]
    state = run()
    assert (jstep.global_step(state), bool(jnp.isnan(state.params["net"]["w"]).all())) == (60, True)


@pytest.mark.thorough(except_for=["nan"])
@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_what_was_not_finite_when_the_run_began_does_not_count(tmp_path, value):
    params = {"a": jnp.array([value, 1.0]), "net": {"w": jnp.zeros((3, 1))}}
    hook = jstep.EvaluationHook(lambda state: {"loss": 1.0}, every_n_steps=5, callbacks=[])
    run(20, params=params, hooks=[hook], checkpoint_dir=tmp_path)
    assert steps(tmp_path) == [10, 20]
    assert [finite(tmp_path, step) for step in (10, 20)] == [True, True]
    with pytest.raises(
        jstep.NanLossDuringTrainingError,
        match=r"step 30.*is due: params/net/w contains NaN\.",
    ):
        run(params=params, checkpoint_dir=tmp_path)


def test_allow_nonfinite_saves_them_and_keeps_the_newest_finite_checkpoint(tmp_path, capsys):
    with jstep.Saver(tmp_path, max_to_keep=3, allow_nonfinite=True) as saver:
        run(70, checkpoint_dir=saver)
        assert saver.all_steps() == [20, 60, 70]
    assert [finite(tmp_path, step) for step in (20, 60, 70)] == [True, False, False]
    with jstep.Saver(tmp_path, max_to_keep=1, allow_nonfinite=True) as saver:
        # Another Saver reads the manifests.
        saver.save(saver.restore(run(1, at=None), step=70).replace(global_step=jnp.int32(80)))
        saver.wait()
        assert saver.all_steps() == [20, 80]
        saver.save(run(90, at=None))
        saver.wait()
        assert saver.all_steps() == [90]


@pytest.mark.thorough(except_for=["own"])
@pytest.mark.parametrize("allowing", ["own", "other"])
def test_each_savers_own_argument_counts(tmp_path, allowing):
    other = jstep.Saver(tmp_path / "other", allow_nonfinite=allowing == "other")
    hook = jstep.CheckpointSaverHook(other, save_steps=30)
    own = jstep.Saver(tmp_path / "own", allow_nonfinite=allowing == "own")
    with pytest.raises(jstep.NanLossDuringTrainingError, match="at step 30"):
        run(hooks=[hook], checkpoint_dir=own)
    assert steps(tmp_path / "own") == ([10, 20, 30] if allowing == "own" else [10, 20])
    assert steps(tmp_path / "other") == ([30] if allowing == "other" else [])


def interrupted(step, state, metrics):
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.thorough(except_for=["signal-True", "error-False"])
@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("hook", [interrupted, raising(KeyError("mine"))], ids=["signal", "error"])
def test_a_signal_or_an_error_elsewhere_saves_only_what_is_allowed(tmp_path, hook, allow):
    expected = (
        KeyError
        if hook is not interrupted
        else jstep.Preempted
        if allow
        else jstep.NanLossDuringTrainingError
    )
    with jstep.Saver(tmp_path, allow_nonfinite=allow) as saver:
        with pytest.raises(expected) as caught:
            run(hooks=[jstep.every(27, hook)], checkpoint_dir=saver)
        assert jstep.global_step(caught.value.state) == 27
        is_saved = allow and hook is interrupted  # an error within an iteration saves nothing of it
        assert saver.all_steps() == [10, 20, *[27] * is_saved]


SCRIPT = """
mode = sys.argv[5]
def batch(step):
    x = np.asarray(batches[step]).copy()
    if step == 25 and process == 1:
        x[0, 0] = np.nan
    return x

def stop(step, state, metrics):
    if mode == "signal" and step >= 27:
        time.sleep(0.15)  # JAX looks for signals once a second
        if step == 27 and process == 0:
            os.kill(os.getpid(), signal.SIGTERM)

specs = {"w": P("data"), "b": P("data")}
state = jstep.TrainState.create(init(), optimizer, mesh=mesh, param_specs=specs if mode != "replicated" else None)
saver = jstep.Saver(directory, allow_nonfinite=mode == "allow", max_to_keep=2)
try:
    jstep.train(
        jstep.minimize(loss_fn, optimizer), state, batch, 60, hooks=[jstep.every(1, stop)], checkpoint_dir=saver,
        save_checkpoint_steps=10 if mode != "signal" else 20, save_checkpoint_secs=None, batch_sharding=rows,
        progress=False,
    )
    print("ended")
except jstep.NanLossDuringTrainingError as error:
    print("raised", error.step, "params/" in str(error), int(jstep.global_step(error.state)))
saver.close()
"""  # noqa: E501


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["sharded", "replicated", "signal", "allow"])
def test_two_processes_end_together(tmp_path, mode):
    ended = wait_for(start(SCRIPT, 2, tmp_path, mode))
    assert [one.code for one in ended] == [0, 0], ended[0].err[-3000:] + ended[1].err[-3000:]
    lines = [one.out.strip().splitlines()[-1] for one in ended]
    assert lines[0] == lines[1]
    if mode == "allow":
        assert lines[0] == "ended"
        assert steps(tmp_path) == [20, 60]
        return
    word, step, has_leaf, held = lines[0].split()
    assert (word, has_leaf, step) == ("raised", "True", held)
    assert 27 < int(step) < 60 if mode == "signal" else step == "30"
    assert steps(tmp_path) == ([20] if mode == "signal" else [10, 20])
