"""`Coordinator`: requesting a stop, joining threads, and the exceptions that `join` raises."""

import signal
import sys
import threading
import traceback

import pytest
from processes import running_program
from waiting import TIMEOUT

from jstep.core.exceptions import OutOfRangeError
from jstep.queues.coordinator import Coordinator
from jstep.queues.queues import CancelledError


def start_thread(target, name=None, daemon=True):
    thread = threading.Thread(target=target, name=name, daemon=daemon)
    thread.start()
    return thread


def fail_with(coord, exception):
    try:
        raise exception
    except Exception as ex:
        coord.request_stop(ex)


def function_names(traceback_):
    return [frame.name for frame in traceback.extract_tb(traceback_)]


@pytest.fixture
def release():
    """An event that blocks threads until the test sets it or ends."""
    event = threading.Event()
    yield event
    event.set()


def test_stop_reaches_all_threads():
    coord = Coordinator()
    assert not coord.should_stop()
    assert not coord.wait_for_stop(0.01)
    threads = [start_thread(coord.wait_for_stop) for _ in range(3)]
    coord.request_stop()
    assert coord.should_stop()
    assert coord.wait_for_stop() is True
    coord.join(threads)
    assert not any(t.is_alive() for t in threads)


def test_join_raises_the_first_exception_with_its_own_traceback():
    coord = Coordinator()

    def deep_inside():
        raise ValueError("first")

    def work():
        try:
            deep_inside()
        except ValueError as ex:
            coord.request_stop(ex)

    start_thread(work).join(TIMEOUT)
    fail_with(coord, RuntimeError("too late"))
    for _ in range(3):  # the traceback does not grow
        with pytest.raises(ValueError, match="first") as info:
            coord.join([])
        names = function_names(info.value.__traceback__)
        assert names.count("deep_inside") == 1
        assert names.count("raise_requested_exception") == 1


def test_request_stop_accepts_exc_info():
    coord = Coordinator()
    try:
        raise KeyError("k")
    except KeyError:
        coord.request_stop(sys.exc_info())
    with pytest.raises(KeyError) as info:
        coord.join()
    assert function_names(info.value.__traceback__)[-1] == "test_request_stop_accepts_exc_info"


def test_request_stop_accepts_unraised_exceptions():
    coord = Coordinator()
    coord.request_stop(ValueError("made by hand"))
    with pytest.raises(ValueError, match="made by hand"):
        coord.join()


def test_errors_after_a_clean_stop_are_only_logged(caplog):
    coord = Coordinator()
    coord.request_stop()
    fail_with(coord, ValueError("while stopping"))
    coord.join([])
    assert "while stopping" in caplog.text


def test_cancelled_enqueues_after_the_stop_are_not_logged(caplog):
    coord = Coordinator()
    coord.request_stop()
    coord.request_stop(CancelledError("closed"))
    coord.join([])
    assert not caplog.records


def test_clean_stop_exceptions_are_not_raised():
    coord = Coordinator()
    fail_with(coord, OutOfRangeError("the end"))
    assert coord.should_stop()
    coord.join()
    coord.raise_requested_exception()


@pytest.mark.parametrize("types", [(KeyError, ValueError), ValueError, [ValueError]])
def test_custom_clean_stop_types(types):
    class CustomError(ValueError):
        pass

    coord = Coordinator(clean_stop_exception_types=types)
    fail_with(coord, CustomError())
    coord.join()

    coord = Coordinator(clean_stop_exception_types=types)
    fail_with(coord, OutOfRangeError("not clean any more"))
    with pytest.raises(OutOfRangeError):
        coord.join()


def test_stop_on_exception():
    coord = Coordinator()

    def work():
        with coord.stop_on_exception():
            raise RuntimeError("inside")

    thread = start_thread(work)
    assert coord.wait_for_stop(TIMEOUT)
    with pytest.raises(RuntimeError, match="inside") as info:
        coord.join([thread])
    assert "work" in function_names(info.value.__traceback__)


