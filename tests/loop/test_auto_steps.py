"""`steps_per_call="auto"`: the number of steps of a call is chosen from the times and the lengths
of calls."""

import logging
import types

import jax
import numpy as np
import pytest
from comparisons import same
from fellows import Fellows
from loop_runs import OPTIMIZER, make_state, train

import jstep
from jstep.compiling import dispatch
from jstep.compiling.chunks import Chunk
from jstep.compiling.dispatch import MAX_STEPS_PER_CALL, AutoSteps, choose_max_steps
from jstep.compiling.programs import ProgramTable
from jstep.compiling.stages import as_stages

STEP = jstep.minimize(lambda params, x: ((params["w"] - x) ** 2).mean(), OPTIMIZER)


def batches(step):
    return np.full(2, step, np.float32)


@pytest.mark.parametrize(
    ("seconds", "most"),
    [(26e-6, 64), (78e-6, 64), (80e-6, 32), (1e-3, 4), (2.5e-3, 2), (2.6e-3, 1), (1.0, 1)],
)
def test_a_call_takes_at_most_five_milliseconds(seconds, most):
    assert choose_max_steps(seconds) == most


class Table(types.SimpleNamespace):
    """Records what is compiled, unless that fails, and the maximum that is set then."""

    def __init__(self, error=None):
        super().__init__(done=[], error=error, sums=None, max_steps=None)

    def compile_with_max_steps(self, most):
        self.done.append(("compile", most))
        if self.error is not None:
            raise self.error


@pytest.fixture
def compile_at_once(monkeypatch):
    """Otherwise it is a matter of luck how many calls a run makes meanwhile."""
    monkeypatch.setattr(dispatch, "run_in_background", lambda function, name: function())


def run_auto(seconds_of_call, error=None, cut=MAX_STEPS_PER_CALL):
    """What `AutoSteps` does in a run whose calls take `seconds_of_call(number of the call, steps)`.

    Hooks cut each call to at most `cut` steps.
    """
    now, table, lengths = [0.0], Table(error), []
    auto = AutoSteps(table, lambda: now[0])

    def run(state, chunk, sums):
        now[0] += seconds_of_call(len(lengths), chunk.steps)
        lengths.append(chunk.steps)
        return None, None

    while not auto.is_over:
        auto.run_timed(
            None, Chunk(types.SimpleNamespace(run=run), (), min(cut, table.max_steps or 1), 0)
        )
        assert len(lengths) < 100
    return table, lengths


@pytest.mark.usefixtures("compile_at_once")
def test_calls_that_compile_do_not_count_and_the_shortest_decides(caplog):
    caplog.set_level(logging.INFO)
    seconds = [3.0, 1e-4, 0.002, 0.001, 0.5, 0.002, 0.002]
    table, lengths = run_auto(lambda call, steps: seconds[call % 7] * steps)
    assert (table.done, table.max_steps) == ([("compile", 4)], 4)
    assert lengths == [1] * 7 + [4] * 7
    assert caplog.messages == [
        'steps_per_call="auto": up to 4 steps per call (one step takes 1 ms)'
    ]


@pytest.mark.usefixtures("compile_at_once")
def test_the_time_of_a_step_is_without_the_overhead_of_a_single_call(caplog):
    """A call takes 0.8 ms, and each of its steps 0.04: by single calls alone, 4 steps would be
    chosen."""
    caplog.set_level(logging.INFO)
    table, _ = run_auto(lambda call, steps: 0.8e-3 + 0.04e-3 * steps)
    assert table.done == [("compile", 4), ("compile", 16), ("compile", 32), ("compile", 64)]
    assert table.max_steps == 64
    assert caplog.messages == [
        'steps_per_call="auto": up to 64 steps per call (one step takes 0.0525 ms)'
    ]


@pytest.mark.usefixtures("compile_at_once")
def test_the_most_steps_are_not_exceeded():
    table, _ = run_auto(lambda call, steps: 1e-6 * steps)
    assert table.done == [("compile", 64)]


def test_long_steps_are_timed_once():
    table, lengths = run_auto(lambda call, steps: 0.01 * steps)
    assert (table.done, lengths) == ([], [1] * 7)


