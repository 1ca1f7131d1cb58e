"""`interrupted_state`: the last complete state of a run that an exception ended, where one
types."""

import sys

import jax.numpy as jnp
import pytest
from doubles import raising
from points import number

import jstep

optimizer, train_step = number()


def batch(step):
    return jnp.float32(1.0)


def make_state():
    return jstep.TrainState.create({"w": 0.0}, optimizer)


def stopped_at(step, error=KeyboardInterrupt, state=None, **options):
    given, fail = (
        make_state() if state is None else state,
        jstep.every(step, raising(error("stop"))),
    )
    with pytest.raises(error) as found:
        jstep.train(train_step, given, batch, 100, hooks=[fail], log_steps=None, **options)
    return found.value


@pytest.fixture(autouse=True)
def prompt(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    yield
    jstep.train(train_step, make_state(), batch, 1, log_steps=None)
    assert jstep.interrupted_state() is None


@pytest.mark.thorough(except_for=["KeyboardInterrupt-4", "ValueError-1"])
@pytest.mark.parametrize("steps_per_call", [1, 4, "auto"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_it_goes_on_as_a_run_that_was_never_stopped(error, steps_per_call):
    raised = stopped_at(8, error, steps_per_call=steps_per_call)
    state = jstep.interrupted_state()
    assert state is raised.state
    assert int(state.global_step) == 8
    assert any("in jstep.interrupted_state()" in note for note in raised.__notes__)
    again = jstep.train(train_step, state, batch, 20, log_steps=None)
    assert again == jstep.train(train_step, make_state(), batch, 20, log_steps=None)
    assert jstep.interrupted_state() is None


def test_a_run_that_fails_before_its_first_step_leaves_it():
    stopped_at(5)
    kept = jstep.interrupted_state()
    wrong = jstep.minimize(lambda params, x: params["v"], optimizer)
    with pytest.raises(KeyError):
        jstep.train(wrong, make_state(), batch, 10, log_steps=None)
    with pytest.raises(ZeroDivisionError):
        jstep.train(train_step, make_state(), lambda step: 1 / 0, 10, log_steps=None)
    assert jstep.interrupted_state() is kept


def test_a_donated_state_points_to_it():
    state = make_state()
    stopped_at(3, state=state)
    with pytest.raises(RuntimeError, match=r"donated.*state = jstep.interrupted_state\(\)"):
        jstep.train(train_step, state, batch, 10)
    train_step(jstep.interrupted_state(), batch(0))  # which donates it
    assert jstep.interrupted_state() is None
    with pytest.raises(RuntimeError, match="donated") as found:
        train_step(state, batch(0))
    assert "interrupted_state" not in str(found.value)


def test_a_program_keeps_nothing(monkeypatch):
    monkeypatch.delattr(sys, "ps1")
    raised = stopped_at(5)
    assert jstep.interrupted_state() is None
    assert not any("interrupted_state" in note for note in raised.__notes__)


def test_the_end_of_stop_secs_keeps_it():
    with pytest.raises(jstep.Preempted):
        jstep.train(train_step, make_state(), batch, None, log_steps=None, stop_secs=0.2)
    assert int(jstep.interrupted_state().global_step) > 0
