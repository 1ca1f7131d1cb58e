"""Loaders with `state_dict` and `load_state_dict`: positions with all kinds of values are saved and
restored."""

import json
import logging
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from loop_runs import Calls
from sources import Positioned, Stateful, StatefulIterable, numbers

import jstep
from jstep.data.loaders import open_source
from jstep.data.positions import SavedPosition

OPTIMIZER = jstep.gradient_descent(0.5)
STEP = jstep.minimize(lambda params, x: jnp.mean((params["w"] - jnp.float32(x)) ** 2), OPTIMIZER)


def state():
    return jstep.TrainState.create({"w": jnp.float32(0)}, OPTIMIZER)


KINDS = {
    "json": (None, None),
    "integer keys": (lambda at: {0: {1: at}}, lambda state: state[0][1]),
    "bytes": (lambda at: bytes([at]), lambda state: state[0]),
    "an array": (lambda at: {"at": np.arange(at)}, lambda state: len(state["at"])),
    "a number": (lambda at: at, lambda state: state),
    "none inside": (lambda at: {"at": at, "epoch": None, "ok": True}, lambda state: state["at"]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_a_killed_run_resumes_identically(tmp_path, kind, steps_per_call, caplog):
    options = {
        "checkpoint_dir": tmp_path,
        "save_checkpoint_steps": 6,
        "steps_per_call": steps_per_call,
        "progress": False,
    }
    uninterrupted = jstep.train(STEP, state(), Stateful(40, *kind), 20, progress=False)
    with pytest.raises(RuntimeError, match="failed at"):
        jstep.train(
            STEP, state(), Stateful(40, *kind), 20, hooks=[Calls(fail=("step", 9))], **options
        )
    loader, seen = Stateful(40, *kind), Calls()
    resumed = jstep.train(STEP, state(), loader, 20, hooks=[seen], **options)
    assert float(resumed.params["w"]) == float(uninterrupted.params["w"])
    assert seen.steps()[0] <= 12
    assert loader.calls == ["load", "iter"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "batches", [StatefulIterable, Positioned, Stateful], ids=["iterator", "get_state", "loader"]
)
def test_the_state_of_a_loader_or_of_its_iterator(batches):
    source = open_source(batches(), 0, 100, is_saved=True, next_save=lambda number: number)
    assert [next(source.items) for _ in range(3)] == [0, 10, 20]
    saved = json.loads(json.dumps(source.read_position()))
    next(source.items)
    assert next(open_source(batches(), 3, 100, SavedPosition(saved)).items) == 30


def test_a_state_that_cannot_be_saved_names_the_loader(tmp_path):
    def make():
        return Stateful(make=lambda at: {"lock": threading.Lock()})

    calls = Calls()
    words = (
        r"the position of the Stateful cannot be saved: "
        r"state\['lock'\] is .* type .*; convert it, see docs"
    )
    with pytest.raises(TypeError, match=words):
        jstep.train(
            STEP, state(), make(), 5, hooks=[calls], checkpoint_dir=tmp_path, progress=False
        )
    assert not calls.steps()
    # Without checkpoints, the state is not requested.
    jstep.train(STEP, state(), make(), 5, progress=False)


def test_a_loader_with_only_one_of_the_methods_warns(caplog):
    class Half:
        def __iter__(self):
            return iter([1, 2])

        def state_dict(self):
            return {}

    open_source(Half(), 3, 9)
    assert "has no position to resume from" in caplog.text
    assert "an object with get_state and set_state" in caplog.text


def test_which_objects_are_loaders_with_a_position():
    class Sequence(list):
        state_dict = load_state_dict = None

    assert numbers(Sequence([0, 10])) == [0, 10]

    class Model:  # it is called with the step
        def __call__(self, step):
            return step

        def state_dict(self):
            raise AssertionError

        def load_state_dict(self, state):
            raise AssertionError

    assert numbers(Model(), 0, 3) == [0, 1, 2]

    class DataSet(Stateful):
        # As in data sets of MosaicML and litdata, whose loaders keep the position.
        def state_dict(self, samples, from_beginning):
            raise AssertionError

    assert numbers(DataSet(3)) == [0, 10, 20]
