"""Signals where two mechanisms meet: a run that closes, a program that is compiled, each line of
the last phase."""

import logging
import os
import signal
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doubles import raising
from loop_runs import OPTIMIZER, train

import jstep
from jstep.core import logs
from jstep.hooks.course import ENDING, LEAVING
from jstep.hooks.run_hook import RunHook
from jstep.loop.run_context import RunContext

MAIN = Path(jstep.__file__).parent / "loop"


class Closes(RunHook):
    def __init__(self, *numbers):
        self.numbers = numbers

    def close(self):
        super().close()
        for number in self.numbers:
            os.kill(os.getpid(), number)


def test_while_a_run_closes_after_an_error(tmp_path):

    with pytest.raises(jstep.Preempted) as caught:
        train(
            5,
            hooks=[jstep.every(3, raising(ValueError("my hook"))), Closes(signal.SIGTERM)],
            checkpoint_dir=tmp_path,
        )
    assert isinstance(caught.value.__context__, ValueError)
    assert jstep.global_step(caught.value.state) == 3
    assert jstep.Saver(tmp_path).all_steps() == []  # the hook has not let its iteration end


class AtLine:
    """Sends a signal at the n-th line of jstep's loop after the last call of a run; a large n only
    counts the lines."""

    def __init__(self, n):
        self.n, self.seen, self.where = n, 0, ""

    def __call__(self, frame, event, argument):
        if Path(frame.f_code.co_filename).parent != MAIN:
            return None
        owner = frame.f_locals.get("self")
        held = (getattr(owner, "__dict__", {}).get(name) for name in ("run", "_run", "_context"))
        run = next(
            (x for x in (*frame.f_locals.values(), *held) if isinstance(x, RunContext)), None
        )
        course = getattr(run, "course", None)  # None while the run is made
        if event == "line" and getattr(course, "status", None) in (ENDING, LEAVING):
            self.seen += 1
            if self.seen == self.n:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGTERM)
        return self

    def run(self, *args, **kwargs):
        before = sys.gettrace()
        sys.settrace(self)
        try:
            train(*args, **kwargs)
        except BaseException as error:
            return error
        finally:
            sys.settrace(before)
        return None


class Ends(jstep.Hook):
    def end(self, step, state):
        return state.replace(params=jax.tree.map(lambda leaf: 2 * leaf, state.params))


def check_line(n, directory):
    at = AtLine(n)
    hooks = [Ends(), jstep.LoggingHook(every_n_steps=2)]
    received = []
    handler = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        error = at.run(5, hooks=hooks, checkpoint_dir=directory, save_checkpoint_steps=5)
    finally:
        signal.signal(signal.SIGTERM, handler)
    if at.where and not received:  # the run's own handler was there
        assert isinstance(error, jstep.Preempted), (at.where, error)
    else:
        assert error is None, (at.where, error)
    assert jstep.Saver(directory).all_steps() == [5], at.where
    state = train(5, hooks=hooks, checkpoint_dir=directory)
    expected = 2 * np.asarray(train(5).params["w"])
    np.testing.assert_array_equal(np.asarray(state.params["w"]), expected, err_msg=at.where)
    return at.seen


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["some", *map(str, range(6))])
def test_at_each_line_of_the_last_phase(part, tmp_path):
    lines = check_line(10**9, tmp_path / "all")
    assert lines > 100
    for n in range(7, lines + 1, 83) if part == "some" else range(1 + int(part), lines + 1, 6):
        check_line(n, tmp_path / str(n))


@pytest.mark.thorough(except_for=["1"])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_while_a_program_is_compiled_for_new_shapes(steps_per_call, tmp_path, monkeypatch):
    """The state before the call is saved, and the run leaves without the program: here, that never
    comes."""
    from jstep.compiling import compiler as compiling

    released, reached, apart = threading.Event(), [], compiling.compile_apart

    class NeverCompiled:
        def compile(self):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
            released.wait(60)

    def compile_apart(lowered, signals, *, can_interrupt):
        apart(NeverCompiled() if reached else lowered, signals, can_interrupt=can_interrupt)

    def batches(n):
        if n == 4:
            reached.append(n)
        return np.ones((8 if n < 4 else 16, 2), np.float32)

    monkeypatch.setattr(compiling, "compile_apart", compile_apart)
    step = jstep.minimize(mean_of_products, OPTIMIZER)
    try:
        with pytest.raises(jstep.Preempted, match="after step 4, which is saved"):
            train(20, batches, step=step, checkpoint_dir=tmp_path, steps_per_call=steps_per_call)
    finally:
        released.set()
    assert jstep.Saver(tmp_path).all_steps() == [4]


