"""SIGUSR1 and SIGHUP, the time limit, and the processes that a run forks."""

import faulthandler
import os
import signal
import sys
import threading
import time

import pytest
from loop_runs import DATA, STEP, make_state, train

import jstep
from jstep.core import stopwatch


def kill(number, at=5):
    return jstep.every(1, lambda step, *_: os.kill(os.getpid(), number) if step == at else None)


def test_a_limit_that_is_over_when_the_run_begins(tmp_path):
    """Devices may take longer to start. The handlers of before are there again: later signals must
    not be ignored."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    for _ in range(5):
        with pytest.raises(
            jstep.Preempted, match="stop_secs stopped the run before its first step"
        ) as caught:
            train(50, checkpoint_dir=tmp_path, stop_secs=1e-9)
        assert jstep.global_step(caught.value.state) == 0
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    with pytest.raises(jstep.Preempted, match="SIGTERM stopped the run after step 5"):
        train(50, hooks=[kill(signal.SIGTERM)], checkpoint_dir=tmp_path)


@pytest.mark.thorough(except_for=["10"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_that_is_ignored_or_handled_is_left_alone(number, tmp_path):
    seen = []
    for handler in (signal.SIG_IGN, lambda n, _: seen.append(n)):
        before = signal.signal(number, handler)
        try:
            assert jstep.global_step(train(9, hooks=[kill(number)])) == 9
            assert signal.getsignal(number) == handler
        finally:
            signal.signal(number, before)
    assert seen == [number]


def test_an_ignored_sigint_stays_ignored():
    """As under nohup, or in a background job of a shell script."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert jstep.global_step(train(6, hooks=[kill(signal.SIGINT)])) == 6
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_c_is_left_alone(tmp_path):
    """`signal.getsignal` does not know it."""
    with (tmp_path / "stacks").open("w+") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            assert jstep.global_step(train(9, hooks=[kill(signal.SIGUSR1)])) == 9
        finally:
            faulthandler.unregister(signal.SIGUSR1)
        file.seek(0)
        assert "most recent call first" in file.read()


def slowly(step):
    time.sleep(0.005)
    return DATA[step]


def test_the_time_limit_ends_a_wait(tmp_path):
    def hangs(step):
        if step == 4:
            time.sleep(60)
        return DATA[step]

    train(3)  # the limit counts compiling, too
    with pytest.raises(jstep.Preempted, match="stop_secs stopped the run after step 4"):
        train(9, hangs, checkpoint_dir=tmp_path, stop_secs=2)
    assert jstep.Saver(tmp_path).all_steps() == [4]


def test_the_time_limit_in_another_thread(tmp_path):
    found = []
    train(3)  # the limit counts compiling, too

    def run():
        try:
            train(10**6, slowly, checkpoint_dir=tmp_path, stop_secs=2.0)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    (error,) = found
    assert isinstance(error, jstep.Preempted)
    assert error.code == 143
    assert jstep.Saver(tmp_path).latest_step() == jstep.global_step(error.state)


def test_the_limit_counts_from_the_call_of_run(monkeypatch):
    """The time between this call and the block is a part of it."""
    late = [0.0]
    clocks = stopwatch.CLOCKS._replace(seconds=lambda: time.perf_counter() + late[0])
    monkeypatch.setattr(stopwatch, "CLOCKS", clocks)
    run = jstep.Run(STEP, make_state(), DATA, 9, stop_secs=1000.0, progress=False)
    late[0] = 2000.0
    with pytest.raises(jstep.Preempted, match="stop_secs stopped the run"), run:
        for _ in run:
            pass


def test_a_limit_of_centuries_is_none():
    # An error in a thread would be a warning here.
    assert jstep.global_step(train(6, stop_secs=1e12)) == 6


@pytest.mark.filterwarnings("ignore")
def test_handlers_in_a_forked_process():
    read, write = os.pipe()

    def child(*_):
        if os.fork() == 0:
            names = [
                signal.getsignal(n)
                for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
            ]
            os.write(write, repr([n == own for n, own in zip(names, mine, strict=True)]).encode())
            os._exit(0)
        os.wait()

    def own(number, frame):
        sys.exit(7)

    mine = [own, signal.getsignal(signal.SIGINT), signal.SIG_DFL, signal.SIG_DFL]
    handler = signal.signal(signal.SIGTERM, own)
    try:
        train(
            2, hooks=[jstep.every(2, lambda *_: train(2, hooks=[jstep.every(2, child)]) and None)]
        )
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert os.read(read, 100) == b"[True, True, True, True]"
    os.close(read)
    os.close(write)


def test_an_evaluation_at_the_start(tmp_path):
    def run(last, **kwargs):
        hook = jstep.EvaluationHook(
            lambda state: {"x": 1.0},
            every_n_steps=2,
            callbacks=[
                lambda step, *_: seen.append(step),
                jstep.EarlyStopping("x", patience=2, mode="max"),
            ],
            at_start=True,
            **kwargs,
        )
        seen = []
        train(last, hooks=[hook], checkpoint_dir=tmp_path)
        return list(hook.results), seen

    # Off the cadence, early stopping counts 2 as the first one.
    assert run(4) == ([0, 2, 4], [0, 2, 4])
    assert run(8) == ([6], [6])
    assert run(8) == ([6], [])
