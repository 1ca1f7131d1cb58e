"""An exception in the body of a loop: what is saved, and where a restart begins."""

import signal

import pytest
from loop_runs import DATA, BoomError, Calls, by_hand, doubled, loop_to, make_state, run_of, same, start_of

import jstep


def test_an_exception_in_the_body(tmp_path):
    calls = Calls()

    def fail(run, step):
        if step == 5:
            raise BoomError("five")

    with pytest.raises(BoomError) as caught:
        loop_to(12, directory=tmp_path, body=fail, hooks=[calls])
    assert (
        "in the body of the loop; the state after step 5 is in the exception's `state`, and is saved as model-5"
        in (caught.value.__notes__[0])
    )
    assert same(caught.value.state, by_hand(5))
    assert ("end", 5) not in calls.seen
    assert start_of(tmp_path)["end"] == ["failed", "BoomError: five"]
    assert same(loop_to(12, directory=tmp_path).state, by_hand(12))


@pytest.mark.parametrize("error", [BoomError("a logger"), SystemExit("no budget")])
@pytest.mark.parametrize(("at", "steps_per_call", "interval"), [(6, 1, None), (12, 1, None), (8, 4, 8), (10, 4, 5)])
def test_a_body_that_an_exception_interrupts_is_run_by_the_restart(at, steps_per_call, interval, error, tmp_path):
    """The rest of it is part of the step: a restart has the bits, and what the body reads, of a run without it."""
    metrics = {}

    def go(name, fail=False):
        seen = []
        with run_of(12, checkpoint_dir=tmp_path / name, steps_per_call=steps_per_call) as run:
            for step in run if interval is None else run.every(interval):
                seen.append(step)
                loss = float(run.metrics["loss"])
                assert metrics.setdefault(step, loss) == loss
                assert run.step == step == jstep.global_step(run.state)
                if step == at:
                    if fail:
                        raise error
                    run.state = doubled(run.state)
        return run.state, seen

    whole, steps = go("whole")
    with pytest.raises(type(error)):
        go("run", fail=True)
    for _ in range(2):  # it fails again
        with pytest.raises(type(error)):
            go("run", fail=True)
    assert jstep.Saver(tmp_path / "run").latest_step() == at
    state, seen = go("run")
    assert same(state, whole)
    assert seen == steps[steps.index(at) :]
    state, seen = go("run")
    assert same(state, whole)
    assert seen == []  # it has ended


def test_a_body_that_is_interrupted_after_it_replaced_the_state_is_run_from_an_earlier_step(tmp_path):
    def body(run, step):
        if step == 6:
            run.state = doubled(run.state)
            if should_fail:
                raise BoomError("six")

    should_fail = True
    with pytest.raises(BoomError) as caught:
        loop_to(12, directory=tmp_path / "run", body=body, save_checkpoint_steps=4)
    assert same(caught.value.state, doubled(by_hand(6)))
    assert "is not saved: the body of the loop had replaced the state and has not ended" in caught.value.__notes__[0]
    assert jstep.Saver(tmp_path / "run").latest_step() == 4
    should_fail = False
    whole = loop_to(12, directory=tmp_path / "whole", body=body).state
    assert same(loop_to(12, directory=tmp_path / "run", body=body).state, whole)


def test_a_signal_while_an_interrupted_body_runs_again(tmp_path):
    with pytest.raises(BoomError):
        loop_to(12, directory=tmp_path, body=lambda run, step: fail_at(5, step))
    seen = []
    with pytest.raises(jstep.Preempted), run_of(12, checkpoint_dir=tmp_path) as run:  # noqa: PT012
        for step in run:
            signal.raise_signal(signal.SIGTERM)
            run.state = doubled(run.state)
            seen.append(step)
    assert seen == [5]
    assert same(jstep.Saver(tmp_path).restore(make_state()), doubled(by_hand(5)))
    with run_of(12, checkpoint_dir=tmp_path) as run:
        assert next(run) == 6
        run.stop()


def fail_at(step, now):
    if now == step:
        raise BoomError(f"at {step}")


@pytest.mark.parametrize("steps", [1, 3])
def test_an_exception_in_an_iteration_that_makes_batches(steps, tmp_path):
    """A state within an iteration of several steps cannot be resumed from."""
    run = run_of(12, None, checkpoint_dir=tmp_path, save_checkpoint_steps=3)
    with pytest.raises(BoomError) as caught, run:  # noqa: PT012
        for step in run:
            for n in range(steps):
                run.train_step(DATA[step + n])
                if run.step == 8:
                    raise BoomError("eight")
    assert same(caught.value.state, by_hand(8))
    assert same(run.state, by_hand(8))
    assert jstep.Saver(tmp_path).latest_step() == (8 if steps == 1 else 6)
    assert ("not complete" in caught.value.__notes__[0]) == (steps == 3)
