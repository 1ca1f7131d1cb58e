"""`jstep.Run`: what the body of the user's own loop may do, and how the run ends."""

import contextlib
import gc
import os
import signal
import threading
import warnings
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

# What an iteration is.


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_it_has_the_bits_and_hook_calls_of_train(steps_per_call, tmp_path):
    ours, theirs = Calls(every_n=3), Calls(every_n=3)
    wanted = train(12, hooks=[theirs], steps_per_call=steps_per_call, checkpoint_dir=tmp_path / "a")
    with run_of(
        12, hooks=[ours], steps_per_call=steps_per_call, checkpoint_dir=tmp_path / "b"
    ) as run:
        steps = list(run)
        assert run.step == 12
    assert same(run.state, wanted)
    assert ours.seen == theirs.seen
    assert steps == (list(range(1, 13)) if steps_per_call == 1 else [3, 6, 9, 12])


def test_state_and_metrics_before_in_and_after_the_block(tmp_path):
    train(3, checkpoint_dir=tmp_path)
    with run_of(5, checkpoint_dir=tmp_path) as run:
        assert (run.step, run.metrics) == (3, None)
        assert same(run.state, by_hand(3))
        assert next(run) == 4
        assert jstep.global_step(run.state) == 4
        assert float(run.metrics["loss"]) > 0
        assert list(run) == [5]
    assert (run.step, jstep.global_step(run.state)) == (5, 5)
    assert float(run.metrics["loss"]) > 0
    assert list(run) == []


@pytest.mark.parametrize("kept", [None, {}])
def test_a_body_that_makes_the_batches(kept, tmp_path):
    calls = Calls(every_n=3)
    with run_of(
        12, kept if kept is None else jstep.from_loop(), hooks=[calls], checkpoint_dir=tmp_path
    ) as run:
        for step in run:
            metrics = run.train_step(DATA[step])
            assert metrics is run.metrics
    assert same(run.state, by_hand(12))
    assert jstep.Saver(tmp_path).latest_step() == 12
    assert calls.steps() == [3, 6, 9, 12]


def test_an_iteration_of_several_steps_is_whole(tmp_path):
    """Saves and `last_step` take effect between iterations."""
    with run_of(7, None, checkpoint_dir=tmp_path, save_checkpoint_steps=2) as run:
        for step in run:
            for n in range(3):
                run.train_step(DATA[step + n])
    assert same(run.state, by_hand(9))
    assert jstep.Saver(tmp_path).all_steps() == [3, 6, 9]


def test_a_saver_that_is_due_within_an_iteration_saves_at_its_end(tmp_path):
    savers = [
        jstep.CheckpointSaverHook(jstep.Saver(tmp_path / "a", max_to_keep=None), save_steps=5)
    ]
    with run_of(20, None, hooks=savers) as run:
        for step in run:
            for n in range(2):
                run.train_step(DATA[step + n])
    assert savers[0].saver.all_steps() == [6, 10, 16, 20]


def test_the_body_is_before_the_save_of_its_step(tmp_path):
    def double(run, step):
        assert step not in jstep.Saver(run_directory).all_steps()
        if step % 3 == 0:
            run.state = doubled(run.state)

    def go(name, last):
        nonlocal run_directory
        run_directory = tmp_path / name
        return loop_to(last, directory=run_directory, body=double, save_checkpoint_steps=3).state

    run_directory = None
    whole = go("a", 12)
    saved = jstep.Saver(tmp_path / "a").restore(make_state(), step=6)
    assert same(saved, go("b", 6))
    assert same(go("b", 12), whole)


def test_every(tmp_path):
    for steps_per_call in (1, 64):
        with run_of(23, steps_per_call=steps_per_call, log_steps=None) as run:
            assert list(run.every(5)) == [5, 10, 15, 20, 23]
    with run_of(None, [DATA[n] for n in range(12)]) as run:  # the batches end between two multiples
        assert list(run.every(5)) == [5, 10, 12]
    with run_of(23, hooks=[Calls(stop=8)]) as run:
        assert list(run.every(5)) == [5, 8]
    with run_of(23, checkpoint_dir=tmp_path) as run:
        for step in run.every(5):
            if step == 10:
                break
    assert run.step == 10
    with run_of(23, checkpoint_dir=tmp_path) as run:
        assert list(run.every(5)) == [15, 20, 23]


