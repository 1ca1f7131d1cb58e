"""`Stopwatch`: its parts have no gaps, with switches, nested parts and errors."""

import pytest
from hook_fakes import Clock

from jstep.core.stopwatch import PARTS, Stopwatch, seconds_before_training


def test_time_belongs_to_the_innermost_part():
    clock = Clock()
    watch = Stopwatch(before=7.0, clock=clock)
    clock.now += 1
    watch.started()
    clock.now += 10
    with pytest.raises(KeyError):
        fails(watch, clock)
    clock.now += 20
    expected = {"starting": 8.0, "stepping": 30.0, "waiting": 0.0, "saving": 5.0, "evaluating": 0.0, "hooks": 4.0}
    assert watch.seconds() == expected
    assert tuple(expected) == PARTS
    assert watch.seconds() == expected  # reading changes nothing
    clock.now += 1
    assert watch.seconds() == {**expected, "stepping": 31.0}


def fails(watch, clock):
    with watch.part("saving"):
        clock.now += 2
        with watch.part("hooks"):
            clock.now += 4
        clock.now += 3
        raise KeyError


def test_waiting_begins_with_the_first_step():
    clock = Clock()
    watch = Stopwatch(clock=clock)
    for _ in range(2):
        watch.switch(watch.waiting)
        clock.now += 5
        watch.started()
    assert watch.seconds()["starting"] == watch.seconds()["waiting"] == 5.0


def test_a_past_interval_can_be_reassigned():
    clock = Clock()
    watch = Stopwatch(clock=clock)
    watch.started()
    clock.now += 4
    assert watch.seconds()["stepping"] == 4.0  # reading in between has no effect
    clock.now += 6
    watch.reassign("starting", 7.0)
    clock.now += 1
    assert (watch.seconds()["starting"], watch.seconds()["stepping"], watch.current) == (7.0, 4.0, "stepping")


def test_a_stopped_watch_stores_no_marks():
    watch = Stopwatch(clock=Clock())
    watch.stop()
    for _ in range(1000):
        watch.switch("hooks")
    assert len(watch._marks) == 0


def test_the_latest_visits_are_kept():
    clock = Clock()
    watch = Stopwatch(clock=clock)
    for n in range(300):
        for part, seconds in (("waiting", 1.0), ("stepping", n)):
            watch.switch(part)
            clock.now += seconds
    watch.switch("hooks")
    assert watch.visits("waiting") == [1.0] * 64
    assert watch.visits("stepping")[-2:] == [298, 299]
    assert watch.visits("stepping", after="hooks") == []
    assert watch.visits("hooks") == [], "this one lasts"
    watch.stop()
    for _ in range(3):
        watch.switch("stepping")
        clock.now += 5
    assert watch.visits("stepping")[-2:] == [5.0, 5.0], "they are kept if the totals are no longer read"


def test_only_the_first_run_counts_from_the_start_of_the_process(monkeypatch):
    monkeypatch.setattr("jstep.core.stopwatch._trained", set())
    assert seconds_before_training() >= 0.0
    assert seconds_before_training() == 0.0


def test_a_system_that_does_not_say_when_a_process_started(monkeypatch):
    monkeypatch.setattr("jstep.core.stopwatch._trained", set())
    monkeypatch.delattr("time.CLOCK_BOOTTIME", raising=False)
    assert seconds_before_training() == 0.0
