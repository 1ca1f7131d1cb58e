"""What `jstep.Run` rejects: calls at the wrong place, wrong arguments, and states that do not
fit."""

import pytest
from loop_runs import DATA, STEP, by_hand, make_state, run_of, same, train

import jstep


def test_calls_at_the_wrong_place():
    run = run_of(5)
    with pytest.raises(RuntimeError, match="must be entered first"):
        next(run)
    with run:
        with pytest.raises(RuntimeError, match=r"run\.state = …: must be in the body"):
            run.state = make_state()
        for _ in run:
            with pytest.raises(
                RuntimeError,
                match=r"run\.train_step: the run takes its batches itself",
            ):
                run.train_step(DATA[0])
            with pytest.raises(RuntimeError, match="before the first step"):
                run.every(5)
    with pytest.raises(RuntimeError, match=r"run\.state = …: must be in the body"):
        run.state = make_state()
    with pytest.raises(RuntimeError, match="must be entered once"), run:
        pass
    with run_of(5) as run:
        by_two = run.every(2)
        with pytest.raises(RuntimeError, match=r"run\.every\(5\): was called before, with 2"):
            run.every(5)
        assert list(by_two) == [2, 4, 5]
    with run_of(5, None) as run:
        with pytest.raises(RuntimeError, match=r"run\.every: the body makes the batches"):
            run.every(5)
        for step in run:
            run.train_step(DATA[step])
    with pytest.raises(RuntimeError, match=r"run\.train_step.*must be in the body"):
        run.train_step(DATA[0])


def test_arguments_are_checked_before_the_block():
    with pytest.raises(ValueError, match=r"steps_per_call=4.*steps_per_call=1"):
        run_of(5, None, steps_per_call=4)
    with pytest.raises(TypeError, match=r"batches=None: .*jstep\.Run"):
        train(5, None)
    with pytest.raises(TypeError, match=r"jstep\.Run"):
        train(5, jstep.from_loop())
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_steps'; use last_step"):
        run_of(5, max_steps=5)
    with pytest.raises(
        TypeError,
        match=r"train\(\) missing 2 required .*: 'batches' and 'last_step'",
    ):
        jstep.train(STEP, make_state())


def test_a_donated_state_is_rejected():
    with run_of(3) as run:
        for step in run:
            if step == 1:
                old = run.state
            else:
                with pytest.raises(RuntimeError, match="was donated to an earlier step"):
                    run.state = old
    assert same(run.state, by_hand(3))


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        (lambda state: {}, TypeError, "must be a TrainState, got a dict"),
        (
            lambda state: (state, {}),
            TypeError,
            "must be a TrainState, got the pair that a step returns; unpack it",
        ),
        (lambda state: make_state(), ValueError, "at step 0: must be at step 1"),
    ],
    ids=["dict", "result", "step"],
)
def test_a_state_that_does_not_fit_is_rejected(state, error, text):
    with run_of(3) as run:
        for step in run:
            if step == 1:
                with pytest.raises(error, match=text):
                    run.state = state(run.state)
    assert same(run.state, by_hand(3))


@pytest.mark.parametrize("makes_batches", [False, True])
def test_a_body_that_donates_the_state(makes_batches, tmp_path):
    run = run_of(
        9, None if makes_batches else DATA, checkpoint_dir=tmp_path, save_checkpoint_steps=2
    )
    with pytest.raises(RuntimeError, match="donated") as caught, run:  # noqa: PT012
        for step in run:
            if step == 3:
                STEP(run.state, DATA[0])
            if makes_batches:
                run.train_step(DATA[step])
    assert caught.value.state is None
    assert run.state is None
    assert same(jstep.Saver(tmp_path).restore(make_state()), by_hand(2))
