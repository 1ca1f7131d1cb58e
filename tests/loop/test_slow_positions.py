"""Positions of loaders that are slow to read are read rarely; a restart fetches the batches since, bit for bit."""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from points import STEP, make_state

import jstep
from jstep.data.loaders import open_source
from jstep.data.positions import RarePosition, restore_position

SLOW = 0.05


class Rows:
    """A shuffling loader with a generator of its own, whose position takes long to read."""

    def __init__(self, count: int = 10**6, slow: float = SLOW, size: int = 1) -> None:
        self.rng, self.at, self.count = np.random.default_rng(0), 0, count
        self.reads, self.seen, self._slow = 0, np.zeros(size), slow

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        self.seen[self.at % len(self.seen)] += 1
        return self.rng.normal(size=2).astype(np.float32)

    def state_dict(self) -> Any:
        self.reads += 1
        time.sleep(self._slow)
        return {"rng": self.rng, "at": self.at, "seen": self.seen}

    def load_state_dict(self, position: Any) -> None:
        self.rng, self.at, self.seen = position["rng"], position["at"], position["seen"]


def train(batches: Any, last: int, directory: Any, stop: int | None = None, **kwargs: Any) -> jstep.TrainState:
    hooks = [] if stop is None else [jstep.every(stop, lambda *_: True)]
    kwargs = {"progress": False, "log_steps": None, "save_checkpoint_secs": None} | kwargs
    return jstep.train(STEP, make_state(), batches, last, hooks=hooks, checkpoint_dir=directory, **kwargs)


def positions(directory: Path) -> dict[int, Any]:
    with jstep.Saver(directory) as saver:
        return {step: saver.extra(step)["batches"] for step in saver.all_steps()}


@pytest.mark.thorough(except_for=["1"])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_run_that_stops_between_reads_resumes_bit_for_bit(tmp_path: Path, steps_per_call: int) -> None:
    whole = train(Rows(), 40, tmp_path / "whole", steps_per_call=steps_per_call)
    for stop in (7, 13, 29, 40):
        loader = Rows()
        state = train(loader, 40, tmp_path / "parts", stop, steps_per_call=steps_per_call)
        assert loader.reads < 6
    assert state == whole
    kept = positions(tmp_path / "parts")
    assert any("after" in one for one in kept.values())  # 7, 13 and 29 are not due by steps
    assert "after" not in kept[40]
    for step, one in kept.items():
        found = Rows()
        assert next(open_source(found, step, step + 2, restore_position({"batches": one})).items) is not None
        assert found.at == step + 1
    loader = Rows()
    found = jstep.replay(STEP, whole, loader, tmp_path / "parts", 31, steps_per_call=steps_per_call)
    assert (int(found.state.global_step), loader.reads, loader.at) == (31, 0, 32)


def test_saves_due_by_steps_hold_the_position_of_their_step(tmp_path: Path) -> None:
    loader = Rows()
    train(loader, 25, jstep.Saver(tmp_path, max_to_keep=None), save_checkpoint_steps=10)
    kept = positions(tmp_path)
    assert [*kept] == [10, 20, 25]
    assert [one["value"]["at"] for one in kept.values()] == [10, 20, 25]
    assert not any("after" in one for one in kept.values())
    assert loader.reads < 8


def test_batches_that_were_fetched_and_not_trained_on_are_fetched_again(tmp_path: Path) -> None:
    class Fails(Rows):
        def __next__(self) -> Any:
            if self.at == 11:
                raise OSError("the disk is gone")
            return super().__next__()

    with pytest.raises(OSError, match="is gone"):
        train(Fails(), 30, tmp_path)
    assert positions(tmp_path)[11]["after"] == 10
    with pytest.raises(OSError, match="is gone"):  # before the first batch: the position of the checkpoint
        train(Fails(), 30, tmp_path)
    assert positions(tmp_path)[11]["after"] == 10
    assert train(Rows(), 30, tmp_path) == train(Rows(slow=0), 30, tmp_path / "whole")


def test_data_that_ended_have_ended_after_a_restart(tmp_path: Path) -> None:
    first = train(Rows(12), 30, tmp_path)
    assert int(first.global_step) == 12
    assert "after" in positions(tmp_path)[12]
    assert train(Rows(12), 30, tmp_path) == first
    assert train(Rows(20), 30, tmp_path) == train(Rows(20, slow=0), 30, tmp_path / "whole")


class Clock:
    """A clock of tests: each position takes `cost` to read, and each batch `batch` to make."""

    def __init__(self, cost: float, batch: float) -> None:
        self.now, self.cost, self.batch = 0.0, cost, batch
        self.number = self.reads = 0
        self.spent = 0.0

    def ask(self) -> Any:
        self.reads += 1
        self.now += self.cost
        self.spent += self.cost
        return {"value": self.number}

    def run(self, rare: RarePosition, batches: int) -> list[Any]:
        found = []
        for _ in range(batches):
            self.now += self.batch
            self.number += 1
            found.append(rare())
            assert found[-1]["value"] + found[-1].get("after", 0) == self.number
        return found


@pytest.mark.parametrize(("cost", "batch"), [(0.027, 0.0003), (0.001, 0.0001), (0.5, 1.0), (0.0001, 0.0001)])
def test_reading_takes_at_most_a_twentieth_of_the_time(cost: float, batch: float) -> None:
    clock = Clock(cost, batch)
    rare = RarePosition(clock.ask, lambda number: math.inf, lambda: clock.now)
    clock.run(rare, 20_000)
    assert clock.spent <= 0.05 * clock.now + cost
    assert clock.reads > 1
