"""What ends an iteration of a `Run` before its end saves nothing of it; an error between two
iterations is saved."""

import contextlib
import gc
import math
import re
import signal
import weakref

import numpy as np
import pytest
from loop_runs import (
    DATA,
    BoomError,
    Calls,
    by_hand,
    doubled,
    loop_to,
    make_state,
    run_of,
    same,
    start_of,
    train,
)

import jstep
from jstep.checkpoint.saver import Saver
from jstep.hooks.course import Course, LoopState
from jstep.hooks.timetable import Timetable
from jstep.loop.hook_errors import HookErrors

AT = 7


class Memory(jstep.Hook):
    """A hook whose state is what it has seen; a place in it may fail, or end the process."""

    def __init__(self, place="", end=None):
        self.place, self.end_with, self.seen = place, end, []

    def at(self, place, step):
        self.seen.append((place, step))
        if (place, step) == (self.place, AT):
            self.end_with()

    def before_step(self, step, state):
        self.at("before_step", step + 1)

    def after_step(self, step, state, metrics):
        self.at("after_step", step)

    def get_state(self):
        return self.seen

    def set_state(self, state):
        self.seen = [tuple(entry) for entry in state]


def fail():
    raise BoomError("a tracker")


def leave():
    raise SystemExit(3)


def interrupt():
    raise KeyboardInterrupt


class Places:
    """A loop with code of the user at each place; one of them ends it at step 7, if it is asked
    to."""

    def __init__(self, place="", end=None):
        self.place, self.end, self.bodies, self.memory = place, end, [], Memory(place, end)

    def at(self, place, step):
        if (place, step) == (self.place, AT):
            self.end()

    def evaluate(self, state):
        self.at("evaluation", int(state.global_step))
        return {"w": float(state.params["w"][0])}

    def run(self, directory, *, steps_per_call=1, interval=None, makes_batches=False):
        rng = np.random.default_rng(0)
        batches = jstep.from_loop(rng=rng) if makes_batches else DATA
        evaluation = jstep.EvaluationHook(self.evaluate, every_n_steps=AT, callbacks=[])
        run = run_of(12, batches, hooks=[self.memory, evaluation], checkpoint_dir=directory,
                     save_checkpoint_steps=2, steps_per_call=steps_per_call)  # fmt: skip
        with run:
            for step in run if interval is None else run.every(interval):
                self.bodies.append(step)
                self.at("body", step + makes_batches)
                if makes_batches:
                    run.train_step({"x": DATA[step]["x"] + np.float32(rng.normal())})
                if step % 3 == 0:
                    run.state = doubled(run.state)
                self.at("end of the body", step + makes_batches)
        return run.state, self.memory.seen


WITHIN = "before_step", "after_step", "evaluation", "body", "end of the body"
OPTIONS = [{}, {"steps_per_call": 4, "interval": 7}, {"interval": 7}, {"makes_batches": True}]


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize(
    "options", OPTIONS, ids=["calls", "calls of several steps", "every", "makes batches"]
)
@pytest.mark.parametrize("end", [fail, leave, interrupt], ids=lambda end: end.__name__)
@pytest.mark.parametrize("place", WITHIN)
def test_within_an_iteration(place, end, options, tmp_path):
    """The restart has the bits, and each hook and body once, of a run that nothing has ended."""
    undisturbed = Places()
    whole = undisturbed.run(tmp_path / "whole", **options)
    ended = Places(place, end)
    with pytest.raises((BoomError, SystemExit, KeyboardInterrupt)) as caught:
        ended.run(tmp_path / "run", **options)
    newest = max(jstep.Saver(tmp_path / "run").all_steps())
    assert newest in (4, 6)
    names = {
        "before_step": "Memory.before_step",
        "after_step": "Memory.after_step",
        "evaluation": "EvaluationHook.after_step",
    }
    what = names.get(place, "the body of the loop")
    note = caught.value.__notes__[0]
    step = int(caught.value.state.global_step)
    assert (
        f", in {what}; the state after step {step} is in the exception's `state`, "
        "and is not saved, because"
    ) in note
    assert re.search(
        rf"the iteration has not ended; a restart resumes from model-{newest}, \d+ s old\.$",
        note,
    )
    assert start_of(tmp_path / "run")["end"][0] == "failed"
    again = Places()
    resumed = again.run(tmp_path / "run", **options)
    assert same(resumed[0], whole[0])
    assert resumed[1] == whole[1]
    saved = [step for step in ended.bodies if step + options.get("makes_batches", False) <= newest]
    assert saved + again.bodies == undisturbed.bodies


def test_an_iteration_of_several_steps(tmp_path):
    run = run_of(12, None, checkpoint_dir=tmp_path, save_checkpoint_steps=3)
    with pytest.raises(BoomError) as caught, run:  # noqa: PT012
        for step in run:
            for n in range(3):
                run.train_step(DATA[step + n])
                if run.step == 8:
                    fail()
    assert same(caught.value.state, by_hand(8))
    assert same(run.state, by_hand(8))
    assert jstep.Saver(tmp_path).latest_step() == 6


