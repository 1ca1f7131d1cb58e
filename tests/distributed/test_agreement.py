"""What processes agree on, with threads in their place: values, texts, errors, shapes, signals and
the time limit."""

import signal
import threading
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import raising
from fellows import Fellows

from jstep.core import agreed_shapes, processes, signals
from jstep.core.agreed_clock import AgreedClock
from jstep.core.agreed_shapes import AgreedShapes
from jstep.core.signals import StopSignals
from jstep.data.positions import gather_positions


@pytest.fixture
def three(monkeypatch):
    return Fellows(monkeypatch, 3)


def test_any_and_max_of_all_processes(three):
    assert three.each(lambda i: processes.any_process(i == 2)) == [True] * 3
    assert three.each(lambda i: processes.any_process(False)) == [False] * 3
    rows = np.array([[1, 5], [2, 0], [0, 4]], np.int32)
    found = three.each(lambda i: processes.max_over_processes(rows[i]))
    assert [one.tolist() for one in found] == [[2, 5]] * 3


def test_texts_of_all_processes_in_order(three):
    """The first 952 bytes are in the message that says what is exchanged; rooms of few sizes
    follow, if need be."""
    for longest, rest in (
        (0, []),
        (952, []),
        (953, [1024]),
        (952 + 1024, [1024]),
        (952 + 1025, [2048]),
    ):
        texts = ["é", "", "x" * longest]
        three.exchanges.clear()
        assert three.each(lambda i, texts=texts: processes.gather_texts(texts[i])) == [texts] * 3
        assert [one.shape for one in three.exchanges] == [(3, 1024), *((3, room) for room in rest)]


def test_processes_that_exchange_different_things_are_an_error_of_all(three):
    """The first message has one shape, whatever follows: in programs that do not fit, all would
    wait for ever."""

    def exchange(index):
        if index == 1:
            return processes.gather_texts("x" * 5000)
        return processes.any_process(False) if index else processes.broadcast_ints(1, 2)

    text = (
        "numbers of process 0, int32[2, 2] on process 0; texts on process 1; "
        "numbers, bool[1] on process 2. Branch"
    )
    for error in three.each(exchange):
        assert type(error) is RuntimeError
        assert text in str(error)


def test_integers_and_bytes_are_those_of_process_0(three):
    numbers = [0, 1, 2**31, 2**61 + 12345, -1, -(2**40)]
    assert (
        three.each(lambda i: processes.broadcast_ints(*(n + i for n in numbers))) == [numbers] * 3
    )
    for data in (b"", b"a", bytes(range(256))):
        others = [data, b"longer" * 100, b""]
        assert (
            three.each(lambda i, others=others: processes.broadcast_bytes(others[i])) == [data] * 3
        )


