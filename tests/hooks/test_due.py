"""The loop decides what is due, from the cadence of a stock hook or the `next_due` of any other; it calls only that."""

import math

import jax
import jax.numpy as jnp
import pytest
from hook_fakes import Clock
from hooked_runs import batches, train

import jstep


def nan_at(bad):
    return lambda step: jax.tree.map(lambda x: x * math.nan, batches(step)) if step == bad else batches(step)


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_subclass_of_a_stock_hook_is_called_when_that_is_due(steps_per_call):
    called = []

    class Mine(jstep.EvaluationHook):
        def after_step(self, step, state, metrics):
            called.append(step)
            return super().after_step(step, state, metrics)

    hook = Mine(lambda state: {"w": 1.0}, every_n_steps=3)
    train(10, [hook], steps_per_call=steps_per_call)
    assert called == [3, 6, 9]
    assert list(hook.results) == [3, 6, 9, 10]


def test_a_subclass_may_say_when_it_is_due():
    class Mine(jstep.MetricsHook):
        def next_due(self, step):
            return 4 if step < 4 else step + 3

    rows = []
    train(12, [Mine(lambda step, values: rows.append(step), every_n_steps=5)])
    assert rows == [4, 7, 10, 12]


def test_seconds_count_from_the_end_of_the_last_call():
    clock, evaluated = Clock(), []

    class Tick(jstep.Hook):
        def after_step(self, step, state, metrics):
            clock.now += 1

    def evaluate(state):
        clock.now += 10  # longer than the interval
        evaluated.append(jstep.global_step(state))
        return {"w": 1.0}

    train(12, [Tick(), jstep.EvaluationHook(evaluate, every_n_secs=3, every_n_steps=5, clock=clock)])
    assert evaluated == [3, 5, 8, 10, 12]


def test_a_prevented_save_is_tried_again_after_its_interval(tmp_path):
    asked = []

    def never(step):
        asked.append(step)
        return True

    clock = Clock()

    class Tick(jstep.Hook):
        def after_step(self, step, state, metrics):
            clock.now += 1

    train(9, [Tick(), jstep.CheckpointSaverHook(tmp_path, save_secs=4, before_save=(never,), clock=clock)])
    assert asked == [4, 8, 9]


def test_a_bad_loss_that_prevents_a_save_ends_the_run_there(tmp_path):
    hook = jstep.NanLossHook(every_n_steps=50, fail_on_nan_loss=False)
    state = train(200, [hook], batches=nan_at(6), checkpoint_dir=tmp_path, save_checkpoint_steps=8)
    assert state.global_step == 8
    assert jstep.Saver(tmp_path).all_steps() == []


def test_metrics_without_a_loss_are_refused_once_after_the_first_call():
    step = jstep.TrainStep(lambda state, x: (jstep.increment_global_step(state), {"cost": x}))
    state = jstep.TrainState.create({"w": 1.0}, jstep.gradient_descent(0.1))
    with pytest.raises(ValueError, match="the metrics hold no 'loss'") as caught:
        jstep.train(step, state, lambda n: jnp.float32(n), 50, hooks=[jstep.NanLossHook()], progress=False)
    assert jstep.global_step(caught.value.state) == 1
    assert not [note for note in caught.value.__notes__ if "Additionally" in note]