def test_without_a_checkpoint_yet_the_next_start_begins_from_scratch(tmp_path):
    with pytest.raises(BoomError) as caught:
        loop_to(12, directory=tmp_path, body=lambda run, step: fail())
    assert caught.value.__notes__[0].endswith(
        "there is no checkpoint yet, so a restart begins from scratch."
    )
    assert same(loop_to(12, directory=tmp_path).state, by_hand(12))


# Between two iterations.


def raising_at(step, batches=DATA):
    def batch(number):
        if number == step:
            fail()
        return batches[number]

    return batch


def other_shape(number):
    return {"x": np.zeros((3, 5), np.float32)} if number == AT else DATA[number]


def raise_os_error(step, values):
    if step == AT:
        raise OSError("HTTP 500")


class FailingSaver(jstep.CheckpointSaverHook):
    def save(self, step, state, **options):
        if step == AT:
            fail()
        return super().save(step, state, **options)


HOOKS = {
    "a tracker": lambda path: jstep.MetricsHook(raise_os_error, every_n_steps=1),
    "another tracker": lambda path: jstep.MetricsHook(
        lambda step, values: step == AT and fail(), every_n_steps=1
    ),
    "a saver": lambda path: FailingSaver(path, save_steps=AT),
}


@pytest.mark.parametrize("kind", ["loader", "shape", *HOOKS])
def test_between_two_iterations(kind, tmp_path):
    """The state is saved, and no body runs twice or is left out."""
    bodies = []

    def go(name, batches=DATA, hooks=()):
        return loop_to(
            12, directory=tmp_path / name, body=double, batches=batches, hooks=hooks
        ).state

    def double(run, step):
        bodies.append(step)
        run.state = doubled(run.state) if step % 3 == 1 else run.state

    whole, steps = go("whole"), bodies[:]
    bodies.clear()
    batches = {"loader": raising_at(AT), "shape": other_shape}.get(kind, DATA)
    with pytest.raises((BoomError, OSError, TypeError)) as caught:
        go("run", batches, [HOOKS[kind](tmp_path / "other")] if kind in HOOKS else [])
    assert "is saved as model-7; start the run again to resume" in caught.value.__notes__[-1]
    assert same(go("run"), whole)
    assert bodies == steps


def test_a_best_checkpoint_that_cannot_be_saved_ends_the_run_at_the_end_of_the_iteration(
    tmp_path, monkeypatch
):
    save = Saver.save

    def broken(self, state, extra=None):
        if self.prefix == "best" and int(state.global_step) == AT:
            raise OSError("no space left")
        return save(self, state, extra)

    monkeypatch.setattr(Saver, "save", broken)
    best = jstep.KeepBest(tmp_path / "best", "w", mode="max")
    evaluate = jstep.EvaluationHook(
        lambda state: {"w": int(state.global_step)}, every_n_steps=AT, callbacks=[best]
    )
    bodies = []
    with pytest.raises(OSError, match="no space left") as caught:
        loop_to(
            12, directory=tmp_path, body=lambda run, step: bodies.append(step), hooks=[evaluate]
        )
    assert (
        "in KeepBest.save; the state after step 7 is in the exception's `state`, "
        "and is not saved, because a best" in (caught.value.__notes__[-1])
    )
    assert bodies == [1, 2, 3, 4, 5, 6, 7]


def test_the_best_checkpoint_is_saved_where_it_was_evaluated(tmp_path):
    """It has the state that was evaluated: before the body, and between two steps of an
    iteration."""
    best, seen = jstep.KeepBest(tmp_path / "best", "w", mode="max", max_to_keep=9), []
    evaluate = jstep.EvaluationHook(
        lambda state: {"w": jstep.global_step(state)}, every_n_steps=2, callbacks=[best]
    )
    with run_of(9, None, hooks=[evaluate], checkpoint_dir=tmp_path) as run:
        for step in run:
            for n in range(3):
                run.train_step(DATA[step + n])
                seen.append((run.step, sorted(best.values)))
            run.state = doubled(run.state)
    assert seen[:6] == [(1, []), (2, [2]), (3, [2]), (4, [2, 4]), (5, [2, 4]), (6, [2, 4, 6])]
    with jstep.Saver(tmp_path / "best", prefix="best") as saver:
        assert same(saver.restore(make_state(), step=2), by_hand(2))
        assert same(saver.restore(make_state(), step=4), by_hand(4, doubled(by_hand(3))))


# Signals and stops within an iteration.


