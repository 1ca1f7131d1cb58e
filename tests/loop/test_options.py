"""The arguments of `train` and `Run`, which are written out in both."""

import dataclasses
import inspect

import pytest

import jstep
from jstep.loop.arguments import Options

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
