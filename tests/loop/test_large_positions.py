"""Positions and states of hooks above 64 kB: read where a save needs them, and files of the
checkpoint."""

import time

import numpy as np
import pytest
from points import STEP, make_state

import jstep
from jstep.array_store.array_reader import ArrayReader
from jstep.array_store.array_writer import FILES
from jstep.array_store.listing import directory_spec, read_manifest
from jstep.data.loaders import open_source
from jstep.data.positions import saved_position
from jstep.look.cli import main
from jstep.stores.tagged_arrays import LARGE

ROWS = 20_000  # of 8 bytes


class Buffer:
    """A replay buffer on the host, which is changed in place, with a view of its last rows and two
    generators."""

    def __init__(self, fails_at=None):
        self.rows, self.size, self.reads, self.loads = np.zeros((ROWS, 2), np.float32), 0, 0, 0
        self.newest, self.rng = self.rows[-9:], np.random.default_rng(0)
        self.environment = {"rng": np.random.default_rng(1), "log": b"x" * (LARGE + 1)}
        self.fails_at = fails_at

    def __call__(self, step, state):
        if step == self.fails_at:
            self.rng.normal()  # it has moved on
            raise OSError("the environment is gone")
        self.rows[self.size % ROWS] = self.environment["rng"].normal(size=2)
        self.newest[self.size % 9] += 1
        self.size += 1
        return self.rows[self.rng.integers(0, self.size)] + self.rows[-1]

    def tell(self, step, state, metrics):
        self.rows[step] += np.float32(metrics["loss"])

    def state_dict(self):
        self.reads += 1
        kept = vars(self).copy()
        return {name: kept[name] for name in ("rows", "size", "rng", "environment")}

    def load_state_dict(self, position):
        self.loads += 1
        vars(self).update(position)
        self.newest = self.rows[-9:]


def train(buffer, last, directory, hooks=(), **kwargs):
    kwargs = {"progress": False, "log_steps": None, "save_checkpoint_secs": None} | kwargs
    tells = [jstep.every(1, buffer.tell)] if hasattr(buffer, "tell") else []
    source = jstep.from_state(buffer)
    return jstep.train(
        STEP, make_state(), source, last, hooks=[*tells, *hooks], checkpoint_dir=directory, **kwargs
    )


def by_hand(steps):
    state, buffer = make_state(), Buffer()
    for step in range(steps):
        state, metrics = STEP(state, buffer(step, state))
        buffer.tell(step + 1, state, metrics)
    return state


def files_of(directory, step):
    """The files of a checkpoint that hold values of the host, with their sizes."""
    path = str(directory / f"model-{step}")
    reader = ArrayReader(
        directory_spec(path), read_manifest(path), lambda future, nbytes: future.result()
    )
    names = [name.removeprefix(FILES) for name in reader.files()]
    return {name: len(reader.read_file(name)) for name in names}


def test_a_large_position_is_read_where_a_save_needs_it(tmp_path):
    buffer = Buffer()
    train(buffer, 60, tmp_path, save_checkpoint_steps=20)
    # It is read for its size, for three saves, and to see if the last one is up to date.
    assert buffer.reads <= 2 + 3 + 1
    small = Buffer()
    small.rows, small.newest, small.environment["log"] = small.rows[:100], small.rows[91:100], b""
    train(small, 60, tmp_path / "small", save_checkpoint_steps=20)
    assert small.reads > 60
    assert files_of(tmp_path / "small", 60) == {}


@pytest.mark.thorough(except_for=["12"])
@pytest.mark.parametrize("fails_at", [3, 12])
def test_an_error_in_fn_says_why_nothing_is_saved(tmp_path, fails_at):
    with pytest.raises(OSError, match="is gone") as error:
        train(Buffer(fails_at), 20, tmp_path, save_checkpoint_steps=10)
    assert error.value.state.global_step == fails_at
    (note,) = [note for note in error.value.__notes__ if note.startswith("jstep:")]
    assert (
        f"while batch {fails_at} was fetched; "
        f"the state after step {fails_at} is in the exception's `state`"
    ) in note
    assert "is not saved, because the data source has advanced" in note
    assert (
        "; there is no checkpoint yet" if fails_at == 3 else "; a restart resumes from model-10"
    ) in note
    assert jstep.Saver(tmp_path).all_steps() == ([] if fails_at == 3 else [10])
    assert train(Buffer(), 20, tmp_path) == by_hand(20)


class Remembers(jstep.Hook):
    """A hook with a large memory."""

    def __init__(self, changes_at_end=False):
        self.memory, self._changes = np.zeros((ROWS, 2)), changes_at_end

    def after_step(self, step, state, metrics):
        self.memory[step] += step

    def end(self, step, state):
        return state.replace(params={"w": state.params["w"] + 1}) if self._changes else None

    def get_state(self):
        return {"memory": self.memory}

    def set_state(self, value):
        self.memory = value["memory"]


def test_large_memories_of_hooks_are_files(tmp_path):
    class Callback(Remembers):
        def __call__(self, step, state, results):
            self.memory[step] += step

    for stop in (4, 8):
        hook, callback = Remembers(), Callback()
        evaluation = jstep.EvaluationHook(
            lambda state: {"loss": 1.0}, every_n_steps=2, callbacks=[callback]
        )
        train(Buffer(), stop, tmp_path, [hook, evaluation])
        sizes = files_of(tmp_path, stop)
        assert sorted(sizes) == [
            "hooks.0",
            "hooks.1",
            "position.process_0.0",
            "position.process_0.1",
        ]
        assert sizes["hooks.0"] == sizes["hooks.1"] == ROWS * 16
    np.testing.assert_array_equal(hook.memory[:10, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0])
    np.testing.assert_array_equal(callback.memory[:10, 0], [0, 0, 2, 0, 4, 0, 6, 0, 8, 0])


