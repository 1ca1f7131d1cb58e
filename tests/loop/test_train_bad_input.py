"""`train`: bad input."""

import os

import jax
import jax.numpy as jnp
import pytest
from loop_runs import STEP, Calls, train

import jstep


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"step": 3}, TypeError),
        ({"checkpoint_prefix": "a/b"}, ValueError),
        ({"logdir": 3}, TypeError),
        ({"logdir": "ftp://x"}, ValueError),
    ],
)
def test_a_run_that_is_refused_creates_no_files(wrong, error, tmp_path):
    with pytest.raises(error):
        train(**{"last_step": 3, "checkpoint_dir": tmp_path / "c"} | wrong)
    assert os.listdir(tmp_path) == []


def advancing_by(updates):
    def step(state, batch):
        for _ in range(updates):
            state = jstep.increment_global_step(state)
        return state, {"loss": jnp.float32(1)}

    return step


@pytest.mark.thorough(except_for=["step-0-1", "step-16-1"])
@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.parametrize(
    ("step", "advance"),
    [
        (jax.jit(advancing_by(0)), 0),
        (advancing_by(0), 0),
        (advancing_by(2), 2),
        (jax.jit(advancing_by(16)), 16),
    ],
)
def test_a_step_that_does_not_advance_the_global_step_by_one_ends_the_run_after_its_first_call(
    step, advance, steps_per_call, tmp_path
):
    calls = Calls(every_n=100)
    words = (
        f"global_step is {steps_per_call * advance} "
        f"after the update that makes step {steps_per_call}: .* by one"
    )
    advice = (
        "pass increment_global_step=False to all updates in it .*, "
        "and end it with state = jstep.increment_global"
    )
    with pytest.raises(ValueError, match=f"{words}, and changed it from 0 .*{advice}") as raised:
        train(
            1000, step=step, hooks=[calls], checkpoint_dir=tmp_path, steps_per_call=steps_per_call
        )
    assert len(calls.calls) == 1
    assert calls.steps("end") == []  # `end` is called only after success
    assert sorted(os.listdir(tmp_path)) == ["starts"]
    assert f"jstep: at step {steps_per_call}, after the update" in raised.value.__notes__[0]


def test_a_later_stage_that_does_not_advance_the_global_step_ends_the_run_after_its_first_call():
    calls = Calls(every_n=100)
    words = (
        r"global_step is 3 after the update that makes step 4: .* up to step 1, "
        r"but not in each of the updates 1 → 4;"
    )
    with pytest.raises(ValueError, match=words):
        train(1000, step={0: STEP, 3: advancing_by(0)}, hooks=[calls])
    assert calls.calls == [0, 1, 2, 3]


def of_step_that_fails(state, batch):
    raise TypeError("of the user")


@pytest.mark.parametrize("step", [of_step_that_fails, jstep.TrainStep(of_step_that_fails)])
def test_a_step_that_fails_keeps_its_error(step):
    with pytest.raises(TypeError, match=r"^of the user"):
        train(4, step=step)


def test_a_step_that_stops_to_advance_the_global_step_is_found_at_the_end():
    def step(state, batch):
        return jstep.increment_global_step(state) if jstep.global_step(state) < 3 else state, {}

    words = (
        r"global_step is 3 after the update that makes step 5: .* up to step 1, "
        r"but not in each of the updates 1 → 5;"
    )
    with pytest.raises(ValueError, match=words):
        train(5, step=step)