@pytest.mark.usefixtures("compile_at_once")
@pytest.mark.parametrize(
    ("cut", "compiled", "last", "text"),
    [
        (1, [4, None], None, "1 step per call, as none had more than 1 (one step takes 0.84 ms)"),
        (2, [4, 2], 2, "up to 2 steps per call, as none had more than 2 (one step takes 0.44 ms)"),
        (
            10,
            [4, 16, 32, 16],
            16,
            "up to 16 steps per call, as none had more than 10 (one step takes 0.12 ms)",
        ),
        (
            16,
            [4, 16, 32, 16],
            16,
            "up to 16 steps per call, as none had more than 16 (one step takes 0.09 ms)",
        ),
        (36, [4, 16, 32, 64], 64, "up to 64 steps per call (one step takes 0.0622 ms)"),
    ],
)
def test_calls_that_hooks_end_early_are_not_padded_to_twice_their_steps(
    cut, compiled, last, text, caplog
):
    caplog.set_level(logging.INFO)
    table, lengths = run_auto(lambda call, steps: 0.8e-3 + 0.04e-3 * steps, cut=cut)
    assert table.done == [("compile", most) for most in compiled]
    assert table.max_steps == last
    assert max(lengths) == cut
    assert caplog.messages == [f'steps_per_call="auto": {text}']


@pytest.mark.usefixtures("compile_at_once")
def test_a_program_that_cannot_be_compiled_ends_the_choice(caplog):
    table, _ = run_auto(lambda call, steps: 1e-3 * steps, MemoryError("too large"))
    assert (table.done, table.max_steps) == ([("compile", 4)], None)
    assert caplog.messages == [
        "the program of up to 4 steps could not be compiled: MemoryError: too large"
    ]


@pytest.mark.parametrize(("fails_on", "most"), [(None, 4), (1, None)])
def test_all_processes_take_as_many_steps_as_the_slowest(fails_on, most, monkeypatch):
    """They wait for the program, and no one uses it if one process has none."""
    three = Fellows(monkeypatch, 3)

    def done_by(index):
        table = Table(MemoryError("too large") if index == fails_on else None)
        AutoSteps(table)._choose([1e-4, 1e-3, 5e-4][index])
        return table.done, table.max_steps

    assert three.each(done_by) == [([("compile", 4)], most)] * 3


@pytest.mark.usefixtures("compile_at_once")
def test_only_calls_before_the_choice_are_timed(monkeypatch):
    """A call that is timed waits for the device; later ones must not."""
    monkeypatch.setattr(dispatch, "choose_max_steps", lambda seconds: 4)
    timed = []
    run = AutoSteps.run_timed

    def counted(self, *args):
        assert not self.is_over
        result = run(self, *args)
        timed.append(self.is_over)
        return result

    monkeypatch.setattr(AutoSteps, "run_timed", counted)
    train(100, batches, step=STEP, steps_per_call="auto")
    calls = 2 * (dispatch._UNTIMED_CALLS + dispatch._TIMED_CALLS)
    assert timed == [False] * (calls - 1) + [True]


def test_the_longer_program_is_known_to_be_compiled() -> None:
    """Otherwise its first call would be logged as a compilation for other shapes."""
    programs = ProgramTable(as_stages(STEP), "auto", state=make_state())
    args = (jax.ShapeDtypeStruct((2,), np.float32),)
    assert not programs.program_for(0, "shapes", lambda: args).is_compiled_ahead
    programs.compile_with_max_steps(4)
    programs.max_steps = 4
    longer = programs.program_for(0, "shapes", lambda: args)
    assert longer.is_compiled_ahead
    programs.compile_with_max_steps(4)
    assert programs.program_for(0, "shapes", lambda: args) is longer  # not compiled again


def test_a_run_whose_hooks_end_all_calls_goes_back_to_shorter_ones(monkeypatch, caplog):
    """It has the bits of a run of long calls, and its programs are not compiled for a second
    time."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(dispatch, "choose_max_steps", lambda seconds: 64)
    monkeypatch.setattr(dispatch, "run_in_background", lambda function, name: function())
    hooks = [jstep.every(3, lambda step, state, metrics: None)]
    # No other test compiles this step.
    step = jstep.minimize(lambda params, x: ((params["w"] - x) ** 2).mean(), OPTIMIZER)
    auto = train(60, batches, step=step, steps_per_call="auto", hooks=hooks)
    choice = 'steps_per_call="auto": up to 4 steps per call, as none had more than 3'
    assert [text.partition(" (")[0] for text in caplog.messages] == [
        "compiling train_step for 1 step",
        choice,
    ]
    assert same(auto, train(60, batches, step=step, steps_per_call=8))
