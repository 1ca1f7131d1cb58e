"""Coordinator: who stops whom, and where the error comes out."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import traceback

import pytest

from jstep.queues.coordinator import Coordinator
from jstep.queues.errors import CancelledError, OutOfRangeError

LONG = 20  # seconds until a test that hangs fails


@pytest.fixture
def release():
    """An event that lets threads of the test end, set at its end at the latest."""
    event = threading.Event()
    yield event
    event.set()


def started(target, name=None, daemon=True):
    thread = threading.Thread(target=target, name=name, daemon=daemon)
    thread.start()
    return thread


def fail_with(coord, exception):
    try:
        raise exception
    except Exception as ex:
        coord.request_stop(ex)


def names_in(traceback_):
    return [frame.name for frame in traceback.extract_tb(traceback_)]


def test_stop_is_seen_by_all():
    coord = Coordinator()
    assert not coord.should_stop()
    assert not coord.wait_for_stop(0.01)
    threads = [started(coord.wait_for_stop) for _ in range(3)]
    coord.request_stop()
    assert coord.should_stop()
    assert coord.wait_for_stop() is True
    coord.join(threads)
    assert not any(t.is_alive() for t in threads)


def test_join_returns_when_all_have_ended_without_a_stop():
    coord = Coordinator()
    coord.join([started(lambda: None)])
    assert coord.joined
    assert not coord.should_stop()


def test_join_without_threads():
    coord = Coordinator()
    assert not coord.joined
    coord.join()
    assert coord.joined


def test_join_raises_the_first_exception_with_its_own_traceback():
    coord = Coordinator()

    def deep_inside():
        raise ValueError("first")

    def work():
        try:
            deep_inside()
        except ValueError as ex:
            coord.request_stop(ex)

    started(work).join(LONG)
    fail_with(coord, RuntimeError("too late"))
    for _ in range(3):  # and it does not grow
        with pytest.raises(ValueError, match="first") as info:
            coord.join([])
        names = names_in(info.value.__traceback__)
        assert names.count("deep_inside") == 1
        assert names.count("raise_requested_exception") == 1


def test_exc_info_is_taken_too():
    coord = Coordinator()
    try:
        raise KeyError("k")
    except KeyError:
        coord.request_stop(sys.exc_info())
    with pytest.raises(KeyError) as info:
        coord.join()
    assert names_in(info.value.__traceback__)[-1] == "test_exc_info_is_taken_too"


def test_an_exception_that_was_never_raised_is_taken():
    coord = Coordinator()
    coord.request_stop(ValueError("made by hand"))
    with pytest.raises(ValueError, match="made by hand"):
        coord.join()


def test_a_stop_without_an_error_counts_as_the_first(caplog):
    coord = Coordinator()
    coord.request_stop()
    fail_with(coord, ValueError("while stopping"))
    coord.join([])
    assert "while stopping" in caplog.text


def test_cancelled_enqueues_after_the_stop_are_no_news(caplog):
    coord = Coordinator()
    coord.request_stop()
    coord.request_stop(CancelledError("closed"))
    coord.join([])
    assert not caplog.records


def test_clean_stop_exceptions_are_raised_nowhere():
    coord = Coordinator()
    fail_with(coord, OutOfRangeError("the end"))
    assert coord.should_stop()
    coord.join()
    coord.raise_requested_exception()


@pytest.mark.parametrize("types", [(KeyError, ValueError), ValueError, [ValueError]])
def test_clean_stop_types_of_ones_own(types):
    class MineError(ValueError):
        pass

    coord = Coordinator(clean_stop_exception_types=types)
    fail_with(coord, MineError())
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

    thread = started(work)
    assert coord.wait_for_stop(LONG)
    with pytest.raises(RuntimeError, match="inside") as info:
        coord.join([thread])
    assert "work" in names_in(info.value.__traceback__)


def test_stop_on_exception_without_one():
    coord = Coordinator()
    with coord.stop_on_exception():
        pass
    assert not coord.should_stop()


@pytest.mark.parametrize("ex", [KeyboardInterrupt(), SystemExit(3)])
def test_stop_on_exception_takes_interrupts_too(ex):
    coord = Coordinator()
    with coord.stop_on_exception():
        raise ex
    with pytest.raises(type(ex)):
        coord.join()


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


def test_request_stop_after_join_raises_at_once():
    coord = Coordinator()
    coord.join([])
    with pytest.raises(RuntimeError, match="nobody joins"):
        fail_with(coord, RuntimeError("nobody joins"))
    coord.request_stop()
    fail_with(coord, OutOfRangeError("clean"))
    with pytest.raises(RuntimeError, match="inside"), coord.stop_on_exception():
        raise RuntimeError("inside")


def test_clear_stop_makes_it_as_new():
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


def test_raise_requested_exception():
    coord = Coordinator()
    coord.raise_requested_exception()
    fail_with(coord, ValueError("now"))
    with pytest.raises(ValueError, match="now"):
        coord.raise_requested_exception()
    assert not coord.joined


def test_callbacks_run_once_and_can_be_taken_back():
    coord = Coordinator()
    calls = []
    coord.call_on_stop(lambda: calls.append("kept"))
    coord.call_on_stop(lambda: calls.append("removed"))()
    coord.request_stop()
    coord.request_stop()
    assert calls == ["kept"]
    remove = coord.call_on_stop(lambda: calls.append("late"))
    assert calls == ["kept", "late"]
    remove()


def test_many_threads_report_and_one_counts():
    coord = Coordinator()
    barrier = threading.Barrier(8)

    def work(i):
        with coord.stop_on_exception():
            barrier.wait(LONG)
            raise ValueError(f"number {i}")

    threads = [started(lambda i=i: work(i)) for i in range(8)]
    with pytest.raises(ValueError, match="number") as info:
        coord.join(threads)
    with pytest.raises(ValueError, match=str(info.value)):
        coord.raise_requested_exception()


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
        with pytest.raises(TypeError, match="threads='t'"):
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


def test_repr_tells_the_state():
    coord = Coordinator()
    assert "running" in repr(coord)
    fail_with(coord, ValueError("v"))
    with pytest.raises(ValueError):
        coord.join()
    assert "stopped by ValueError('v'), joined" in repr(coord)


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
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        for number, answer in [(signal.SIGTERM, "stopped"), (signal.SIGINT, "interrupted")] * 2:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.stdout.readline() == f"{answer}\n"
        assert process.wait(timeout=60) == 0
