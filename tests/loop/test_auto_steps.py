"""`steps_per_call="auto"`: the number of steps of a call is chosen from the times of the first ones."""

import logging
from typing import Any

import jax
import numpy as np
import pytest
from doubles import raising
from fellows import Fellows
from loop_runs import OPTIMIZER, make_state, train
from waiting import wait_until

import jstep
from jstep.loop import calls as calls_module
from jstep.loop.calls import AHEAD, AutoSteps, Call, choose_max_steps
from jstep.loop.programs import ProgramTable
from jstep.loop.stages import as_stages

STEP = jstep.minimize(lambda params, x: ((params["w"] - x) ** 2).mean(), OPTIMIZER)


def batches(step: int) -> Any:
    return np.full(2, step, np.float32)


@pytest.mark.parametrize(
    ("seconds", "most"), [(26e-6, 64), (78e-6, 64), (80e-6, 32), (1e-3, 4), (2.5e-3, 2), (2.6e-3, 1), (1.0, 1)]
)
def test_a_call_takes_at_most_five_milliseconds(seconds: float, most: int) -> None:
    assert choose_max_steps(seconds) == most


def timed(*seconds: float) -> list[Any]:
    """What `AutoSteps` does in a run whose first calls take this long."""
    now, done = [0.0], []
    auto = AutoSteps(
        lambda most: done.append(("compile", most)),
        lambda most, first: done.append(("switch", most, first)),
        lambda: now[0],
    )

    def run(state: Any, call: Call) -> Any:
        now[0] += seconds[call.first]
        return None, None

    for step in range(len(seconds)):
        assert not auto.is_over
        auto.timed(run, None, Call(None, (), 1, step))
    assert auto.is_over
    return done


def test_calls_that_compile_do_not_count_and_the_shortest_decides(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    done = timed(3.0, 1.0, 0.002, 0.001, 0.5, 0.002, 0.002)
    wait_until(lambda: len(done) == 2)
    assert done == [("compile", 4), ("switch", 4, 7 + AHEAD)]  # beyond what a thread has read after step 6
    assert caplog.messages == ['steps_per_call="auto": up to 4 steps per call (one step takes 1 ms)']


@pytest.mark.parametrize(("fails_on", "switched"), [(None, [("switch", 4, 9)]), (1, [])])
def test_all_processes_take_as_many_steps_as_the_slowest(
    fails_on: int | None, switched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for the program, and no one uses it if one process has none."""
    three = Fellows(monkeypatch, 3)

    def done_by(index: int) -> list[Any]:
        done: list[Any] = []

        def compile(most: int) -> None:
            done.append(("compile", most))
            if index == fails_on:
                raise MemoryError("too large")

        auto = AutoSteps(compile, lambda most, first: done.append(("switch", most, first)))
        auto._choose([1e-4, 1e-3, 5e-4][index], 9)
        return done

    assert three.each(done_by) == [[("compile", 4), *switched]] * 3


def test_a_program_that_cannot_be_compiled_is_logged_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    auto = AutoSteps(raising(MemoryError("too large")), lambda *_: pytest.fail("switched"), iter(range(100)).__next__)
    auto._choose(0.001, 9)
    wait_until(lambda: any("could not be compiled: MemoryError: too large" in m for m in caplog.messages))


def test_only_the_first_calls_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is timed waits for the device; later ones must not."""
    timed: list[int] = []
    run = AutoSteps.timed

    def counted(self: AutoSteps, *args: Any) -> Any:
        timed.append(1)
        return run(self, *args)

    monkeypatch.setattr(AutoSteps, "timed", counted)
    train(100, batches, step=STEP, steps_per_call="auto")
    assert len(timed) == calls_module._UNTIMED + calls_module._TIMED


def test_a_program_belongs_to_the_length_for_which_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread makes a program while the longer calls are chosen."""
    programs = ProgramTable(as_stages(STEP), "auto", state=make_state())
    shape, loop = jax.ShapeDtypeStruct((2,), np.float32), programs._loop

    def while_it_is_chosen(*args: Any) -> Any:
        programs.switch(32, 5)
        return loop(*args)

    monkeypatch.setattr(programs, "_loop", while_it_is_chosen)
    assert programs.program_for(4, "shapes", lambda: (shape,)).max_steps == 1
    assert [programs.program_for(n, "shapes", lambda: (shape,)).max_steps for n in (3, 4, 5, 6)] == [1, 1, 32, 32]
