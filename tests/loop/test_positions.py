"""Loader positions of several processes in a checkpoint, as one process restores them."""

import logging

import jax
import numpy as np
import pytest
from sources import Positioned, Stateful

from jstep.core import processes
from jstep.data.loaders import open_source
from jstep.data.positions import (
    POSITION,
    POSITIONS,
    gather_positions,
    load_own_position,
    positions_elsewhere,
    saved_position,
)
from jstep.stores import tagged_json


@pytest.fixture
def process(monkeypatch):
    def set_process(index, count):
        monkeypatch.setattr(jax, "process_index", lambda: index)
        monkeypatch.setattr(jax, "process_count", lambda: count)

    return set_process


def positions_of(*positions):
    return {
        POSITION: positions[0],
        POSITIONS: {"processes": len(positions), "positions": list(positions)},
    }


A, B = {"value": {"at": 3}}, {"value": {"at": 5}}


@pytest.mark.parametrize(
    "loader", [Stateful, lambda: Positioned(state="shared")], ids=["state_dict", "get_state"]
)
def test_each_process_restores_its_own_position(process, loader, caplog):
    for index, first in enumerate((30, 50)):
        process(index, 2)
        assert next(open_source(loader(), 4, 9, saved_position(positions_of(A, B))).items) == first
    assert not caplog.records


@pytest.mark.parametrize("count", [1, 3, 4])
def test_another_number_of_processes_is_an_error(process, count):
    process(0, count)
    with pytest.raises(
        ValueError,
        match=rf"Stateful.*saved by 2 processes.*has {count}\.",
    ) as error:
        open_source(Stateful(), 4, 9, saved_position(positions_of(A, B)))
    assert "Start the run with 2 processes" in str(error.value)
    # Batches without a position are not affected, and neither is a finished run.
    assert next(open_source([0, 1, 2, 3, 4], 4, 9, saved_position(positions_of(A, B))).items) == 4
    open_source(Stateful(), 9, 9, saved_position(positions_of(A, B)))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_equal_positions_fit_any_number_of_processes(process, count, caplog):
    process(count - 1, count)
    equal = {POSITION: A, POSITIONS: {"processes": 2, "positions": [A]}}
    assert next(open_source(Stateful(), 4, 9, saved_position(equal)).items) == 30
    assert not caplog.records


def test_a_value_that_users_saved_under_the_same_name(process):
    for count in (1, 2):
        process(0, count)
        assert next(open_source([0, 1, 2, 3, 4], 4, 9, saved_position({POSITION: 3})).items) == 4
        with pytest.raises(ValueError, match="Stateful must be a position, got 3"):
            open_source(Stateful(), 4, 9, saved_position({POSITION: 3}))


def test_an_old_checkpoint_has_only_the_position_of_process_0(process, caplog):
    for index in range(2):
        process(index, 2)
        assert next(open_source(Stateful(), 4, 9, saved_position({POSITION: A})).items) == 30
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 2
    assert "one position of a loader for 2 processes" in caplog.text
    caplog.clear()
    process(0, 1)
    assert next(open_source(Stateful(), 4, 9, saved_position({POSITION: A})).items) == 30
    assert not caplog.records


def test_one_process_without_a_position(process, caplog):
    process(1, 2)
    open_source(Stateful(), 4, 9, saved_position(positions_of(A, None)))
    assert (
        "there is no checkpoint with a position of the Stateful: it starts where it is now, perhaps"
        in caplog.text
    )
    assert saved_position({}) is None
    assert saved_position({"hooks": {}}) is None


class TestPositionsInFiles:
    """Different positions are files of the checkpoint: each process writes and reads its own."""

    @staticmethod
    def save(process, monkeypatch, positions):
        """Return the `extra` and the files of a save by one process for each position."""
        count = len(positions)
        texts = []
        monkeypatch.setattr(processes, "gather_texts", lambda text: texts.append(text) or [text])
        for index, position in enumerate(positions):
            process(index, count)
            gather_positions(position, lambda: "step 4")
        monkeypatch.setattr(processes, "gather_texts", lambda text: texts)
        extras = []
        files = {}
        for index, position in enumerate(positions):
            process(index, count)
            extra, own = gather_positions(position, lambda: "step 4")
            extras.append(extra)
            files |= {name: file.read() for name, file in own.items()}
        assert all(extra == extras[0] for extra in extras)
        return extras[0], files

    def test_each_process_reads_its_own(self, process, monkeypatch):
        saved = [{"value": {"at": at}} for at in (3, 5, 3)]
        extra, files = self.save(process, monkeypatch, saved)
        assert len(files) == 3
        read = []
        for index in range(3):
            process(index, 3)
            own = load_own_position(extra, lambda name: read.append(name) or files[name])
            assert saved_position(own).value == saved[index]
        assert sorted(read) == sorted(files)

    @pytest.mark.parametrize("count", [1, 2])
    def test_files_of_equal_ones_are_loaded_once(self, process, monkeypatch, count):
        saved = {"value": tagged_json.copy_encodable({"rows": np.arange(20_000.0)})}
        monkeypatch.setattr(processes, "gather_texts", lambda text: [text, text])
        process(0, 2)
        extra, files = gather_positions(saved, lambda: "step 4")
        for index in range(count):
            process(index, count)
            once = tagged_json.FilesOnce(lambda name: files[name].read())
            own = tagged_json.resolve_files(load_own_position(extra, once), once)
            position = tagged_json.decode(saved_position(own).value["value"])
            np.testing.assert_array_equal(position["rows"], np.arange(20_000.0))
            kept, own_files = positions_elsewhere(own)
            assert kept == extra
            assert own_files == (files if index == 0 else {})

    def test_the_manifest_does_not_grow_with_positions(self, process, monkeypatch):
        large = [{"value": {"at": [at] * 5000}} for at in range(4)]
        extra, _ = self.save(process, monkeypatch, large)
        assert len(str(extra)) < 300

    @pytest.mark.parametrize("count", [1, 2, 3, 5])
    def test_a_run_without_steps_keeps_them_all(self, process, monkeypatch, count):
        saved = [{"value": {"at": 3}}, None, {"value": {"at": 5}}]
        extra, files = self.save(process, monkeypatch, saved)
        copied, names = {}, []
        for index in range(count):
            process(index, count)
            kept, own = positions_elsewhere(load_own_position(extra, files.__getitem__))
            assert kept == extra
            copied |= {name: file.read() for name, file in own.items()}
            names += own
        assert copied == files
        assert len(names) == len(files)  # none is written twice

    def test_a_file_that_holds_no_position_is_an_error(self, process, monkeypatch):
        extra, _ = self.save(process, monkeypatch, [A, B])
        for data in (b"", b"[" * 10_000, b"3", b'"position.process_0"'):
            process(0, 2)
            own = load_own_position(extra, lambda name, data=data: data)
            with pytest.raises(ValueError, match="Stateful must be a position"):
                open_source(Stateful(), 4, 9, saved_position(own))
