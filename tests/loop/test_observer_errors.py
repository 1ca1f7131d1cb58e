"""An error of an observer leaves the position of the run true, whatever moment it comes at."""

import jax.numpy as jnp
import pytest

import jstep
from jstep.loop.observer import Observer
from jstep.running import run as running

OPTIMIZER = jstep.gradient_descent(0.25)
TRAIN_STEP = jstep.minimize(lambda params, x: jnp.sum(params["w"] * x), OPTIMIZER)


class Broken(Observer):
    """Raises at its moment, once the run has taken `step` steps."""

    moment = ""
    step = 0

    def __init__(self, run):
        self._run = run

    def _raise_at(self, moment):
        if moment == Broken.moment and self._run.step >= Broken.step:
            raise RuntimeError(f"of {moment}")

    def on_first_call(self, chunk, state):
        self._raise_at("on_first_call")

    def on_replaced(self, step, author, old_state, new_state):
        self._raise_at("on_replaced")

    def on_save(self, step):
        self._raise_at("on_save")
        return {}


class Doubles(jstep.Hook):
    def after_step(self, step, state, metrics):
        doubled = state.replace(params={"w": 2 * state.params["w"]})
        state.params["w"].delete()  # as a function of the user's that donates it
        return doubled


@pytest.fixture
def broken(monkeypatch):
    attached = running.attached_observers()
    monkeypatch.setattr(running, "attached_observers", lambda: (*attached, Broken))
    return Broken


def failed_run(stages, last_step=6, **options):
    state = jstep.TrainState.create({"w": jnp.ones(())}, OPTIMIZER)
    with pytest.raises(RuntimeError) as raised:
        jstep.train(stages, state, [jnp.ones(())] * last_step, last_step, **options)
    return raised.value


def run_with_body():
    state = jstep.TrainState.create({"w": jnp.ones(())}, OPTIMIZER)
    with jstep.Run(TRAIN_STEP, state, None, 3) as run:
        for _ in run:
            run.train_step(jnp.ones(()))


@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.parametrize("stage", [0, 4])
def test_the_state_after_the_first_call_of_a_stage_is_kept(
    broken, monkeypatch, stage, steps_per_call
):
    monkeypatch.setattr(broken, "moment", "on_first_call")
    monkeypatch.setattr(broken, "step", stage + 1)
    other = jstep.minimize(lambda params, x: jnp.sum(params["w"] * x), OPTIMIZER)
    error = failed_run({0: TRAIN_STEP, 4: other}, steps_per_call=steps_per_call)
    assert str(error) == "of on_first_call"
    step = stage + steps_per_call
    assert int(error.state.global_step) == step
    assert float(error.state.params["w"]) == 1 - 0.25 * step


def test_the_state_after_the_first_call_of_a_body_is_kept(broken, monkeypatch):
    monkeypatch.setattr(broken, "moment", "on_first_call")
    monkeypatch.setattr(broken, "step", 1)
    with pytest.raises(RuntimeError, match="of on_first_call") as raised:
        run_with_body()
    assert float(raised.value.state.params["w"]) == 0.75


def test_a_state_that_has_just_replaced_another_is_kept(broken, monkeypatch):
    monkeypatch.setattr(broken, "moment", "on_replaced")
    monkeypatch.setattr(broken, "step", 1)
    error = failed_run(TRAIN_STEP, hooks=[Doubles()])
    assert float(error.state.params["w"]) == 1.5


@pytest.mark.parametrize("moment", ["on_first_call", "on_replaced", "on_save"])
def test_nothing_is_saved_of_an_iteration_that_an_observer_has_broken(
    broken, monkeypatch, tmp_path, moment
):
    monkeypatch.setattr(broken, "moment", moment)
    monkeypatch.setattr(broken, "step", 1)
    error = failed_run(
        TRAIN_STEP, hooks=[Doubles()], checkpoint_dir=tmp_path, save_checkpoint_steps=1
    )
    assert str(error) == f"of {moment}"
    assert int(error.state.global_step) == 1
    assert jstep.Saver(tmp_path).all_steps() == []