class LargeReplay:
    """Batches that are made with the state, and whose position is too large to be copied before
    each of them."""

    def __init__(self):
        self.made, self.memory = 0, np.zeros(20_000)

    def __call__(self, step, state):
        self.made += 1
        return np.full((4, 2), self.made, np.float32)

    def get_state(self):
        return {"made": self.made, "memory": self.memory}

    def set_state(self, value):
        self.made = value["made"]


def mean_of_products(params, x):
    return jnp.mean(x @ params["w"])


def test_while_a_later_stage_is_waited_for_a_batch_that_cannot_be_made_again_is_used(
    tmp_path, monkeypatch
):
    """A checkpoint without the position of its batches would begin them anew."""
    from jstep.compiling.programs import ProgramTable
    from jstep.core.signals import StopSignals

    wait_for, compile_stage, sent, released = (
        StopSignals.wait_for,
        ProgramTable.compile,
        [],
        threading.Event(),
    )
    latest = [0]

    def slow(*args):
        released.wait(60)
        compile_stage(*args)

    def waits(signals, future, *, can_interrupt):
        if latest == [3] and not sent:
            sent.append(can_interrupt)
            os.kill(os.getpid(), signal.SIGTERM)
            # Released after the loop has looked whether it leaves.
            threading.Timer(0.5, released.set).start()
        wait_for(signals, future, can_interrupt=can_interrupt)

    def keep(n, state, metrics):
        latest[0] = n

    monkeypatch.setattr(ProgramTable, "compile", slow)
    monkeypatch.setattr(StopSignals, "wait_for", waits)
    steps = {
        0: jstep.minimize(mean_of_products, OPTIMIZER),
        3: jstep.minimize(mean_of_products, OPTIMIZER),
    }
    try:
        with pytest.raises(jstep.Preempted, match="after step 4, which is saved"):
            train(
                9,
                jstep.from_state(LargeReplay()),
                step=steps,
                hooks=[jstep.every(1, keep)],
                checkpoint_dir=tmp_path,
            )
    finally:
        released.set()
    assert sent == [False]
    monkeypatch.undo()
    again = LargeReplay()
    state = train(9, jstep.from_state(again), step=steps, checkpoint_dir=tmp_path)
    whole = train(9, jstep.from_state(LargeReplay()), step=steps)
    np.testing.assert_array_equal(np.asarray(state.params["w"]), np.asarray(whole.params["w"]))
    assert again.made == 9


def loop_of_a_generator():
    step = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), OPTIMIZER)
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, OPTIMIZER)
    with jstep.Run(step, state, lambda n: np.ones(3, np.float32), 8, progress=False) as run:
        yield from run


def close_in_a_thread(steps):
    closer = threading.Thread(target=steps.close)
    closer.start()
    closer.join(60)
    assert not closer.is_alive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_run_that_another_thread_has_closed_passes_signals_on(number):
    received = []
    before = (
        signal.signal(number, lambda *args: received.append(args[0]))
        if number != signal.SIGUSR1
        else None
    )
    try:
        steps = loop_of_a_generator()
        next(steps)
        close_in_a_thread(steps)
        if number == signal.SIGUSR1:
            # It has no handler: the next run handles it as the first one did.
            again = loop_of_a_generator()
            next(again)
            assert signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN)
            again.close()
            assert signal.getsignal(number) == signal.SIG_DFL
        else:
            os.kill(os.getpid(), number)
            assert received == [number]
            os.kill(os.getpid(), number)
            assert received == [number, number]
    finally:
        if before is not None:
            signal.signal(number, before)


def test_a_run_that_another_thread_has_closed_leaves_the_warnings_of_the_context_of_its_opener(
    caplog,
):
    def run():
        with logs.warning_once():
            logs.log_once(logging.WARNING, "in the run")
            yield

    steps = run()
    next(steps)
    close_in_a_thread(steps)
    for _ in range(2):
        logs.log_once(logging.WARNING, "in the run")
    assert caplog.messages == ["in the run"] * 3
