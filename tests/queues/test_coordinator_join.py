"""`Coordinator.join`: threads, grace period, and invalid arguments."""

import signal
import threading

import pytest
from coordinator_threads import blocking_event, fail_with, start_thread
from processes import running_program
from waiting import TIMEOUT

from jstep.queues.coordinator import Coordinator

release = pytest.fixture(blocking_event)


def test_registered_and_given_threads_are_joined(release):
    coord = Coordinator()
    registered, given = start_thread(release.wait, "registered"), start_thread(release.wait, "given")
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
    coord.join([start_thread(release.wait, "slow")], stop_grace_period_secs=0, ignore_live_threads=True)
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
    stopper = threading.Timer(0.2, coord.request_stop)  # after the end of a grace period that begins with join
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
    """
    with running_program(program) as process:
        for signum, output in [(signal.SIGTERM, "stopped"), (signal.SIGINT, "interrupted")] * 2:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signum)
            assert process.stdout.readline() == f"{output}\n"
        assert process.wait(timeout=60) == 0
