"""SIGUSR1 and SIGHUP, the time limit, and the processes that a run forks."""

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from loop_runs import DATA, train

import jstep


def kill(number: int, at: int = 5) -> Any:
    """A hook that sends a signal to this process at a step."""
    return jstep.every(1, lambda step, *_: os.kill(os.getpid(), number) if step == at else None)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_saves_and_leaves_with_its_code(number: int, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    with pytest.raises(jstep.Preempted, match=f"{signal.Signals(number).name} stopped the run after step 5") as caught:
        train(50, hooks=[kill(number)], checkpoint_dir=tmp_path)
    assert caught.value.code == 128 + number
    assert jstep.Saver(tmp_path).all_steps() == [5]
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_that_is_ignored_or_handled_is_left_alone(number: int, tmp_path: Path) -> None:
    seen: list[int] = []
    for handler in (signal.SIG_IGN, lambda n, _: seen.append(n)):
        before = signal.signal(number, handler)  # type: ignore[arg-type]
        try:
            assert jstep.global_step(train(9, hooks=[kill(number)])) == 9
            assert signal.getsignal(number) == handler
        finally:
            signal.signal(number, before)
    assert seen == [number]


def test_a_handler_of_c_is_left_alone(tmp_path: Path) -> None:
    """`signal.getsignal` does not know it."""
    with (tmp_path / "stacks").open("w+") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            assert jstep.global_step(train(9, hooks=[kill(signal.SIGUSR1)])) == 9
        finally:
            faulthandler.unregister(signal.SIGUSR1)
        file.seek(0)
        assert "most recent call first" in file.read()


def test_the_time_limit_ends_a_wait(tmp_path: Path) -> None:
    def hangs(step: int) -> Any:
        if step == 4:
            time.sleep(60)
        return DATA[step]

    with pytest.raises(jstep.Preempted, match="stop_secs stopped the run after step 4"):
        train(9, hangs, checkpoint_dir=tmp_path, stop_secs=2)
    assert jstep.Saver(tmp_path).all_steps() == [4]


@pytest.mark.filterwarnings("ignore")
def test_handlers_in_a_forked_process() -> None:
    """All of them are those of before, in the order in which runs were nested."""
    read, write = os.pipe()

    def child(*_: Any) -> None:
        if os.fork() == 0:
            names = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)]
            os.write(write, repr([n == own for n, own in zip(names, mine, strict=True)]).encode())
            os._exit(0)
        os.wait()

    def own(number: int, frame: Any) -> None:
        sys.exit(7)

    mine: list[Any] = [own, signal.getsignal(signal.SIGINT), signal.SIG_DFL, signal.SIG_DFL]
    handler = signal.signal(signal.SIGTERM, own)
    try:
        train(2, hooks=[jstep.every(2, lambda *_: train(2, hooks=[jstep.every(2, child)]) and None)])
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert os.read(read, 100) == b"[True, True, True, True]"
    os.close(read)
    os.close(write)


def test_an_evaluation_at_the_start(tmp_path: Path) -> None:
    def run(last: int, **kwargs: Any) -> tuple[list[int], list[int]]:
        hook = jstep.EvaluationHook(
            lambda state: {"x": 1.0},
            every_n_steps=2,
            callbacks=[lambda step, *_: seen.append(step), jstep.EarlyStopping("x", 2, mode="max")],
            at_start=True,
            **kwargs,
        )
        seen: list[int] = []
        train(last, hooks=[hook], checkpoint_dir=tmp_path)
        return list(hook.results), seen

    assert run(4) == ([0, 2, 4], [0, 2, 4])  # off the cadence: early stopping counts 2 as the first one
    assert run(8) == ([6], [6])
    assert run(8) == ([6], [])