def test_request_stop_after_join_raises_at_once():
    coord = Coordinator()
    coord.join([])
    with pytest.raises(RuntimeError, match="nobody joins"):
        fail_with(coord, RuntimeError("nobody joins"))
    coord.request_stop()
    fail_with(coord, OutOfRangeError("clean"))
    with pytest.raises(RuntimeError, match="inside"), coord.stop_on_exception():
        raise RuntimeError("inside")


def test_clear_stop_resets_the_coordinator():
    coord = Coordinator()
    fail_with(coord, ValueError("before"))
    with pytest.raises(ValueError, match="before"):
        coord.join()
    coord.clear_stop()
    assert not coord.should_stop()
    assert not coord.joined
    coord.raise_requested_exception()
    fail_with(coord, ValueError("after"))
    with pytest.raises(ValueError, match="after"):
        coord.join()


def test_callbacks_run_once():
    coord = Coordinator()
    calls = []
    coord.call_on_stop(lambda: calls.append("kept"))
    coord.request_stop()
    coord.request_stop()
    assert calls == ["kept"]
    coord.call_on_stop(lambda: calls.append("late"))
    assert calls == ["kept", "late"]


# `join`: threads, the grace period, and signals.


def test_registered_and_given_threads_are_joined(release):
    coord = Coordinator()
    registered, given = (
        start_thread(release.wait, "registered"),
        start_thread(release.wait, "given"),
    )
    coord.register_thread(registered)
    coord.request_stop()
    with pytest.raises(RuntimeError, match="given, registered"):
        coord.join([given], stop_grace_period_secs=0.01)


@pytest.mark.parametrize("grace", [0, 0.05])
def test_stragglers_are_named(release, grace):
    coord = Coordinator()
    threads = [
        start_thread(release.wait, "slow-b"),
        start_thread(release.wait, "slow-a"),
        start_thread(lambda: None, "quick"),
    ]
    threads[-1].join()  # without a grace period, coord.join does not wait for it
    coord.request_stop()
    with pytest.raises(RuntimeError, match="threads still running: slow-a, slow-b") as info:
        coord.join(threads, stop_grace_period_secs=grace)
    assert "quick" not in str(info.value)
    assert coord.joined


def test_live_threads_may_be_ignored(release, caplog):
    coord = Coordinator()
    coord.request_stop()
    coord.join(
        [start_thread(release.wait, "slow")], stop_grace_period_secs=0, ignore_live_threads=True
    )
    assert "slow" in caplog.text


def test_errors_take_precedence_over_stragglers(release, caplog):
    coord = Coordinator()
    fail_with(coord, ValueError("the cause"))
    with pytest.raises(ValueError, match="the cause"):
        coord.join([start_thread(release.wait, "slow")], stop_grace_period_secs=0)
    assert "slow" in caplog.text


def test_grace_period_begins_with_the_stop(release):
    coord = Coordinator()
    thread = start_thread(release.wait)
    # It stops after the end of a grace period that begins with `join`.
    stopper = threading.Timer(0.2, coord.request_stop)
    stopper.start()
    with pytest.raises(RuntimeError, match="still running"):
        coord.join([thread], stop_grace_period_secs=0.05)
    assert coord.should_stop()
    stopper.join(TIMEOUT)


@pytest.mark.thorough
def test_signals_interrupt_join_and_wait_for_stop():
    """A signal handler may request a stop while the main thread waits in the coordinator."""
    program = """
        import os, signal, threading
        from jstep.queues.coordinator import Coordinator
        for wait in (lambda coord, thread: coord.join([thread]), lambda coord, thread: coord.wait_for_stop()):
            for _ in range(2):
                coord = Coordinator()
                signal.signal(signal.SIGTERM, lambda *_: coord.request_stop())
                thread = threading.Thread(target=coord.wait_for_stop, daemon=True)
                thread.start()
                try:
                    print("ready", flush=True)
                    wait(coord, thread)
                    print("stopped", flush=True)
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
    """  # noqa: E501
    with running_program(program) as process:
        for signum, output in [(signal.SIGTERM, "stopped"), (signal.SIGINT, "interrupted")] * 2:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signum)
            assert process.stdout.readline() == f"{output}\n"
        assert process.wait(timeout=60) == 0