# How a run ends.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("makes_batches", [False, True])
def test_a_signal_in_the_body(number, makes_batches, tmp_path):
    after = []
    stopped = pytest.raises((jstep.Preempted, KeyboardInterrupt))
    with (
        stopped as caught,
        run_of(12, None if makes_batches else DATA, checkpoint_dir=tmp_path) as run,
    ):
        for step in run:
            if step == 5:
                os.kill(os.getpid(), number)
            if makes_batches:
                run.train_step(DATA[step])
            after.append(step)
        after.append("not reached")
    assert after[-1] == 5
    last = 6 if makes_batches else 5
    assert jstep.Saver(tmp_path).latest_step() == last == int(caught.value.state.global_step)
    assert same(run.state, by_hand(last))
    assert getattr(caught.value, "code", None) == (143 if number == signal.SIGTERM else None)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert start_of(tmp_path)["end"][0] == "interrupted"


@pytest.mark.parametrize("way", ["break", "stop", "return", "hook"])
def test_a_stop_by_the_loop(way, tmp_path):
    calls = Calls(stop=5 if way == "hook" else None)

    def go():
        with run_of(12, hooks=[calls], checkpoint_dir=tmp_path) as run:
            for step in run:
                if step == 5 and way == "break":
                    break
                if step == 5 and way == "return":
                    return run
                if step == 5 and way == "stop":
                    run.stop()
            assert way != "break" or run.step == 5
        return run

    run = go()
    assert same(run.state, by_hand(5))
    assert ("end", 5) in calls.seen
    assert jstep.Saver(tmp_path).latest_step() == 5
    assert start_of(tmp_path)["end"] == [
        "finished",
        "stopped by " + ("Calls" if way == "hook" else "the loop"),
    ]
    assert same(loop_to(12, directory=tmp_path).state, by_hand(12))


@pytest.mark.parametrize("makes_batches", [False, True])
@pytest.mark.parametrize("way", ["close", "drop"])
def test_a_generator_that_is_dropped_in_the_body_saves_nothing_of_its_iteration(
    way, makes_batches, tmp_path, caplog
):
    """Whoever consumed it has failed, or is done, and the rest of the body never comes."""
    calls = Calls()

    def steps():
        batches = None if makes_batches else DATA
        with run_of(
            12, batches, hooks=[calls], checkpoint_dir=tmp_path, save_checkpoint_steps=2
        ) as run:
            for step in run:
                if makes_batches:
                    run.train_step(DATA[step])
                yield step

    generator = steps()
    last = next(step for step in generator if step == 5)
    if way == "close":
        generator.close()
    else:
        del generator
        gc.collect()
    last += makes_batches
    assert ("end", last) not in calls.seen
    assert jstep.Saver(tmp_path).all_steps() == [2, 4]
    assert start_of(tmp_path)["end"] == ["failed", "GeneratorExit"]
    (line,) = [
        record.getMessage() for record in caplog.records if "ends the run" in record.getMessage()
    ]
    assert line.startswith(
        f"GeneratorExit ends the run at step {last}, after the update with batch {last - 1}, in the"
    )
    assert (
        "is not saved, because the iteration has not ended; a restart resumes from model-4"
    ) in line
    assert same(loop_to(12, directory=tmp_path).state, by_hand(12))


def test_a_generator_that_is_dropped_after_the_loop_has_lost_nothing(tmp_path):
    def steps():
        with run_of(5, checkpoint_dir=tmp_path) as run:
            for _ in run:
                pass
            yield run.step

    generator = steps()
    assert next(generator) == 5
    generator.close()
    assert start_of(tmp_path)["end"] == ["finished", ""]


@pytest.mark.parametrize("way", ["break", "stop"])
def test_leaving_at_the_last_step_is_the_end(way, tmp_path):
    with run_of(5, checkpoint_dir=tmp_path) as run:
        for step in run:
            if step == 5 and way == "stop":
                run.stop("me")
            if step == 5 and way == "break":
                break
    assert start_of(tmp_path)["end"] == ["finished", ""]


