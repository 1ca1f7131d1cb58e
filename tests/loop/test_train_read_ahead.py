"""`train`: runs are identical whether the loop reads the batches or a thread does, and however often that changes."""

import itertools
import math
import os
import signal
import threading

import jax
import pytest
from loop_runs import DATA, Counted, make_state, same, train

import jstep
from jstep.loop import feeder

UNDECIDED = 7
"""The number of the first batch that a thread reads, if one starts."""


@pytest.fixture(params=["direct", "ahead"])
def way(request, monkeypatch):
    """Sets how batches are read, whatever that takes."""

    def check_waits(calls, got):
        calls.looks = getattr(calls, "looks", 0) + 1
        if request.param == "ahead" and calls.looks == UNDECIDED:
            calls._read_ahead()

    monkeypatch.setattr(feeder, "_SECOND", -math.inf)
    monkeypatch.setattr(feeder.BatchFeeder, "_check_waits", check_waits)
    yield request.param
    assert not any(thread.name == "jstep-prefetch" for thread in threading.enumerate())


class Watched(Counted):
    """Records which batches a thread reads; `on` maps the number of a batch to what happens before it is read."""

    def __init__(self, on=None):
        super().__init__()
        self.on, self.in_thread = on or {}, []

    def __next__(self):
        if threading.current_thread() is not threading.main_thread():
            self.in_thread.append(self.at)
        if self.at in self.on:
            self.on[self.at]()
        return super().__next__()


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_runs_are_identical(way, steps_per_call):
    wanted = train(40, DATA.__getitem__, steps_per_call=steps_per_call)
    source = Watched()
    assert same(train(40, source, steps_per_call=steps_per_call), wanted)
    one_thread = itertools.islice(iter(DATA), 40)
    assert same(train(40, (batch for batch in one_thread), steps_per_call=steps_per_call), wanted)
    assert bool(source.in_thread) == (way != "direct")
    assert all(at >= UNDECIDED for at in source.in_thread)


@pytest.mark.thorough(except_for=["ahead"])
def test_a_resumed_run_is_identical(way, tmp_path):
    train(19, Watched(), checkpoint_dir=tmp_path)
    assert jstep.Saver(tmp_path).extra()["batches"] == {"value": 19}
    assert same(train(40, Watched(), checkpoint_dir=tmp_path), train(40, DATA))


@pytest.mark.thorough(except_for=["ahead-15"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_loses_no_batch(way, number, tmp_path):
    stop = Watched({20: lambda: os.kill(os.getpid(), number)})
    with pytest.raises((KeyboardInterrupt, jstep.Preempted)):
        train(40, stop, checkpoint_dir=tmp_path)
    assert 18 <= jstep.Saver(tmp_path).latest_step() <= 21
    assert same(train(40, Watched(), checkpoint_dir=tmp_path), train(40, DATA))


def test_the_contexts_of_the_caller(way):
    seen = set()
    source = Watched(dict.fromkeys(range(40), lambda: seen.add(jax.config.jax_transfer_guard_host_to_device)))
    state = make_state()
    with jax.transfer_guard("disallow"):
        ended = train(40, source, state=state)
    assert seen == {"disallow"}
    assert int(ended.global_step) == 40