def test_a_corrupted_file_is_found(tmp_path, capsys):
    train(Buffer(), 5, tmp_path)
    assert main(["inspect", str(tmp_path), "--verify"]) == 0
    saver = jstep.Saver(tmp_path)
    position = saver.read_file("position.process_0.0", 5)
    for path in (tmp_path / "model-5" / "d").iterdir():
        data = bytearray(path.read_bytes())
        if (at := data.find(position[80_000:80_100])) >= 0:
            data[at] ^= 1
            path.write_bytes(data)
    assert int(saver.restore(make_state()).global_step) == 5, "the state is intact"
    with pytest.raises(
        jstep.CheckpointError,
        match=r"the file 'position\.process_0\.0' has another checksum",
    ):
        saver.read_file("position.process_0.0", 5)
    with pytest.raises(
        jstep.CheckpointError,
        match=r"the file 'position\.process_0\.0' has another checksum",
    ):
        train(Buffer(), 6, saver)
    assert main(["inspect", str(tmp_path), "--verify"]) != 0
    assert "position.process_0.0" in capsys.readouterr().err


# Positions of loaders that are slow to read are read rarely; a restart fetches the batches since,
# bit for bit.

SLOW = 0.05


class Rows:
    """A shuffling loader with a generator of its own, whose position takes long to read."""

    def __init__(self, count=10**6, slow=SLOW, size=1):
        self.rng, self.at, self.count = np.random.default_rng(0), 0, count
        self.reads, self.seen, self._slow = 0, np.zeros(size), slow

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        self.seen[self.at % len(self.seen)] += 1
        return self.rng.normal(size=2).astype(np.float32)

    def state_dict(self):
        self.reads += 1
        time.sleep(self._slow)
        return {"rng": self.rng, "at": self.at, "seen": self.seen}

    def load_state_dict(self, position):
        self.rng, self.at, self.seen = position["rng"], position["at"], position["seen"]


def train_slow(batches, last, directory, stop=None, **kwargs):
    hooks = [] if stop is None else [jstep.every(stop, lambda *_: True)]
    kwargs = {"progress": False, "log_steps": None, "save_checkpoint_secs": None} | kwargs
    return jstep.train(
        STEP, make_state(), batches, last, hooks=hooks, checkpoint_dir=directory, **kwargs
    )


def positions(directory):
    with jstep.Saver(directory) as saver:
        return {step: saver.extra(step)["batches"] for step in saver.all_steps()}


@pytest.mark.thorough(except_for=["1"])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_run_that_stops_between_reads_resumes_bit_for_bit(tmp_path, steps_per_call):
    whole = train_slow(Rows(), 40, tmp_path / "whole", steps_per_call=steps_per_call)
    for stop in (7, 13, 29, 40):
        loader = Rows()
        state = train_slow(loader, 40, tmp_path / "parts", stop, steps_per_call=steps_per_call)
        assert loader.reads < 6
    assert state == whole
    kept = positions(tmp_path / "parts")
    assert any("after" in one for one in kept.values())  # 7, 13 and 29 are not due by steps
    assert "after" not in kept[40]
    for step, one in kept.items():
        found = Rows()
        assert (
            next(open_source(found, step, step + 2, saved_position({"batches": one})).items)
            is not None
        )
        assert found.at == step + 1
    loader = Rows()
    found = jstep.replay(STEP, whole, loader, tmp_path / "parts", 31, steps_per_call=steps_per_call)
    assert (int(found.state.global_step), loader.reads, loader.at) == (31, 0, 32)


def test_saves_due_by_steps_hold_the_position_of_their_step(tmp_path):
    loader = Rows()
    train_slow(loader, 25, jstep.Saver(tmp_path, max_to_keep=None), save_checkpoint_steps=10)
    kept = positions(tmp_path)
    assert [*kept] == [10, 20, 25]
    assert [one["value"]["at"] for one in kept.values()] == [10, 20, 25]
    assert not any("after" in one for one in kept.values())
    assert loader.reads < 8


@pytest.mark.thorough
def test_batches_that_were_fetched_and_not_trained_on_are_fetched_again(tmp_path):
    class Fails(Rows):
        def __next__(self):
            if self.at == 11:
                raise OSError("the disk is gone")
            return super().__next__()

    with pytest.raises(OSError, match="is gone"):
        train_slow(Fails(), 30, tmp_path)
    assert positions(tmp_path)[11]["after"] == 10
    with pytest.raises(OSError, match="is gone"):
        # Before the first batch, the position is that of the checkpoint.
        train_slow(Fails(), 30, tmp_path)
    assert positions(tmp_path)[11]["after"] == 10
    assert train_slow(Rows(), 30, tmp_path) == train_slow(Rows(slow=0), 30, tmp_path / "whole")


@pytest.mark.thorough
def test_data_that_ended_have_ended_after_a_restart(tmp_path):
    first = train_slow(Rows(12), 30, tmp_path)
    assert int(first.global_step) == 12
    assert "after" in positions(tmp_path)[12]
    assert train_slow(Rows(12), 30, tmp_path) == first
    assert train_slow(Rows(20), 30, tmp_path) == train_slow(
        Rows(20, slow=0), 30, tmp_path / "whole"
    )
