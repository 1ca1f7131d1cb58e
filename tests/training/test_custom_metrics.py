"""A step of one's own shows what its optimizer reports, once, as a step of `minimize` does."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep


def loss_fn(params, x):
    return jnp.mean((params["w"] - x) ** 2)


def with_apply_gradients(optimizer):
    def step(state, x):
        loss, grads = jstep.compute_gradients(loss_fn)(state.params, x)
        return jstep.apply_gradients(state, grads, optimizer), {"loss": loss}

    return step


def around_minimize(optimizer):
    update = jstep.minimize(loss_fn, optimizer, jit=False)

    def step(state, x):
        return update(state, x)

    return step


def several(optimizer):
    update = jstep.minimize(loss_fn, optimizer, increment_global_step=False, jit=False)

    def step(state, x):
        state, metrics = jax.lax.scan(lambda state, _: update(state, x), state, length=3)
        return jstep.increment_global_step(state), {"loss": metrics["loss"][0]}

    return step


def in_a_branch(optimizer):
    update = with_apply_gradients(optimizer)

    def step(state, x):
        def wait(state, x):
            return jstep.increment_global_step(state), {"loss": loss_fn(state.params, x)}

        return jax.lax.cond(state.global_step % 2 == 0, update, wait, state, x)

    return step


STEPS = [with_apply_gradients, around_minimize, several, in_a_branch]
OPTIMIZERS = {
    "constant": jstep.adamw(0.1),
    "schedule": jstep.adamw(jstep.exponential_decay(0.1, 2, 0.5)),
    "held": jstep.adamw(jstep.held("learning_rate", 0.1)),
    "labels": jstep.partition(
        {"a": jstep.sgd(jstep.held("learning_rate", 0.1))}, lambda path, leaf: "a"
    ),
}


def run(step, optimizer, directory, **options):
    rows = {}
    hook = jstep.MetricsHook(lambda step, row: rows.update({step: row}), every_n_steps=2)
    state = jstep.TrainState.create({"w": jnp.zeros(4)}, optimizer)
    jstep.train(
        step,
        state,
        lambda n: np.ones(4, np.float32),
        4,
        hooks=[hook],
        checkpoint_dir=directory,
        log_steps=2,
        **options,
    )
    (record,) = jstep.runs(directory)
    return rows, hook.constants, set(record.metrics)


@pytest.mark.thorough(except_for={"name": ["schedule"]})
@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("make", STEPS)
def test_rates_are_shown_as_of_a_minimize(make, name, steps_per_call, tmp_path, caplog):
    optimizer = OPTIMIZERS[name]
    options = {"steps_per_call": steps_per_call}
    caplog.set_level(logging.INFO)
    want, want_constants, want_record = run(
        jstep.minimize(loss_fn, optimizer), optimizer, tmp_path / "a", **options
    )
    want_lines = [
        record.getMessage().split("(")[0]
        for record in caplog.records
        if "step 4 " in record.getMessage()
    ]
    caplog.clear()
    rows, constants, record = run(
        jstep.TrainStep(make(optimizer)), optimizer, tmp_path / "b", **options
    )
    lines = [
        record.getMessage().split("(")[0]
        for record in caplog.records
        if "step 4 " in record.getMessage()
    ]
    assert rows.keys() == want.keys()
    assert [set(row) for row in rows.values()] == [set(row) for row in want.values()]
    assert all(
        row.get("learning_rate") == want[step].get("learning_rate") for step, row in rows.items()
    )
    assert constants == want_constants
    assert record == want_record
    names = [
        [word for word in line.split() if word.isidentifier() or "/" in word] for line in lines
    ]
    assert names == [
        [word for word in line.split() if word.isidentifier() or "/" in word] for line in want_lines
    ]


def test_metrics_of_the_step_come_first_and_those_of_nested_states_are_its_own(tmp_path):
    outer = jstep.gradient_descent(0.5)
    inner = jstep.adamw(jstep.exponential_decay(0.1, 2, 0.5))
    inner_step = jstep.minimize(loss_fn, inner, jit=False)

    def step(state, x):
        worker, metrics = jax.lax.scan(
            lambda state, _: inner_step(state, x), state.model_state, length=2
        )
        moved = jax.tree.map(jnp.subtract, state.params, worker.params)
        state = jstep.apply_gradients(state.replace(model_state=worker), moved, outer)
        return state, {
            "loss": metrics["loss"].mean(),
            "learning_rate": metrics["learning_rate"][-1],
        }

    params = {"w": jnp.zeros(4)}
    state = jstep.TrainState.create(
        params, outer, model_state=jstep.TrainState.create(params, inner)
    )
    state, metrics = jstep.TrainStep(step)(state, jnp.ones(4))
    assert set(metrics) == {"loss", "learning_rate"}
    assert metrics["learning_rate"] == pytest.approx(0.1 * 0.5**0.5)


def test_a_held_rate_that_a_plateau_halves_is_in_the_rows(tmp_path):
    optimizer = OPTIMIZERS["held"]

    def halve(step, state, metrics):
        return jstep.set_hyperparameter(
            state, "learning_rate", 0.5 * jstep.get_hyperparameter(state, "learning_rate")
        )

    rows = []
    hooks = [
        jstep.MetricsHook(lambda step, row: rows.append(row["learning_rate"]), every_n_steps=1),
        jstep.every(1, halve),
    ]
    state = jstep.TrainState.create({"w": jnp.zeros(4)}, optimizer)
    step = jstep.TrainStep(with_apply_gradients(optimizer))
    jstep.train(step, state, lambda n: np.ones(4, np.float32), 3, hooks=hooks, log_steps=None)
    assert rows == pytest.approx([0.1, 0.05, 0.025])


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_an_integer_beyond_32_bits_is_named_or_a_constant(steps_per_call):
    optimizer = jstep.sgd(0.1)

    def custom(state, x):
        loss, gradients = jax.value_and_grad(lambda params: jnp.sum((params["w"] - x) ** 2))(
            state.params
        )
        return jstep.apply_gradients(state, gradients, optimizer), {"loss": loss, "big": 2**40}

    def train(step):
        rows = []
        hook = jstep.MetricsHook(lambda step, values: rows.append(values), every_n_steps=4)
        state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
        options = {"hooks": [hook], "steps_per_call": steps_per_call, "progress": False}
        jstep.train(step, state, lambda n: jnp.ones(3), 4, **options)
        return rows

    with pytest.raises(
        OverflowError, match="metrics: the leaf at 'big' must hold integers that fit int32"
    ):
        train(jstep.TrainStep(custom))
    if steps_per_call == 1:
        assert train(custom)[0]["big"] == 2.0**40
    else:
        with pytest.raises(OverflowError, match="metrics: the leaf at 'big'"):
            train(custom)
