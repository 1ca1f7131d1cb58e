"""The arguments of `train` and `Run`, which are written out in both."""

import dataclasses
import inspect

import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.origin.arguments import Options

TAKEN_APART = {"self", "train_step", "state", "batches"}


def test_train_and_run_have_the_same_arguments():
    train, run = inspect.signature(jstep.train).parameters, inspect.signature(jstep.Run).parameters
    assert list(train.items()) == list(run.items())
    assert train.keys() - TAKEN_APART == {field.name for field in dataclasses.fields(Options)}


def test_train_passes_each_argument_to_the_field_of_its_name(monkeypatch):
    """A marker passes through `train` and `Run` into the record of its name."""
    seen = {}

    class ToldError(Exception):
        pass

    def record(given, state, batches):
        seen.update(vars(given))
        raise ToldError

    monkeypatch.setattr("jstep.running.run.validated", record)
    names = [field.name for field in dataclasses.fields(Options)]
    for call in (jstep.train, jstep.Run):
        seen.clear()
        with pytest.raises(ToldError):
            call("step", "state", "batches", **{name: f"<{name}>" for name in names})
        assert seen == {name: f"<{name}>" for name in names}


def test_a_narrow_integer_of_numpy_is_an_interval_as_any_other(tmp_path):
    """Numbers are converted, not only checked: a multiple of uint8 after 200 would be 144."""
    intervals = dict.fromkeys(
        ("log_steps", "save_checkpoint_steps", "save_summaries_steps"), np.uint8(200)
    )
    dirs = {"checkpoint_dir": tmp_path / "run", "logdir": tmp_path / "logs"}
    seconds = {"save_checkpoint_secs": np.float16(600), "stop_secs": np.float16(600)}
    optimizer = jstep.gradient_descent(0.1)
    state = jstep.TrainState.create({"w": jnp.zeros(())}, optimizer)
    step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
    state = jstep.train(
        step, state, lambda n: np.float32(n), 300, steps_per_call=4, **dirs, **intervals, **seconds
    )
    assert jstep.global_step(state) == 300
    assert jstep.Saver(tmp_path / "run").all_steps() == [200, 300]