@pytest.mark.parametrize(
    "place", ["before_step", "after_step", "evaluation", "body", "end of the body"]
)
def test_a_signal_takes_effect_at_the_end_of_the_iteration(place, tmp_path):
    whole = Places().run(tmp_path / "whole")
    ended = Places(place, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(jstep.Preempted):
        ended.run(tmp_path / "run")
    assert jstep.Saver(tmp_path / "run").latest_step() == AT
    assert ended.bodies[-1] == AT
    resumed = Places().run(tmp_path / "run")
    assert same(resumed[0], whole[0])
    assert resumed[1] == whole[1]


def test_an_evaluation_is_finished_under_a_signal_if_a_body_follows(tmp_path):
    """In `train` it is abandoned, and runs again after the restart."""
    taken = []

    def batches():
        for n in range(4):
            taken.append(n)
            if len(taken) == 3:
                signal.raise_signal(signal.SIGTERM)
            yield DATA[n]

    class Validation:
        def __iter__(self):
            return batches()

    for makes_run, expected in (run_of, {5: {"x": 1.0}}), (train, {}):
        taken.clear()
        hook = jstep.EvaluationHook(
            jstep.evaluator(lambda params, batch: {"x": 1.0}, Validation()), every_n_steps=5
        )
        with pytest.raises(jstep.Preempted), contextlib.ExitStack() as stack:  # noqa: PT012
            run = makes_run(12, hooks=[hook], checkpoint_dir=tmp_path / makes_run.__name__)
            list(stack.enter_context(run))
        assert hook.results == expected


@pytest.mark.parametrize("batches", [DATA, None])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_stop_before_the_first_iteration_takes_no_step(batches, resumed, tmp_path):
    if resumed:
        train(4, checkpoint_dir=tmp_path)
    calls, first = Calls(), 4 if resumed else 0
    with run_of(12, batches, hooks=[calls], checkpoint_dir=tmp_path) as run:
        run.stop("nothing to do")
        assert list(run) == []
    assert run.step == first
    assert same(run.state, by_hand(first))
    assert calls.seen == [("begin", first), ("close",)]
    assert jstep.Saver(tmp_path).latest_step() == (first or None)
    assert start_of(tmp_path)["end"] == ["finished", "stopped by nothing to do"]
    assert same(loop_to(12, directory=tmp_path).state, by_hand(12))


def test_a_hook_that_stops_the_run_does_not_end_the_iteration(tmp_path):
    seen = []
    loop_to(12, directory=tmp_path, body=lambda run, step: seen.append(step), hooks=[Calls(stop=5)])
    assert seen[-1] == 5
    assert jstep.Saver(tmp_path).latest_step() == 5


# Bodies at some steps only.


@pytest.mark.parametrize("killed", ["in the last body", "between"])
def test_the_last_body_of_batches_that_end_between_two_multiples(killed, tmp_path):
    """A start may find that the batches had ended where the one before has saved, without running
    the body."""
    twelve = [DATA[n] for n in range(12)]

    def go(should_fail=False):
        seen = []
        with run_of(None, twelve, checkpoint_dir=tmp_path, save_checkpoint_steps=1) as run:
            for step in run.every(5):
                seen.append(step)
                if should_fail and step == 12:
                    fail()
        return seen

    with pytest.raises(BoomError):
        go(should_fail=True)
    assert jstep.Saver(tmp_path).latest_step() == 12
    if killed == "between":
        with pytest.raises(BoomError):
            go(should_fail=True)
    assert go() == [12]
    assert go() == []


def test_an_iteration_without_a_body_is_saved_and_its_hooks_are_within_it(tmp_path):
    memory = Memory("after_step", fail)
    with (
        pytest.raises(BoomError),
        run_of(12, hooks=[memory], checkpoint_dir=tmp_path, save_checkpoint_steps=1) as run,
    ):
        for _ in run.every(100):
            pass
    assert jstep.Saver(tmp_path).latest_step() == AT - 1


# What meets it.


def test_a_run_in_the_body_of_another_one_that_a_signal_ends(tmp_path):
    """It reaches the inner run; its exception is one in the body of the outer run."""

    preempt = jstep.every(3, lambda *_: signal.raise_signal(signal.SIGTERM))

    def body(run, step):
        if step == 5:
            train(8, hooks=[preempt], checkpoint_dir=tmp_path / "in")

    with pytest.raises(jstep.Preempted) as caught:
        loop_to(12, directory=tmp_path / "out", body=body, save_checkpoint_steps=2)
    assert jstep.Saver(tmp_path / "in").latest_step() == 3
    assert jstep.Saver(tmp_path / "out").latest_step() == 4
    assert same(caught.value.state, by_hand(5))


def test_a_loss_that_is_not_finite_in_an_iteration(tmp_path):
    def bad(step):
        return {"x": DATA[step]["x"] * np.float32(math.nan if step == AT else 1)}

    with pytest.raises(jstep.NanLossDuringTrainingError):
        loop_to(
            12,
            directory=tmp_path,
            batches=bad,
            hooks=[jstep.NanLossHook()],
            save_checkpoint_steps=2,
        )
    assert jstep.Saver(tmp_path).latest_step() == 6


@pytest.mark.parametrize("count", [1, 2])
def test_the_errors_of_hooks_are_freed_without_a_collection(count):
    course = Course(LoopState(0, None), 1, Timetable(), has_body=False)

    def fail():
        errors = HookErrors(course)
        for _ in range(count):
            with errors:
                raise BoomError
        errors.end()

    gc.disable()  # no cycle may keep them
    try:
        try:
            fail()
        except BoomError as error:
            raised = weakref.ref(error)
        assert raised() is None
    finally:
        gc.enable()
