"""`plan`: hyperparameters and hooks of all steps, as numbers, a table and a plot."""

import jax.numpy as jnp
import numpy as np
import pictures
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
    assert due[hooks[0]] == due["LoggingHook"] == range(300, 1001, 100)
    assert due[hooks[1]] == range(300, 1000, 300)
    assert hooks[2] not in due  # due by time only
    assert list(due[hooks[3]]) == [700]
    assert len(due[hooks[4]]) == 0
    assert due[hooks[5]] == range(251, 1001)
    assert hooks[6] not in due
    assert due[hooks[7]] == (256, 512)
    assert due[hooks[8]] == range(260, 1001, 20)  # it is called after every step, but reads losses only at these
    assert due[hooks[9]] == range(280, 281)
    with pytest.raises(KeyError, match="0 hooks match 'Nobody'; the hooks are: LoggingHook"):
        due["Nobody"]


BLUE, RED = "#1b4f72", "#7b241c"
"""The colors of values, and of what is due."""


def test_a_picture_has_the_changing_values_and_what_is_due(tmp_path):
    path = tmp_path / "plan.svg"
    hooks = [jstep.LoggingHook(every_n_steps=1), jstep.every(300, print)]
    jstep.plan(jstep.adam(RATE, beta1=RATE), 1000, hooks=hooks).plot(path)
    svg = path.read_text()
    assert set(pictures.words(svg)) >= {
        "learning_rate",
        "beta1",
        "global step",
        "LoggingHook:  every step, 1 000 times",
        "every(300, print):  every 300 steps, 3 times: 300, 600, 900",
        "constant:  beta2 = 0.999,  epsilon = 1e-08",
    }
    curves = [pictures.shares(line) for line in pictures.lines(svg, BLUE)]
    assert len(curves) == 2
    for curve in curves:
        np.testing.assert_allclose(curve[0], [0, float(RATE(0)) / 0.1], atol=1e-2)
        np.testing.assert_allclose(curve[curve[:, 1].argmax()], [0.1, 1], atol=1e-3)
        np.testing.assert_allclose(curve[-1], [1, 0], atol=1e-3)
    (bar,) = pictures.lines(svg, RED)  # too many marks to be seen
    assert len(bar) == 2
    assert pictures.marks(svg, RED) == 3


# Stages, batch sizes and rows.


def short_loss(params, x):
    return params["w"] * x.sum()


def long_loss(params, x):
    return params["w"] * x.mean()


def steps_of_stages(optimizer):
    return {0: jstep.minimize(short_loss, optimizer), 600: jstep.minimize(long_loss, optimizer)}


def test_stages_batch_sizes_and_rows(tmp_path):
    optimizer = jstep.adam(RATE)
    web, code = np.arange(1000), np.arange(100)
    weights = {0: {"web": 3, "code": 1}, 500: {"web": 1, "code": 1}}
    data = jstep.mixture({"web": web, "code": code}, batch_size={0: 4, 200: 8}, weights=weights).skip(100, 110)
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
    assert text.endswith("\nweights     0: code 0.25, web 0.75, 490: code 0.5, web 0.5")
    plan.plot(tmp_path / "plan.svg")
    svg = (tmp_path / "plan.svg").read_text()
    words = {"learning_rate", "batch size", "rows so far", "stages", "web", "code", "short_loss:  from 0"}
    assert words | {"long_loss:  from 600"} <= set(pictures.words(svg))
    rate, sizes, *stages = map(pictures.shares, pictures.lines(svg, BLUE))
    assert rate[-1].tolist() == [1, 0]
    np.testing.assert_allclose(sizes[:4], [[0, 0], [0.19, 0], [0.19, 1], [1, 1]], atol=1e-3)
    ends = [line[:, 0] for line in pictures.lines(svg, BLUE)[2:]]
    assert len(stages) == 2
    assert ends[0][1] == ends[1][0]  # one begins where the other ends
    assert (ends[0][1] - ends[0][0]) / (ends[1][1] - ends[0][0]) == pytest.approx(0.6, abs=1e-3)


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
