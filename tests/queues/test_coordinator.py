"""`Coordinator`: requesting a stop, and the exceptions that `join` raises."""

import sys

import pytest
from coordinator_threads import fail_with, function_names, start_thread
from waiting import TIMEOUT

from jstep.core.exceptions import OutOfRangeError
from jstep.queues.coordinator import Coordinator
from jstep.queues.queues import CancelledError


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
