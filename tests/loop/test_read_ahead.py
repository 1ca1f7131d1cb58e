"""How batches are read: decided by measured times, of which these tests invent all."""

import random

import pytest

from jstep.loop.feeder import Choice, ReadAhead, cost, decide


def calls(waited, rest, n=8, steps=1):
    return [(waited * steps, rest * steps, steps)] * n


# One decision


def test_the_cost_of_a_step():
    assert cost(calls(1.0, 2.0)) == cost(calls(1.0, 2.0, steps=4)) == (1.0, 3.0)
    saves = [*calls(1.0, 2.0), (1.0, 500.0, 1)]
    assert cost(saves) == (1.0, 3.0)
    every_second = [*calls(0.0, 2.0), *calls(1.0, 2.0)]
    assert cost(every_second) == (7 / 15, 2.0 + 7 / 15)
    preempted = [*calls(1.0, 2.0, 7), (500.0, 2.0, 1)]
    assert cost(preempted) == (1.0, 3.0)


def test_there_is_no_trial_of_a_thread_that_has_nothing_to_hide():
    assert decide(Choice(), calls(0.04, 1.0)) == Choice(calls=8, patience=pytest.approx(-8 * 1.04))
    assert decide(Choice(calls=64), calls(0.0, 1.0)).calls == 64


def test_there_is_no_trial_for_batches_that_take_less_than_handing_them_over():
    assert not decide(Choice(), calls(9e-5, 1e-5)).is_trial
    assert decide(Choice(), calls(2e-4, 1e-5)).is_trial


def test_waiting_starts_a_trial():
    assert decide(Choice(), calls(0.5, 1.0)) == Choice(ahead=True, calls=8, is_trial=True, usual=1.5, trial=8)


@pytest.mark.parametrize(("ahead", "now"), [(True, 0.96), (True, 1.0), (True, 3.0), (False, 1.06), (False, 3.0)])
def test_a_trial_that_does_not_win_ends(ahead, now):
    choice = decide(Choice(ahead=ahead, is_trial=True, usual=1.0, trial=8), calls(0.0, now))
    assert (choice.ahead, choice.is_trial) == (not ahead, False)
    assert choice.trial == 16
    # The loss is at most one percent of the time until the next trial.
    assert choice.patience == pytest.approx(max(16 * now * 8, 100 * (now - 1.0) * 8))


@pytest.mark.parametrize(("ahead", "now"), [(True, 0.5), (True, 0.94), (False, 0.5), (False, 1.04)])
@pytest.mark.parametrize("again", [0.9, 0.94, 0.96, 1.04, 1.06, 2.0])
def test_a_trial_must_win_against_the_calls_after_it_too(ahead, now, again):
    won = decide(Choice(ahead=ahead, is_trial=True, usual=1.0, trial=8), calls(0.0, now))
    assert won == Choice(ahead=not ahead, calls=won.calls, is_trial=True, is_second=True, usual=now, trial=8)
    choice = decide(won, calls(0.0, again * now))
    # A thread must gain five percent.
    assert choice.ahead == (again > 1 / 0.95 if ahead else again < 0.95)
    assert (choice.is_trial, choice.is_second) == (False, False)
    assert choice.patience == pytest.approx(16 * again * now * 8)


def test_a_machine_that_becomes_quicker_during_a_trial_changes_nothing():
    _, ways = run(lambda n: tuple((1.0 if n < 8 else 0.5) * time for time in (0.2, 0.4, 0.3, 0.4)), 400)
    assert sum(ways) < 60
    assert not ways[-1]


def test_the_next_trial_waits_for_its_time_and_then_happens_whichever_way_is_used():
    choice = Choice(ahead=True, patience=10.0)
    choice = decide(choice, calls(0.0, 1.0))
    assert choice == Choice(ahead=True, calls=8, patience=2.0)
    assert decide(choice, calls(0.0, 1.0)) == Choice(calls=8, is_trial=True, usual=1.0)
    assert decide(Choice(patience=2.0), calls(0.5, 1.0)).ahead


# Whole runs


def run(machine, steps, *, noise=0.0):
    """Simulate a run; return its time, and how each batch was read.

    Args:
        machine: `machine(step)` returns the times of a batch and of a step if the loop reads, and the times that it
            waits and steps if a thread reads.
        steps: The number of steps.
        noise: The probability that a wait or a step takes 50 times as long as a batch and a step.
    """
    rng = random.Random(0)
    read_ahead, now, ways = ReadAhead(), 0.0, []
    waited = rest = 0.0
    for step in range(steps):
        ahead = read_ahead.after_call(waited, rest, 1)
        times = machine(step)
        waited, rest = times[2:] if ahead else times[:2]
        waited += 50 * sum(times[:2]) * (rng.random() < noise)
        rest += 50 * sum(times[:2]) * (rng.random() < noise)
        now += waited + rest
        ways.append(ahead)
    return now, ways


MACHINES = {
    # milliseconds: a batch, a step; the wait for the thread, a step beside it
    "a thread that costs four times as much": (0.06, 0.09, 0.3, 0.3),
    "a thread that costs a little": (0.02, 0.2, 0.03, 0.22),
    "a loader of 10 ms": (10.0, 10.0, 0.1, 10.1),
    "a loader slower than the steps": (10.0, 1.0, 9.0, 1.05),
    "batches at hand": (0.001, 0.1, 0.03, 0.15),
    "steps that wait for the device": (3.0, 7.0, 0.0, 10.0),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_run_takes_little_longer_than_the_better_way(name, noise):
    batch, step, waited, beside = MACHINES[name]
    best = min(batch + step, waited + beside) * 4000 + noise * 2 * 50 * (batch + step) * 4000
    taken, _ = run(lambda n: MACHINES[name], 4000, noise=noise)
    assert taken < (1.03 if noise == 0.0 else 1.15) * best


def test_a_machine_of_another_speed_decides_alike():
    def other(speed):
        return run(lambda n: tuple(speed * time for time in MACHINES["a loader of 10 ms"]), 1000)[1]

    assert other(2.0**-10) == other(1.0) == other(2.0**10)


def test_the_choice_follows_a_loader_that_changes():
    quick, slow = (0.01, 10.0, 0.1, 10.2), (10.0, 10.0, 0.1, 10.1)
    for first in (4, 40, 400):
        _, ways = run(lambda n, first=first: quick if n < first else slow, 2 * first + 100)
        assert not any(ways[:first])
        assert all(ways[-20:])
    costly = (0.1, 1.0, 1.0, 3.0)
    _, ways = run(lambda n: slow if n < 1000 else costly, 4000)
    assert sum(ways[500:1000]) > 450
    assert sum(ways[-500:]) < 100  # one trial
