"""The file of a `History`: what is not its own stays."""

import errno
import io
import json
import math
import os
import shutil

import numpy as np
import pytest
from test_history import StopError, batch, run, stop_at, train_step

import jstep
from jstep.stores import growing_files

ROW = b'{"step": 5, "loss": 0.5}\n'


class NoSave(jstep.Hook):
    def before_save(self, step):
        return True

    def after_step(self, step, state, metrics):
        return None


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def saving(folder, every=4):
    return {"checkpoint_dir": folder, "save_checkpoint_steps": every, "save_checkpoint_secs": None}


FOREIGN = {
    "prose": (b"My notes.\n" * 100, 1),
    "csv": (b"step,loss\n1,0.5\n", 1),
    "logger": (b'{"step": 1, "loss": 0.5, "time": 1760000000}\n', 1),
    "names": (ROW + b'{"step": 6, "loss": 0.5, "phase": "train"}\n', 2),
    "step of a metric": (b'{"step": 7.0, "loss": 0.5}\n', 1),
    "again": (ROW + ROW, 2),
    "back": (ROW + b'{"step": 4, "loss": 0.5}\n', 2),
    "deep": (ROW + b"[" * 100_000 + b"\n", 2),
    "torn in the middle": (ROW + b'{"step": 6, "lo\n{"step": 7, "loss": 0.5}\n', 2),
}


def test_rows_of_a_later_version_are_refused_as_what_they_are(tmp_path):
    path = tmp_path / "log.jsonl"
    data = ROW + b'{"step": 6, "version": "2", "loss": [0.5]}\n'
    path.write_bytes(data)
    said = (
        r"got version 2 in line 2, which a later jstep wrote; "
        r"install that one, or give another path"
    )
    with pytest.raises(ValueError, match=said):
        run(3, jstep.History(path))
    with pytest.raises(ValueError, match=said):
        jstep.History.read(path)
    assert path.read_bytes() == data
    path.write_bytes(b'{"step": 6, "version": 2.0}\n')  # a metric may have this name
    assert jstep.History.read(path).names == ["version"]


