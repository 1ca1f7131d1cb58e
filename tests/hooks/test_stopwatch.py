"""`Stopwatch`: its latest visits, and the seconds before training."""

from hook_fakes import Clock

from jstep.core.stopwatch import Stopwatch, seconds_before_training


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


def test_only_the_first_run_counts_from_the_start_of_the_process(monkeypatch):
    monkeypatch.setattr("jstep.core.stopwatch._trained", set())
    assert seconds_before_training() >= 0.0
    assert seconds_before_training() == 0.0


def test_a_system_that_does_not_say_when_a_process_started(monkeypatch):
    monkeypatch.setattr("jstep.core.stopwatch._trained", set())
    monkeypatch.delattr("time.CLOCK_BOOTTIME", raising=False)
    assert seconds_before_training() == 0.0
