"""Positions of data loaders on several processes: each loader resumes at its own position after a SIGKILL."""

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

loader = {"get_state": GetState, "state_dict": StateDict, "same": GetState}[kind]()
optimizer = jstep.adam(0.02)
state = jstep.TrainState.create(init, optimizer, mesh=mesh)
saver = jstep.Saver(directory)
import logging
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="log %(message)s")
try:
    state = jstep.train(
        jstep.minimize(loss_fn, optimizer), state, loader, 12, hooks=[Hook()], checkpoint_dir=saver, progress=False,
        save_checkpoint_steps=4, save_checkpoint_secs=None, batch_sharding=rows,
    )
    print("step", int(state.global_step))
    print("weights", weights(state))
except ValueError as error:
    print("raised", error)
"""


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
    assert saved["positions"][0] != saved["positions"][1]
    assert extra[positions.POSITION] == saved["positions"][0]
    if kind == "state_dict":
        return
    for lines in run(TRAIN, 4, tmp_path / "killed", kind, -1):  # a finished run does not restore the loaders
        assert printed(lines, "step") == "12"
    with jstep.Saver(tmp_path / "killed") as saver:
        saver.delete(12)
    for count in (1, 4):
        for lines in run(TRAIN, count, tmp_path / "killed", kind, -1):
            error = printed(lines, "raised")
            assert "GetState" in error
            assert "saved by 2 processes" in error
            assert f"this run has {count}" in error
            assert "jstep.batches" in error


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


LARGE = """
kind, last = sys.argv[5], int(sys.argv[6])

class Buffer(jstep.Hook):
    '''A large buffer on the host, of each process or the same on all, and a hook with a large memory.'''
    def __init__(self):
        self.rows = np.zeros((20_000, 8), np.float32)
        self.rng = np.random.default_rng(0 if kind == "same" else process)
        self.reads = 0
    def __call__(self, step, state):
        self.rows[step] = self.rng.normal(size=8)
        return np.stack([self.rows[step]] * (16 // count))
    def after_step(self, step, state, metrics):
        self.rows[-step] = step
    def state_dict(self):
        self.reads += 1
        return {"rows": self.rows, "rng": self.rng}
    def load_state_dict(self, position):
        vars(self).update(position)
    get_state, set_state = state_dict, load_state_dict

optimizer = jstep.adam(0.02)
state = jstep.TrainState.create(init, optimizer, mesh=mesh)
buffer, hook = Buffer(), Buffer()
state = jstep.train(
    jstep.minimize(loss_fn, optimizer), state, jstep.from_state(buffer), last, hooks=[hook], checkpoint_dir=directory,
    progress=False, save_checkpoint_steps=4, save_checkpoint_secs=None, batch_sharding=rows,
)
print("weights", weights(state))
import hashlib
print("rows", hashlib.sha256(buffer.rows.tobytes()).hexdigest(), hashlib.sha256(hook.rows.tobytes()).hexdigest())
print("reads", buffer.reads)
"""


def large_files(directory, step):
    return sorted(path.name for path in (directory / f"model-{step}").iterdir() if path.stat().st_size == 640_000)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["own", "same"])
def test_large_positions_are_files_of_each_process(tmp_path, kind):
    whole = run(LARGE, 2, tmp_path / "whole", kind, 11)
    run(LARGE, 2, tmp_path / "parts", kind, 6)
    parts = run(LARGE, 2, tmp_path / "parts", kind, 11)
    for name in ("weights", "rows"):
        assert [printed(lines, name) for lines in parts] == [printed(lines, name) for lines in whole]
    assert all(int(printed(lines, "reads")) < 8 for lines in whole)
    (first, second) = (printed(lines, "rows").split()[0] for lines in parts)
    files = large_files(tmp_path / "parts", 11)
    assert files[0] == "hooks.0"
    assert [name.rpartition(".")[0] for name in files[1:]] == (
        ["position.process_0"] if kind == "same" else ["position.process_0", "position.process_1"]
    )
    assert (first == second) == (kind == "same")
    if kind == "same":  # on another number of processes, as all positions are equal
        alone = run(LARGE, 1, tmp_path / "parts", kind, 12)
        assert printed(alone[0], "rows").split()[0] != first
