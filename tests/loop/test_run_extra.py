"""What stands in the `extra` of a checkpoint: that of a run is checked, and what users save by hand
is theirs."""

import logging
import math
import signal

import jax.numpy as jnp
import numpy as np
import pytest
from children import end, start
from loop_runs import train
from problems import DATA, make_state

import jstep
from jstep.array_store.manifest import CheckpointExtra
from jstep.data import positions

RUN = "0123abcd"
INVALID = {
    "batches": [
        3,
        {"after": 1},
        {"value": 1, "after": -1},
        {"value": 1, "after": "x"},
        {"value": 1, "after": 2**63},
    ],
    "batches_of_processes": [
        3,
        {"processes": 2},
        {"processes": 2, "positions": [3]},
        {"processes": 10**12, "positions": ["position.process_0", "position.process_1"]},
        {"processes": 2, "positions": ["position.process_0", "hooks.0"]},
    ],
    "stopped": [3],
    "skipped": [0.5, -1, 2**31],
    "last_iteration": ["x", True],
    "ended": [-1],
    "last_body": [2**63],
    "before_end": [1],
    "held": [[], {"rate": "x"}, {"rate": 10**400}],
    "parent": [
        "x",
        {},
        {"path": "x", "step": 1},
        {"path": "/x", "step": -1},
        {"path": "/x", "step": "1"},
    ],
    "past": [1, {"start": 3}, {"start": [1]}, {"start": [1, "x"]}, {"batches": 3}, {"lanes": []}],
    "config": [3],
    "code": [{"commit": 3}],
}


def save(directory, extra, *, steps=(4,)):
    with jstep.Saver(directory) as saver:
        for step in steps:
            saver.save(make_state(step), CheckpointExtra(extra if step == steps[-1] else None, {}))


@pytest.mark.thorough(except_for=["batches-value2", "parent-value2"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param(key, value, id=f"{key}-value{i}")
        for key in INVALID
        for i, value in enumerate(INVALID[key])
    ],
)
def test_what_no_run_writes_is_an_error_that_names_the_manifest(tmp_path, key, value):
    save(tmp_path / "run", {"run": RUN, key: value}, steps=(3, 4))
    match = (
        rf"model-4 is corrupted: manifest.json: its extra has {key}=.* intact checkpoint is step 3"
    )
    for last_step in (3, 4, 6):  # nothing left to do, perhaps an end, and steps
        with pytest.raises(jstep.CorruptedCheckpointError, match=match):
            train(last_step, checkpoint_dir=tmp_path / "run")
    with pytest.raises(jstep.CorruptedCheckpointError, match=match):
        train(6, checkpoint_dir=tmp_path / "branch", start_from=tmp_path / "run" / "model-4")


def test_each_key_has_an_invalid_value_here():
    from jstep.hooks.run_extra import RUN_KEY, SCHEMA

    checked_elsewhere = {"hooks", RUN_KEY}  # `set_states`; without a name it is no run's
    assert INVALID.keys() | checked_elsewhere == SCHEMA.keys()


@pytest.mark.parametrize("name", [None, "mine", 3])
def test_what_a_user_saves_by_hand_is_not_that_of_a_run(tmp_path, caplog, name):
    caplog.set_level(logging.INFO, "jstep")
    extra = {key: values[0] for key, values in INVALID.items()} | {
        "hooks": "none",
        "run": name,
        "ended": 4,
    }
    save(tmp_path, extra)
    state = train(6, checkpoint_dir=tmp_path)
    assert jstep.global_step(state) == 6
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert jstep.Saver(tmp_path).extra(4) == extra


def test_a_metric_with_the_name_of_a_key_is_kept(tmp_path):
    evaluate = jstep.evaluator(lambda params, batch: {"skipped": jnp.sum(params["w"])}, [DATA[0]])
    best = jstep.KeepBest(tmp_path / "best", "skipped", mode="max")
    hook = jstep.EvaluationHook(evaluate, every_n_steps=4, callbacks=[best])
    train(4, hooks=[hook], checkpoint_dir=tmp_path / "run")
    state = train(
        6,
        hooks=[jstep.NanLossHook(max_skipped_steps=9)],
        start_from=tmp_path / "best",
        checkpoint_prefix="best",
    )
    assert jstep.global_step(state) == 6


# The batches since a position was read, which a restart fetches again.


class Counted:
    """A loader that notes what was fetched."""

    def __init__(self):
        self.at = 0
        self.fetched = []

    def __next__(self):
        self.fetched.append(self.at)
        self.at += 1
        return DATA[self.fetched[-1]]

    def get_state(self):
        return self.at

    def set_state(self, value):
        self.at = value


@pytest.mark.parametrize(("silent_secs", "lines"), [(-1.0, [2]), (math.inf, [])])
def test_a_long_fetch_is_announced_while_it_goes_on(
    tmp_path, monkeypatch, caplog, silent_secs, lines
):
    caplog.set_level(logging.INFO, "jstep")
    save(tmp_path, {"run": RUN, "batches": {"value": 1, "after": 3}})
    monkeypatch.setattr(positions, "_SILENT_SECS", silent_secs)
    loader = Counted()
    fetched_then = []

    def note(record):
        if "fetches 3 batches again" in record.getMessage():
            fetched_then.append(loader.at)
        return True

    log = logging.getLogger("jstep")
    log.addFilter(note)
    try:
        train(6, loader, checkpoint_dir=tmp_path)
    finally:
        log.removeFilter(note)
    assert loader.fetched[:5] == [1, 2, 3, 4, 5]
    assert fetched_then == lines


@pytest.mark.thorough
def test_a_signal_ends_a_fetch_without_end(tmp_path):
    script = f"""
from jstep.array_store.manifest import CheckpointExtra
with jstep.Saver(directory) as saver:
    state = make_state().replace(global_step=jnp.int32(4))
    extra = {{"run": {RUN!r}, "batches": {{"value": {{"$bytes": "NA=="}}, "after": 10**12}}}}
    saver.save(state, CheckpointExtra(extra, {{}}))

class Endless(Counted):
    def __next__(self):
        if self.at == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.at >= 9:
            time.sleep(1)  # it must not take the interpreter from the thread that ends the run
        return super().__next__()

train(6, Endless(), checkpoint_dir=directory)
"""
    end(start(script, tmp_path), 128 + signal.SIGTERM)


def test_an_error_of_a_position_names_the_checkpoint(tmp_path):
    save(tmp_path, {"run": RUN, "batches": {"value": {"$int": "x"}}})
    with pytest.raises(
        ValueError,
        match=r"in model-4, the position for the Counted cannot be decoded",
    ):
        train(6, Counted(), checkpoint_dir=tmp_path)


class Remembers(jstep.Hook):
    def get_state(self):
        return np.zeros(2)

    def set_state(self, value):
        value["seen"]


def test_an_error_of_the_state_of_a_hook_names_the_checkpoint(tmp_path):
    train(4, hooks=[Remembers()], checkpoint_dir=tmp_path)
    with pytest.raises(IndexError) as error:
        train(6, hooks=[Remembers()], checkpoint_dir=tmp_path)
    assert "jstep: the states of the hooks are those in model-4" in error.value.__notes__
