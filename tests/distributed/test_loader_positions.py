"""Positions of data loaders on several processes: each loader resumes at its own position after a
SIGKILL."""

import signal

import pytest
from processes import printed, run, start, wait_for

import jstep
from jstep.data import positions

TRAIN = """
kind, die_at = sys.argv[5], int(sys.argv[6])

class Packed:
    '''A loader that filters its rows, so that the number of rows read depends on the process.'''
    def __init__(self):
        self.at, self.batches = 0, 0
    def __iter__(self):
        return self
    def __next__(self):
        share = 16 // count
        found = []
        while len(found) < share:
            n = self.at
            self.at += 1
            if kind == "same" or (n * (3 + process)) % 7 > 2 * process:
                found.append(data[(n * count + process) % len(data)])
        self.batches += 1
        return np.stack(found)

class GetState(Packed):
    def get_state(self):
        return {"at": self.at}
    def set_state(self, state):
        self.at = state["at"]

class Large(GetState):
    def get_state(self):
        return {"at": self.at, "buffer": np.zeros(20_000)}

class Lacking(GetState):
    def set_state(self, state):
        self.at = state["at"] + 5 * process

class StateDict(Packed):
    def state_dict(self):
        return {0: (self.at, bytes(self.at % 200))}
    def load_state_dict(self, state):
        self.at = state[0][0]

class Hook(jstep.Hook):
    def after_step(self, step, state, metrics):
        if step == die_at:
            saver.wait()
            if process == count - 1:
                print("dies", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

loader = {"get_state": GetState, "state_dict": StateDict, "same": Large, "lacking": Lacking}[kind]()
optimizer = jstep.adam(0.02)
state = jstep.TrainState.create(init, optimizer, mesh=mesh)
saver = jstep.Saver(directory)
import logging
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="log %(message)s", force=True)
try:
    state = jstep.train(
        jstep.minimize(loss_fn, optimizer), state, loader, 12, hooks=[Hook()], checkpoint_dir=saver, progress=False,
        save_checkpoint_steps=4, save_checkpoint_secs=None, batch_sharding=rows,
    )
    print("step", int(state.global_step))
    print("weights", weights(state))
except ValueError as error:
    print("raised", error)
"""  # noqa: E501


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["get_state", "state_dict"])
def test_each_loader_resumes_at_its_position(tmp_path, kind):
    uninterrupted = run(TRAIN, 2, tmp_path / "uninterrupted", kind, -1)
    killed = start(TRAIN, 2, tmp_path / "killed", kind, 10)
    assert killed[1].wait(100) == -signal.SIGKILL
    wait_for(killed)
    resumed = run(TRAIN, 2, tmp_path / "killed", kind, -1)
    for lines in resumed:
        assert printed(lines, "step") == "12"
        assert printed(lines, "weights") == printed(uninterrupted[0], "weights")
        assert printed(lines, "log") is None
    with jstep.Saver(tmp_path / "killed") as saver:
        extra = saver.extra()
    saved = extra[positions.POSITIONS]
    assert saved["processes"] == 2
    assert saved["positions"] == ["position.process_0", "position.process_1"]
    if kind == "state_dict":
        return
    for lines in run(TRAIN, 4, tmp_path / "killed", kind, -1):
        # A finished run does not restore the loaders.
        assert printed(lines, "step") == "12"
    with jstep.Saver(tmp_path / "killed") as saver:
        saver.delete(12)
    for count in (1, 4):
        for lines in run(TRAIN, count, tmp_path / "killed", kind, -1):
            error = printed(lines, "raised")
            assert "GetState" in error
            assert "saved by 2 processes" in error
            assert f"this run has {count}" in error
            assert "Start the run with 2 processes" in error


UNREADABLE = """
if process == 1:
    from jstep.checkpoint.reading import OpenCheckpoint

    def refuse(self, name):
        raise PermissionError(13, "Permission denied", name)
    OpenCheckpoint.file = refuse
"""


@pytest.mark.thorough
def test_a_position_that_one_process_cannot_read_ends_all(tmp_path):
    killed = start(TRAIN, 2, tmp_path, "get_state", 10)
    assert killed[1].wait(100) == -signal.SIGKILL
    wait_for(killed)
    first, second = wait_for(start(UNREADABLE + TRAIN, 2, tmp_path, "get_state", -1))
    assert (
        "the checkpoint cannot be read: process 1: PermissionError: [Errno 13] Permission denied"
        in first.err
    )
    assert "PermissionError: [Errno 13] Permission denied: 'position.process_1'" in second.err
    assert 0 not in (first.code, second.code)
    for lines in run(TRAIN, 2, tmp_path, "get_state", -1):
        assert printed(lines, "step") == "12"


@pytest.mark.thorough
def test_equal_positions_work_on_any_number_of_processes(tmp_path):
    killed = start(TRAIN, 2, tmp_path, "same", 10)
    assert killed[1].wait(100) == -signal.SIGKILL
    wait_for(killed)
    with jstep.Saver(tmp_path) as saver:
        assert len(saver.extra()[positions.POSITIONS]["positions"]) == 1
    for count in (1, 4):
        for lines in run(TRAIN, count, tmp_path, "same", -1):
            assert printed(lines, "step") == "12"
            assert printed(lines, "log") is None
        with jstep.Saver(tmp_path) as saver:
            saver.delete(12)


@pytest.mark.thorough
def test_each_process_compares_its_own_rows(tmp_path):
    killed = start(TRAIN, 2, tmp_path, "lacking", 10)
    assert killed[1].wait(100) == -signal.SIGKILL
    wait_for(killed)
    first, second = run(TRAIN, 2, tmp_path, "lacking", -1)
    assert printed(first, "log") is None
    assert printed(second, "log").startswith(
        "batch 8 does not match the one read before the restart by process 1: "
    )