def test_a_save_of_processes_that_did_not_iterate_alike_is_an_error_of_all(three):
    def gather(index, *progress):
        extra, files = gather_positions({"value": index // 2}, lambda: progress[index])
        return extra, {name: file.read() for name, file in files.items()}

    names = [f"position.process_{process}" for process in range(3)]
    extra = {"batches_of_processes": {"processes": 3, "positions": names}}
    texts = [b'{"value": 0}', b'{"value": 0}', b'{"value": 1}']
    saved = [(extra, {name: text}) for name, text in zip(names, texts, strict=True)]
    assert three.each(lambda i: gather(i, *["step 4"] * 3)) == saved
    exchanges = len(three.exchanges)
    errors = three.each(lambda i: gather(i, "step 4", "step 5", "step 4"))
    text = (
        "the processes of this run must run the same iterations, got at this save: "
        "step 4 on processes 0, 2; step 5 on process 1"
    )
    assert {(type(error), text in str(error)) for error in errors} == {(RuntimeError, True)}
    assert len(three.exchanges) == 2 * exchanges


def test_an_error_of_one_process_is_an_error_of_all(three):
    def fails(index):
        if index:
            raise KeyError(f"of process {index}")
        return "fine"

    def on_all(index):
        return processes.share_errors(lambda: fails(index), "it cannot be read", OSError)

    here, *others = three.each(on_all)
    assert type(here) is OSError
    assert str(here) == "it cannot be read: process 1: KeyError: 'of process 1'"
    assert [repr(error) for error in others] == [
        "KeyError('of process 1')",
        "KeyError('of process 2')",
    ]
    assert three.each(lambda i: processes.share_errors(lambda: i * 2, "none fails")) == [0, 2, 4]


def test_shapes_are_compared_once_and_errors_name_what_differs(three, monkeypatch):
    """Arrays of one process are told nobody; with `shapes`, which stand for them, the leaves are
    not looked at."""
    agreed = [AgreedShapes() for _ in range(3)]
    same, other = (
        {"x": jnp.ones((2, 3)), "y": jnp.ones(2)},
        {"x": jnp.ones((2, 4)), "y": jnp.ones(2)},
    )
    assert three.each(lambda i: agreed[i].check(None, ({"x": jnp.ones(i)},))) == [None] * 3
    assert not three.exchanges
    monkeypatch.setattr(agreed_shapes, "_spans_processes", lambda leaf: isinstance(leaf, jax.Array))
    for _ in range(2):
        assert three.each(lambda i: agreed[i].check(None, (same,))) == [None] * 3
        assert three.each(lambda i: agreed[i].check(None, (same,), "known")) == [None] * 3
    assert len(three.exchanges) == 2  # once for each
    assert (
        three.each(lambda i: agreed[i].check(None, (other if i else same,), "known")) == [None] * 3
    )
    errors = three.each(lambda i: agreed[i].check(None, (other if i == 1 else same,), "new"))
    assert {str(error) for error in errors} == {
        "batch: must be alike on all processes, got float32[2,3] at 'x', "
        "float32[2] at 'y' on process 0, "
        "float32[2,4] at 'x', float32[2] at 'y' on 1"
    }
    fewer = three.each(
        lambda i: agreed[i].check(None, (same["x"],) if i < 2 else (same["x"], same["y"]), "other")
    )
    words = "got float32[2,3] on process 0, float32[2,3] at '0', float32[2] at '1' on 2"
    assert words in str(fewer[0])
    kept = three.each(
        lambda i: agreed[i].check(None, (same["y"],) if i < 2 else (same["y"], same["y"]), "new")
    )
    assert all(isinstance(error, ValueError) for error in kept)  # what failed is not known


def test_all_processes_leave_with_the_signal_of_one(three, monkeypatch):
    """JAX's service says at which call; SIGTERM of the service is less than the signal that one
    process has."""
    calls = {i: iter([False, True]) for i in range(3)}
    monkeypatch.setattr(processes, "should_stop", lambda: next(calls[three.index]))
    monkeypatch.setattr(processes, "request_stop", lambda: asked.append(three.index))
    asked = []

    def stopped(index):
        stop = StopSignals()
        if index == 1:
            stop._handle(signal.SIGHUP, None)
            stop._handle(signal.SIGTERM, None)  # the service's, and the first one counts
        if index == 2:
            stop._handle(signal.SIGINT, None)
        stop.check()  # waits do not end here: the others would wait for this process
        first = stop.poll_stop_signal()
        last = [stop.poll_stop_signal(), stop.poll_stop_signal()]  # the service is asked no more
        error = stop.stop_error("at step 3")
        return first, last, stop._is_limit, stop.received, str(error), getattr(error, "code", None)

    times = {1: 1.7e9, 2: 1.7e9 + 90}
    monkeypatch.setattr(signals, "time", types.SimpleNamespace(time=lambda: times[three.index]))
    text = "SIGHUP at processes 1, 2 of 3 (2023-11-14 22:13:20 UTC) stopped the run at step 3"
    assert three.each(stopped) == [
        (False, [True, True], False, signal.SIGHUP, text, 129),
        (False, [True, True], False, signal.SIGHUP, text, 129),
        (False, [True, True], False, signal.SIGINT, text, None),
    ]
    assert sorted(asked) == [1, 2]


def test_the_time_limit_is_that_of_process_0(three, monkeypatch):
    monkeypatch.setattr(processes, "should_stop", lambda: False)

    clocks = {i: iter([0.0, 4.0, 9.9, 10.0] if i == 0 else [100.0] * 4) for i in range(3)}
    monkeypatch.setattr(
        signals, "time", types.SimpleNamespace(monotonic=lambda: next(clocks[three.index]))
    )

    def stopped(index):
        stop = StopSignals(lambda: 10.0)
        assert stop._timer is None
        polls = [stop.poll_stop_signal() for _ in range(3)]
        return polls, stop._is_limit, stop.received, str(stop.stop_error("at step 3"))

    expected = ([False, False, True], True, signal.SIGTERM, "stop_secs stopped the run at step 3")
    assert three.each(stopped) == [expected] * 3


def test_a_signal_that_comes_too_late_for_the_others(three, monkeypatch):
    monkeypatch.setattr(processes, "_has_stopped", threading.Event())

    def left(index, number):
        stop = StopSignals()
        stop.received, stop.received_at = (number, 1e9) if index == 1 and number else (None, None)
        stop.agree_at_end()
        return stop.received

    assert three.each(lambda i: left(i, None)) == [None] * 3
    processes.check_no_other_run()
    assert three.each(lambda i: left(i, signal.SIGHUP)) == [signal.SIGHUP] * 3
    assert three.each(lambda i: left(i, signal.SIGINT)) == [
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGTERM,
    ]
    # JAX's service, which has the request, would stop it.
    with pytest.raises(RuntimeError, match="a signal stopped an earlier run"):
        processes.check_no_other_run()


# Which steps processes agree on by the clock of process 0: two clocks in one process, and a
# broadcast between them.

SECS = 10.0


class Two:
    """Process 0 and another one, whose clock runs at another speed; each step takes as long as is
    given."""

    def __init__(self, secs=SECS, speed=3.0):
        self.now, self.sent, self.step, self.asked = 100.0, [0, 0], 0, ([], [])
        self.clocks = (
            AgreedClock(secs, lambda: self.now),
            AgreedClock(secs, lambda: 7.0 + speed * self.now),
        )

    def _send(self, *numbers):
        self.asked[0].append(self.step)
        self.sent = [int(number) for number in numbers]
        return self.sent

    def _receive(self, *numbers):
        self.asked[1].append(self.step)
        return self.sent

    def due(self, secs):
        """Take a step; whether both say that the period is over."""
        self.step, self.now = self.step + 1, self.now + secs
        with mock.patch.object(processes, "broadcast_ints", self._send):
            first = self.clocks[0].due(self.step)
        with mock.patch.object(processes, "broadcast_ints", self._receive):
            second = self.clocks[1].due(self.step)
        assert first == second
        assert self.asked[0] == self.asked[1]  # or one of them would wait in a collective
        return first


def test_both_are_due_at_the_same_steps_by_the_clock_of_process_0():
    two, due = Two(), []
    for _ in range(400):
        if two.due(0.25):
            due.append(two.step)
            for clock in two.clocks:
                clock.done()
    gaps = [later - earlier for earlier, later in zip([0, *due], due, strict=False)]
    assert set(gaps) <= {40, 41, 42, 43, 44}  # 10 s, and at most a tenth of the period later
    assert len(two.asked[0]) <= 16 * len(due)  # of 40 steps: about ten times a period


def test_a_long_period_takes_few_exchanges():
    """Each one drains the device: by the time that is left, and at least every 30 s."""
    two = Two(4 * 3600.0, speed=1.0)
    began = two.now
    while not two.due(2.0):
        pass
    assert two.now - began == pytest.approx(4 * 3600, abs=10)
    assert len(two.asked[0]) < 530


@pytest.mark.parametrize("slower", [2, 8])
@pytest.mark.parametrize("changes_after", [0.2, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("secs", [60.0, 600.0])
def test_a_period_ends_late_by_seconds_if_steps_become_slower(secs, changes_after, slower):
    """A mean of the whole period would plan the last exchange by steps that are not taken any
    more."""
    two, step_secs = Two(secs, speed=0.5), 0.1
    began = two.now
    while not two.due(step_secs if two.now - began < changes_after * secs else slower * step_secs):
        pass
    assert 0 <= two.now - began - secs < 10.0
    assert len(two.asked[0]) < secs + 20  # about one exchange in one or two seconds


def test_the_first_step_which_is_dispatched_long_before_it_ends_is_no_sample():
    two = Two(secs=100.0)
    two.due(0.0)
    for _ in range(3):
        two.due(1e-6)  # the host runs ahead
    while not two.due(5.0):
        pass
    assert two.now - 200.0 < 10.0


def test_a_period_ends_exactly_with_its_last_second():
    two = Two()
    assert not two.due(9.999)
    assert two.due(0.001 + 1e-9)
    exact = Two(secs=16.0)
    assert exact.due(16.0)


def test_one_process_communicates_nothing():
    now = [0.0]
    clock = AgreedClock(1.0, lambda: now[0])
    assert not clock.due(1)
    now[0] = 1.0
    assert any(clock.due(step) for step in range(2, 200_000))


# Whether JAX's preemption service has stopped the processes, once and for all.


def test_a_stop_is_remembered_and_refuses_another_run(monkeypatch):
    answers = iter([False, False, True])
    monkeypatch.setattr(
        processes.multihost_utils, "reached_preemption_sync_point", lambda step: next(answers)
    )
    monkeypatch.setattr(processes, "_has_stopped", threading.Event())
    assert not processes.should_stop()
    assert not processes.should_stop()
    processes.check_no_other_run()
    assert processes.should_stop()
    with pytest.raises(RuntimeError, match="a signal stopped an earlier run"):
        processes.check_no_other_run()


def test_without_the_service_nothing_stops(monkeypatch):
    monkeypatch.setattr(
        processes.multihost_utils,
        "reached_preemption_sync_point",
        raising(RuntimeError("the preemption service is off")),
    )
    assert not processes.should_stop()