def test_the_name_of_a_stop(tmp_path):
    loop_to(12, directory=tmp_path, body=lambda run, step: step == 4 and run.stop("the budget"))
    assert start_of(tmp_path)["end"] == ["finished", "stopped by the budget"]


def test_a_swallowed_error_is_raised_where_the_block_ends(tmp_path):
    def batches(step):
        if step == 5:
            raise BoomError("batch")
        return DATA[step]

    seen = []
    with pytest.raises(BoomError), run_of(12, batches, checkpoint_dir=tmp_path) as run:  # noqa: PT012
        with contextlib.suppress(BoomError):
            for _ in run:
                pass
        seen.append(run.step)
        seen += list(run)
    assert seen == [5]
    assert jstep.Saver(tmp_path).latest_step() == 5


def test_no_step_is_taken_after_an_error_of_a_step(tmp_path):
    with (  # noqa: PT012
        pytest.raises(TypeError, match="indexing"),
        run_of(12, None, checkpoint_dir=tmp_path) as run,
    ):
        for step in run:
            if step == 3:
                with pytest.raises(TypeError, match="indexing"):
                    run.train_step(np.zeros(3, np.float32))
                with pytest.raises(TypeError, match="indexing"):  # the error of the run again
                    run.train_step(DATA[step])
                continue
            run.train_step(DATA[step])
    assert run.step == 3


def test_a_loop_may_be_left_and_entered_again(tmp_path):
    with run_of(12, checkpoint_dir=tmp_path) as run:
        for step in run:
            if step == 4:
                break
        assert list(run) == list(range(5, 13))
    assert same(run.state, by_hand(12))
    with run_of(12, checkpoint_dir=tmp_path) as run:
        assert list(run) == []
    assert same(run.state, by_hand(12))


def test_a_fork_in_the_body_leaves_the_run_to_its_parent(tmp_path):
    def fork(run, step):
        with warnings.catch_warnings(action="ignore"):  # JAX warns of forks
            child = os.fork() if step == 3 else None
        if child == 0:
            try:
                with pytest.raises(RuntimeError, match="process"):
                    next(run)
                run.__exit__(None, None, None)
                os._exit(7)
            finally:
                os._exit(1)
        elif child is not None:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    run = loop_to(6, directory=tmp_path, body=fork)
    assert same(run.state, by_hand(6))
    assert start_of(tmp_path)["end"] == ["finished", ""]


def test_the_state_is_released_with_the_run():
    with run_of(5, hooks=[jstep.every(2, lambda step, state, metrics: doubled(state))]) as run:
        for step in run:
            if step == 3:
                break
    state = weakref.ref(run.state)
    gc.disable()  # no cycle may keep it
    try:
        del run
        assert state() is None
    finally:
        gc.enable()


# Threads, and other runs.


def test_in_a_thread(tmp_path):
    found, errors = [], []

    def go():
        with run_of(5, checkpoint_dir=tmp_path) as run:
            for _ in run:
                thread = threading.Thread(target=iterate, args=(run,))
                thread.start()
                thread.join()
        found.append(run.state)

    def iterate(run):
        try:
            next(run)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    assert same(found[0], by_hand(5))
    assert len(errors) == 5
    assert "thread" in errors[0]


def test_nested_runs(tmp_path):
    inner = []

    def body(run, step):
        if step == 2:
            inner.append(loop_to(4, directory=tmp_path / "inner").state)
            inner.append(train(3, checkpoint_dir=tmp_path / "train"))

    outer = loop_to(5, directory=tmp_path / "outer", body=body)
    assert same(outer.state, by_hand(5))
    assert same(inner[0], by_hand(4))
    assert same(inner[1], by_hand(3))


def test_runs_that_end_in_another_order_put_the_handlers_back():
    """As generators may that hold a run each; the second run still obeys a signal when the first
    one has ended."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    def cross():
        first, second = run_of(6), run_of(6)
        first.__enter__()
        with second:
            next(second)
            first.__exit__(None, None, None)
            signal.raise_signal(signal.SIGTERM)
            next(second)

    with pytest.raises(jstep.Preempted):
        cross()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