@pytest.mark.thorough(except_for=["prose", "logger", "back"])
@pytest.mark.parametrize(("data", "line"), FOREIGN.values(), ids=FOREIGN)
def test_a_file_that_is_not_its_own_is_refused(data, line, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(data)
    seen = []
    for _ in range(2):  # a refusal leaves no claim behind
        with pytest.raises(ValueError, match=rf"log\.jsonl.* got line {line}, which is not a row"):
            run(3, jstep.History(path), jstep.every(1, lambda *_: seen.append(1)))
    assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["log.jsonl"]
    assert not seen
    with pytest.raises(ValueError, match=f"got line {line}, which is not a row"):
        jstep.History.read(path)


def test_rows_of_an_earlier_start_are_moved_aside(tmp_path, caplog):
    path, before = tmp_path / "history.jsonl", []
    path.write_bytes(ROW)  # also written by any logger
    for number in (1, 2):
        before.append(path.read_bytes())
        caplog.clear()
        run(4, jstep.History(path, every_n_steps=number), **saving(tmp_path / f"run{number}"))
        (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert f"history.jsonl.{number}" in record.getMessage()
    assert [(tmp_path / f"history.jsonl.{number}").read_bytes() for number in (1, 2)] == before
    assert steps(path) == [2, 4]


def test_a_branch_begins_a_file(tmp_path, caplog):
    path = tmp_path / "history.jsonl"
    run(10, jstep.History(path, every_n_steps=1), **saving(tmp_path / "trunk", 8))
    rows_of_trunk = path.read_bytes()
    trunk = tmp_path / "trunk" / "model-8"
    run(12, jstep.History(path, every_n_steps=1), start_from=trunk, **saving(tmp_path / "branch"))
    assert (tmp_path / "history.jsonl.1").read_bytes() == rows_of_trunk
    assert steps(path) == [8, 9, 10, 11, 12]
    assert caplog.text.count("has rows of another run, or of an earlier start; it is now") == 1


def test_a_start_after_a_death_before_the_first_checkpoint_renames_its_rows(tmp_path):
    path, options = tmp_path / "history.jsonl", saving(tmp_path / "run")
    with pytest.raises(StopError):
        run(6, jstep.History(path, every_n_steps=1), NoSave(), stop_at(3), **options)
    run(6, jstep.History(path, every_n_steps=1), **options)
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    assert steps(tmp_path / "history.jsonl.1") == [1, 2, 3]


def test_a_run_that_goes_back_drops_its_rows_also_in_a_renamed_folder(tmp_path, caplog):
    options = saving(tmp_path / "a")
    run(10, jstep.History(tmp_path / "a" / "history.jsonl", every_n_steps=1), **options)
    shutil.rmtree(tmp_path / "a" / "model-10")
    os.rename(tmp_path / "a", tmp_path / "b")
    path = tmp_path / "b" / "history.jsonl"
    whole = path.read_bytes()
    with pytest.raises(StopError):
        run(
            10, jstep.History(path, every_n_steps=1), NoSave(), stop_at(9), **saving(tmp_path / "b")
        )
    assert steps(path) == [*range(1, 10)]
    assert whole.startswith(path.read_bytes())
    assert "is now" not in caplog.text


@pytest.mark.thorough(except_for={"torn": [b'{"step": 6, "lo', b"\0" * 4000]})
@pytest.mark.parametrize("torn", [b'{"step": 6, "lo', b"\0" * 4000, b'{"step": 6\0\0'])
def test_a_torn_last_line_is_left_out(torn, tmp_path, caplog):
    path, options = tmp_path / "history.jsonl", saving(tmp_path / "run", 100)
    run(5, jstep.History(path, every_n_steps=1), **options)
    with open(path, "ab") as file:
        file.write(torn)
    assert [row["step"] for row in jstep.History.read(path).rows] == [*range(1, 6)]
    caplog.clear()
    run(6, jstep.History(path, every_n_steps=1), **options)
    assert steps(path) == [*range(1, 7)]
    assert "history" not in caplog.text


def test_what_is_not_a_regular_file_is_never_opened(tmp_path):
    path = tmp_path / "history.jsonl"
    history = jstep.History(path)
    os.mkfifo(path)
    with pytest.raises(ValueError, match="must be a regular file, got a directory, link or device"):
        jstep.History(path)
    with pytest.raises(ValueError, match="must be a regular file"):
        run(3, history)
    with pytest.raises(OSError, match="is not a regular file"):
        jstep.History.read(path)


@pytest.mark.parametrize("is_dangling", [False, True])
def test_nothing_is_written_through_a_link(is_dangling, tmp_path):
    path, target = tmp_path / "history.jsonl", tmp_path / "elsewhere.jsonl"
    history = jstep.History(path)
    if not is_dangling:
        target.write_bytes(ROW)
    path.symlink_to(target)
    with pytest.raises(ValueError, match="must be a regular file"):
        run(3, history)
    assert (target.read_bytes() if target.exists() else None) == (None if is_dangling else ROW)


class Disk(io.FileIO):
    room = math.inf

    def write(self, data):
        count = int(min(Disk.room, len(data)))
        Disk.room -= count
        if data and not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data[:count])


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr(growing_files, "open_own", lambda path, beginning: Disk(path, "a+"))
    monkeypatch.setattr(Disk, "room", math.inf)
    return Disk


def test_the_error_of_a_full_disk_names_the_file_and_a_later_run_writes_the_rows(
    disk, tmp_path, caplog
):
    path = tmp_path / "history.jsonl"
    history, whole = (
        jstep.History(path, every_n_steps=1),
        jstep.History(tmp_path / "whole.jsonl", every_n_steps=1),
    )
    run(20, whole)

    def fill(step, state, metrics):
        if step == 5:
            disk.room = 30

    with pytest.raises(OSError, match="rows of a History cannot be written") as found:
        run(20, history, jstep.every(1, fill))
    assert found.value.filename == str(path)
    at = int(found.value.state.global_step)
    assert [row["step"] for row in history.rows] == [*range(1, at + 1)]
    written = steps(path)
    assert written == [*range(1, len(written) + 1)]
    assert f"the rows from step {len(written) + 1} on are only in memory" in caplog.text
    disk.room = math.inf
    jstep.train(train_step, found.value.state, batch, 20, hooks=[history])
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_metric_called_step_has_another_name(tmp_path):
    optimizer = jstep.gradient_descent(0.1)
    aux = {"step": 7.0}
    step = jstep.minimize(lambda params, x: (params["w"] * x, aux), optimizer, has_aux=True)
    path = tmp_path / "history.jsonl"
    histories = [jstep.History(path, every_n_steps=1), jstep.History(every_n_steps=1)]
    for last_step in (3, 5):
        state = jstep.TrainState.create({"w": np.float32(1)}, optimizer)
        jstep.train(
            step,
            state,
            lambda _: np.float32(1),
            last_step,
            hooks=histories,
            **saving(tmp_path / "run"),
        )
    assert histories[0].rows == histories[1].rows == jstep.History.read(path).rows
    assert [(row["step"], row["step_"]) for row in histories[0].rows] == [
        (at, 7.0) for at in range(1, 6)
    ]
    pandas = pytest.importorskip("pandas")
    assert isinstance(histories[0].to_pandas(), pandas.DataFrame)
    assert histories[0].to_pandas().index.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "make",
    [jstep.History, lambda path: jstep.FingerprintHook(every_n_steps=1, path=path)],
    ids=["history", "bits"],
)
def test_a_file_that_another_run_is_writing_is_refused_before_the_first_step(make, tmp_path):
    """The rows of the run that goes on are those of a run alone, and the file is free when it has
    ended."""
    path, alone, steps_of_others = tmp_path / "log.jsonl", tmp_path / "alone.jsonl", []

    def start_another(step, state, metrics):
        with pytest.raises(
            ValueError,
            match=r"log\.jsonl.* another run is writing this file; give each run its own",
        ):
            run(6, make(path), jstep.every(1, lambda step, *_: steps_of_others.append(step)))

    run(6, make(path), jstep.every(2, start_another))
    run(6, make(alone))
    assert not steps_of_others
    assert path.read_bytes() == alone.read_bytes()
    run(3, make(path))
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".jstep-writer")]
