"""`NanLossHook` in runs: skipped updates and modified metrics; order of hooks; methods that are not called."""

import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hooked_runs import OPTIMIZER, train

import jstep

ADD = jax.jit(jnp.add, donate_argnums=0)


def nan_at(*steps):
    return lambda n: np.full(3, math.nan if n + 1 in steps else n + 1, np.float32)


def skipping_step_and_state(optimizer=None):
    optimizer = jstep.skip_nonfinite(optimizer or OPTIMIZER)
    step = jstep.minimize(lambda params, x: x[0] * jnp.sum(params["w"]), optimizer)
    return step, jstep.TrainState.create({"w": jnp.ones(2)}, optimizer)


@pytest.mark.thorough(except_for=["4"])
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_nan_loss_hook_accepts_skipped_updates(steps_per_call, tmp_path):
    step, state = skipping_step_and_state()
    state = jstep.train(
        step, state, nan_at(3, 8), 12, hooks=[jstep.NanLossHook(every_n_steps=2)], progress=False,
        steps_per_call=steps_per_call, checkpoint_dir=tmp_path, save_checkpoint_steps=4,
    )  # fmt: skip
    assert jstep.global_step(state) == 12
    assert jstep.Saver(tmp_path).all_steps() == [4, 8, 12]  # step 8 was skipped, and its state is finite


@pytest.mark.thorough(except_for=["5"])
@pytest.mark.parametrize("steps_per_call", [1, 5])
def test_too_many_consecutive_skips_stop_the_run_and_save_it(steps_per_call, tmp_path):
    step, state = skipping_step_and_state()
    hook = jstep.NanLossHook(every_n_steps=2, max_skipped_steps=3)
    with pytest.raises(
        jstep.NanLossDuringTrainingError, match="3 updates in a row were skipped up to step 9"
    ) as caught:
        jstep.train(
            step, state, nan_at(3, 4, *range(7, 100)), 50, hooks=[hook], progress=False, checkpoint_dir=tmp_path,
            steps_per_call=steps_per_call,
        )  # fmt: skip
    assert caught.value.step == 9
    assert not caught.value.prevents_saving
    assert not pickle.loads(pickle.dumps(caught.value)).prevents_saving
    assert jstep.Saver(tmp_path).latest_step() == jstep.global_step(caught.value.state)


def test_a_custom_step_returns_the_skipped_metric():
    @jax.jit
    def step(state, x):
        bad = ~jnp.isfinite(x[0])
        return state.replace(global_step=state.global_step + 1), {"loss": x[0], "skipped": bad.astype(jnp.float32)}

    state = jstep.TrainState.create({"w": jnp.ones(2)}, OPTIMIZER)
    hooks = [jstep.NanLossHook(every_n_steps=1)]
    assert jstep.global_step(jstep.train(step, state, nan_at(2), 5, hooks=hooks, progress=False)) == 5
    step.skip_metric = None  # the metric "skipped" means something else here
    with pytest.raises(jstep.NanLossDuringTrainingError):
        jstep.train(step, state, nan_at(2), 5, hooks=hooks, progress=False)


@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize("change", ["mutate", "delete", "donate"])
def test_hooks_can_modify_delete_or_donate_metrics(change, steps_per_call):
    total = None

    def modify(step, state, metrics):
        nonlocal total
        if change == "mutate":
            metrics["loss"] = jnp.float32(math.nan)
            metrics.pop("half")
        elif change == "delete":
            metrics["loss"].delete()
        else:
            total = metrics["loss"] if total is None else ADD(total, metrics["loss"])

    rows = []
    hooks = [
        jstep.NanLossHook(every_n_steps=3),
        jstep.MetricsHook(lambda step, values: rows.append((step, values["loss"])), every_n_steps=4, mean=True),
        jstep.every(1, modify),
    ]
    train(8, hooks, steps_per_call=steps_per_call)
    assert rows == [(4, 2.5), (8, 6.5)]


def test_a_hook_in_several_runs_keeps_no_state():
    hook = jstep.NanLossHook(every_n_steps=4)
    for _ in range(2):
        with pytest.raises(jstep.NanLossDuringTrainingError) as caught:
            train(20, [hook], batches=nan_at(6))
        assert caught.value.step == 6
    train(20, [hook])
    assert hook._run is hook._held is None  # it holds nothing of the run


def test_a_hook_that_inherits_after_step_is_not_called(monkeypatch):
    class Ends(jstep.Hook):
        def end(self, step, state):
            ended.append(step)

    ended, called = [], []
    monkeypatch.setattr(jstep.Hook, "after_step", lambda self, *_: called.append(type(self)))
    one = Ends()
    other = Ends()
    other.after_step = lambda step, state, metrics: called.append(step)
    train(3, [one, other])
    assert ended == [3, 3]
    assert called == [1, 2, 3]


@pytest.mark.thorough(except_for=["7-3", "11-1"])
@pytest.mark.parametrize("steps_per_call", [1, 3, 100])
@pytest.mark.parametrize("bad", [3, 7, 8, 11])
def test_the_bad_step_is_named_across_single_and_looped_calls(bad, steps_per_call):
    """A stage of convolutions runs one step a call on a CPU; its last steps precede those of the looped stage."""

    def convolved(params, x):
        image, kernel = jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 1)) * params["w"][0]
        kinds = ("NHWC", "HWIO", "NHWC")
        return x[0] + 0 * jnp.sum(jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=kinds))

    conv = jstep.minimize(convolved, OPTIMIZER)
    plain = jstep.minimize(lambda params, x: x[0] + 0 * jnp.sum(params["w"]), OPTIMIZER)
    state = jstep.TrainState.create({"w": jnp.ones(2)}, OPTIMIZER)
    with pytest.raises(jstep.NanLossDuringTrainingError, match=f"at step {bad} "):
        jstep.train(
            {0: conv, 7: plain},
            state,
            nan_at(bad),
            20,
            hooks=[jstep.NanLossHook(every_n_steps=20)],
            steps_per_call=steps_per_call,
            progress=False,
        )


def test_the_loss_is_looked_for_in_the_metrics_that_a_subclass_hands_on():
    class Renamed(jstep.NanLossHook):
        def after_step(self, step, state, metrics):
            return super().after_step(step, state, {"total": 1.0} if step == 4 else metrics)

    with pytest.raises(ValueError, match=r"the metrics hold no 'loss', only \['total'\]"):
        train(8, hooks=[Renamed(every_n_steps=2)])
