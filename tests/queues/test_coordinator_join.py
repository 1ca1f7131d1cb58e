"""Coordinator.join: which threads, how long, and wrong arguments."""

import signal
import threading

import pytest
from coordinated import LONG, fail_with, holds, started
from processes import talking

from jstep.queues.coordinator import Coordinator

release = pytest.fixture(holds)


def test_registered_threads_are_joined_by_default(release):
    coord = Coordinator()
    thread = started(release.wait)
    coord.register_thread(thread)
    release.set()
    coord.join()
    assert not thread.is_alive()


def test_registered_threads_are_joined_besides_the_given_ones(release):
    coord = Coordinator()
    registered, given = started(release.wait, "registered"), started(release.wait, "given")
    coord.register_thread(registered)
    coord.request_stop()
    with pytest.raises(RuntimeError, match="given, registered"):
        coord.join([given], stop_grace_period_secs=0.01)


def test_threads_registered_by_threads_are_joined(release):
    coord = Coordinator()
    children = []

    def parent():
        children.append(started(release.wait))
        coord.register_thread(children[0])
        release.set()

    coord.join([started(parent)])
    assert not children[0].is_alive()


@pytest.mark.parametrize("grace", [0, 1e-9, 0.05])
def test_stragglers_are_named(release, grace):
    coord = Coordinator()
    threads = [started(release.wait, "slow-b"), started(release.wait, "slow-a"), started(lambda: None, "quick")]
    threads[-1].join()  # without a grace period nobody waits for it
    coord.request_stop()
    with pytest.raises(RuntimeError, match="threads still running: slow-a, slow-b") as info:
        coord.join(threads, stop_grace_period_secs=grace)
    assert "quick" not in str(info.value)
    assert coord.joined


def test_live_threads_may_be_ignored(release, caplog):
    coord = Coordinator()
    coord.request_stop()
    coord.join([started(release.wait, "slow")], stop_grace_period_secs=0, ignore_live_threads=True)
    assert "slow" in caplog.text


def test_an_error_goes_before_stragglers(release, caplog):
    coord = Coordinator()
    fail_with(coord, ValueError("the cause"))
    with pytest.raises(ValueError, match="the cause"):
        coord.join([started(release.wait, "slow")], stop_grace_period_secs=0)
    assert "slow" in caplog.text


def test_the_grace_period_begins_with_the_stop(release):
    coord = Coordinator()
    thread = started(release.wait)
    stopper = threading.Timer(0.2, coord.request_stop)  # well after a grace period that began with join
    stopper.start()
    with pytest.raises(RuntimeError, match="still running"):
        coord.join([thread], stop_grace_period_secs=0.05)
    assert coord.should_stop()
    stopper.join(LONG)


class TestMisuse:
    def test_threads_that_never_started(self):
        coord = Coordinator()
        idle = threading.Thread(target=print, name="forgotten")
        with pytest.raises(RuntimeError, match=r"forgotten.*never started"):
            coord.join([idle])
        assert not coord.joined
        coord.register_thread(idle)
        coord.request_stop()
        with pytest.raises(RuntimeError, match=r"forgotten.*never started"):
            coord.join()

    def test_an_error_goes_before_threads_that_never_started(self):
        coord = Coordinator()
        coord.register_thread(threading.Thread(target=print))
        fail_with(coord, ValueError("why they were not started"))
        with pytest.raises(ValueError, match="why"):
            coord.join([threading.current_thread()], stop_grace_period_secs=0)

    def test_join_from_a_thread_that_is_joined(self):
        with pytest.raises(RuntimeError, match="MainThread is the thread that joins"):
            Coordinator().join([threading.current_thread()])

    @pytest.mark.parametrize("grace", [-1, float("nan")])
    def test_negative_grace(self, grace):
        with pytest.raises(ValueError, match=f"stop_grace_period_secs={grace}"):
            Coordinator().join(stop_grace_period_secs=grace)

    def test_threads_that_are_none(self):
        with pytest.raises(TypeError, match="threads"):
            Coordinator().join(["t"])
        with pytest.raises(TypeError, match="must be a list of threads"):
            Coordinator().join(threading.Thread())
        with pytest.raises(TypeError, match="thread=3"):
            Coordinator().register_thread(3)

    @pytest.mark.parametrize("ex", ["text", ValueError, (None, None, None), 3])
    def test_what_is_no_exception_stops_all_the_same(self, ex):
        coord = Coordinator()
        with pytest.raises(TypeError, match="ex="):
            coord.request_stop(ex)
        assert coord.should_stop()
        with pytest.raises(TypeError, match="ex="):
            coord.join()

    @pytest.mark.parametrize("types", [("OutOfRangeError",), (3,), (int,)])
    def test_clean_stop_types_that_are_none(self, types):
        with pytest.raises(TypeError, match="clean_stop_exception_types"):
            Coordinator(types)


def test_ctrl_c_and_signal_handlers_get_through():
    """A handler may stop the run while the main thread is inside of the coordinator."""
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
    with talking(program) as process:
        for number, answer in [(signal.SIGTERM, "stopped"), (signal.SIGINT, "interrupted")] * 2:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.stdout.readline() == f"{answer}\n"
        assert process.wait(timeout=60) == 0
