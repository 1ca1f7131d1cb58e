"""Loader positions of several processes in a checkpoint, as one process restores them."""

import logging

import jax
import pytest
from sources import Positioned, Stateful

from jstep.data.loaders import open_source
from jstep.data.positions import POSITION, POSITIONS, saved_position


@pytest.fixture
def process(monkeypatch):
    def set_process(index, count):
        monkeypatch.setattr(jax, "process_index", lambda: index)
        monkeypatch.setattr(jax, "process_count", lambda: count)

    return set_process


def positions_of(*positions):
    return {POSITION: positions[0], POSITIONS: {"processes": len(positions), "positions": list(positions)}}


A, B = {"value": {"at": 3}}, {"value": {"at": 5}}


@pytest.mark.parametrize("loader", [Stateful, lambda: Positioned(state="shared")], ids=["state_dict", "get_state"])
def test_each_process_restores_its_own_position(process, loader, caplog):
    for index, first in enumerate((30, 50)):
        process(index, 2)
        assert next(open_source(loader(), 4, 9, saved_position(positions_of(A, B))).items) == first
    assert not caplog.records


@pytest.mark.parametrize("count", [1, 3, 4])
def test_another_number_of_processes_is_an_error(process, count):
    process(0, count)
    with pytest.raises(ValueError, match=rf"Stateful.*saved by 2 processes.*has {count}\.") as error:
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
        with pytest.raises(ValueError, match="Stateful must be a position, got an int"):
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
    assert "there is no checkpoint with a position of the Stateful: it starts where it is now, perhaps" in caplog.text
    assert saved_position({}) is None
    assert saved_position({"hooks": {}}) is None
