"""Coordinator: who asks for a stop, what join raises."""

import sys
import threading

import pytest
from coordinated import LONG, fail_with, names_in, started

from jstep.queues.coordinator import Coordinator
from jstep.queues.errors import CancelledError, OutOfRangeError


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


def test_repr_tells_the_state():
    coord = Coordinator()
    assert "running" in repr(coord)
    fail_with(coord, ValueError("v"))
    with pytest.raises(ValueError):
        coord.join()
    assert "stopped by ValueError('v'), joined" in repr(coord)
