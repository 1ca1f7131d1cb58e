"""`plan`: hyperparameters and hooks of all steps, as numbers and a table."""

import jax.numpy as jnp
import numpy as np
import pytest

import jstep

RATE = jstep.linear_warmup(jstep.cosine_decay(0.1, 1000), 100)


def test_values_match_the_optimizer():
    plan = jstep.plan(jstep.adam(RATE), 1000, points=5)
    assert plan.steps.tolist() == [0, 250, 500, 749, 999]
    for name, value in jstep.adam(RATE).hyperparameters(jnp.int32(250)).items():
        np.testing.assert_allclose(plan.hyperparameters[name][1], np.asarray(value), rtol=1e-6)
    assert set(plan.hyperparameters) == set(jstep.adam(RATE).hyperparameters(0))


def test_plan_of_a_python_schedule():
    plan = jstep.plan(lambda step: 0.5 if step < 5 else 0.25, 10, points=3)
    assert plan.hyperparameters["schedule"].tolist() == [0.5, 0.5, 0.25]


def test_plan_of_a_billion_steps_and_of_few():
    plan = jstep.plan(RATE, 10**9, hooks=[jstep.LoggingHook(every_n_steps=7)])
    assert len(plan.steps) == 200
    assert plan.steps[-1] == 10**9 - 1
    (due,) = plan.due.values()
    assert due == range(7, 10**9 + 1, 7)
    assert jstep.plan(RATE, 3).steps.tolist() == [0, 1, 2]
    assert jstep.plan(RATE, 3, points=1).steps.tolist() == [0]
    assert jstep.plan(RATE, 1).steps.tolist() == [0]


class EveryStep(jstep.Hook):
    def after_step(self, step, state, metrics):
        pass


class OnlyAtEnd(jstep.Hook):
    def end(self, step, state):
        pass


class PowersOfTwo(EveryStep):
    def next_due(self, step):
        return 2 ** (step.bit_length())


def test_steps_at_which_hooks_are_due(tmp_path):
    hooks = [
        jstep.LoggingHook(every_n_steps=100),
        jstep.CheckpointSaverHook(tmp_path, save_secs=60, save_steps=300),
        jstep.CheckpointSaverHook(tmp_path, save_secs=60),
        jstep.StopAtStepHook(last_step=700),
        jstep.every(5000, print),
        EveryStep(),
        OnlyAtEnd(),
        PowersOfTwo(),
        jstep.NanLossHook(every_n_steps=20),
        jstep.StopAtStepHook(num_steps=30),
    ]
    due = jstep.plan(RATE, 1000, start=250, hooks=hooks).due
    assert due[hooks[0]] == range(300, 1001, 100)
    assert due[hooks[1]] == range(300, 1000, 300)
    assert hooks[2] not in due  # due by time only
    assert list(due[hooks[3]]) == [700]
    assert len(due[hooks[4]]) == 0
    assert due[hooks[5]] == range(251, 1001)
    assert hooks[6] not in due
    assert due[hooks[7]] == (256, 512)
    # It is called after every step, but reads losses only at these.
    assert due[hooks[8]] == range(260, 1001, 20)
    assert due[hooks[9]] == range(280, 281)


# Stages, batch sizes and rows.


def short_loss(params, x):
    return params["w"] * x.sum()


def long_loss(params, x):
    return params["w"] * x.mean()


def steps_of_stages(optimizer):
    return {0: jstep.minimize(short_loss, optimizer), 600: jstep.minimize(long_loss, optimizer)}


def test_stages_batch_sizes_and_rows():
    optimizer = jstep.adam(RATE)
    web, code = np.arange(1000), np.arange(100)
    weights = {0: {"web": 3, "code": 1}, 500: {"web": 1, "code": 1}}
    data = jstep.mixture(
        {"web": web, "code": code}, batch_size={0: 4, 200: 8}, weights=weights
    ).skip(100, 110)
    plan = jstep.plan(optimizer, 1000, train_step=steps_of_stages(optimizer), batches=data)
    assert plan.stages == {0: "short_loss", 600: "long_loss"}
    assert plan.batch_size == {0: 4, 190: 8}
    assert plan.rows == data.rows_before(1000)
    assert sum(plan.rows.values()) == 190 * 4 + 810 * 8
    assert plan.passes == {"web": plan.rows["web"] / 1000, "code": plan.rows["code"] / 100}
    text = str(plan)
    assert "stages      0: short_loss, 600: long_loss" in text
    assert "batch size  0: 4, 190: 8" in text
    assert f"code {plan.rows['code']:,} (".replace(",", " ") in text
    assert text.endswith("\nweights     0: code 0.25 web 0.75, 490: code 0.5 web 0.5")


def test_single_step_and_finite_batches():
    data = jstep.batches(np.arange(20), 5, num_epochs=3)
    step = jstep.minimize(short_loss, jstep.adam(RATE))
    plan = jstep.plan(RATE, 100, train_step=step, batches=data)
    assert (plan.stages, plan.batch_size, plan.rows) == ({0: "short_loss"}, {0: 5}, {"rows": 60})
    plan = jstep.plan(RATE, 100, batches=lambda n: np.ones(3))
    assert (plan.stages, plan.batch_size, plan.rows) == ({}, {}, {})
    assert str(plan) == str(jstep.plan(RATE, 100))
    with pytest.raises(ValueError, match="end at step 12"):
        jstep.plan(RATE, 100, start=12, batches=data)
    with pytest.raises(TypeError, match=r"train_step\[7\]"):
        jstep.plan(RATE, 100, train_step={0: step, 7: 3})
