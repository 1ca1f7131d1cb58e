"""Signals that arrive where Python drops exceptions: finalizers, callbacks of weak references and of the collector."""

import contextlib
import gc
import signal
import sys
import threading
import time
import weakref

import pytest
from loop_runs import train

import jstep


class Finalized:
    """An object that gets a signal when it dies; `done` says whether its finalizer came to its end."""

    done = False

    def __init__(self, number):
        self._number = number

    def __del__(self):
        signal.raise_signal(self._number)
        len("a function that is called here")
        Finalized.done = True


class Plain:
    pass


def in_finalizer(number):
    Finalized(number)


def in_weakref(number):
    alive = Plain()
    ref = weakref.ref(alive, lambda _: signal.raise_signal(number))
    del alive
    assert ref() is None


def in_finalize(number):
    weakref.finalize(Plain(), signal.raise_signal, number)


def in_weak_dictionary(number):
    class Key(Plain):
        def __hash__(self):
            return 1

    kept = weakref.WeakKeyDictionary({Key(): Finalized(number)})
    assert not kept


def in_collection(number):
    def collect(phase, info):
        if phase == "start":
            gc.callbacks.remove(collect)
            signal.raise_signal(number)

    gc.callbacks.append(collect)
    gc.collect()


WAYS = [in_finalizer, in_weakref, in_finalize, in_weak_dictionary, in_collection]


@pytest.fixture
def dropped(monkeypatch):
    """The exceptions that Python drops."""
    found = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: found.append(repr(dropped.exc_value)))
    yield found
    assert found == []


def wait():
    """Wait for an exception, for 60 seconds at most."""
    for _ in range(6000):
        time.sleep(0.01)


class Once(jstep.Hook):
    """A hook that dies of nothing but a signal."""

    def __init__(self, method, act):
        setattr(self, method, act)

    def after_step(self, step, state, metrics):
        pass


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_the_start_of_a_run(way, number, dropped):
    def begin(state):
        way(number)
        wait()

    error = jstep.Preempted if number == signal.SIGTERM else KeyboardInterrupt
    began = time.monotonic()
    with pytest.raises(error, match="stopped the run before its first step"):
        train(5, hooks=[Once("begin", begin)])
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_second_attempt_comes_while_the_first_is_dropped(way, dropped, monkeypatch):
    """On a loaded machine, the timer may be faster than the thread that it interrupts."""

    first = [True]

    class Timer(threading.Timer):
        def __init__(self, seconds, function):
            self._is_hasty = bool(first) and first.pop()
            super().__init__(0.0 if self._is_hasty else seconds, function)

        def start(self):
            super().start()
            time.sleep(0.05 * self._is_hasty)

    monkeypatch.setattr("jstep.loop.signals.threading.Timer", Timer)
    test_it_ends_the_start_of_a_run(way, signal.SIGTERM, dropped)


def test_the_finalizer_comes_to_its_end(dropped):
    Finalized.done = False

    def begin(state):
        in_finalizer(signal.SIGTERM)
        wait()

    with pytest.raises(jstep.Preempted):
        train(5, hooks=[Once("begin", begin)])
    assert Finalized.done


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_second_ctrl_c_leaves_at_once(way, dropped):
    def after_step(step, state, metrics):
        signal.raise_signal(signal.SIGINT)
        way(signal.SIGINT)
        wait()

    with pytest.raises(KeyboardInterrupt, match="received twice"):
        train(5, hooks=[Once("after_step", after_step)])


@pytest.mark.thorough(except_for=["in_finalizer", "in_collection"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_signal_while_the_run_takes_steps_stops_it_after_the_step(way, dropped, tmp_path):
    def after_step(step, state, metrics):
        if step == 2:
            way(signal.SIGTERM)
            time.sleep(0.05)  # longer than a postponed exception takes

    with pytest.raises(jstep.Preempted, match="after step 2, which is saved"):
        train(5, hooks=[Once("after_step", after_step)], checkpoint_dir=tmp_path)


def test_other_exceptions_that_are_dropped_are_reported_as_before(monkeypatch):
    found = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: found.append(dropped.exc_type))
    before = sys.unraisablehook

    class Broken:
        def __del__(self):
            raise ZeroDivisionError

    def begin(state):
        assert sys.unraisablehook is not before
        Broken()

    train(2, hooks=[Once("begin", begin)])
    with contextlib.suppress(KeyError):
        train(2, hooks=[Once("begin", lambda state: {}["nothing"])])
    assert found == [ZeroDivisionError]
    assert sys.unraisablehook is before
