"""A run of 16-bit parameters says that small updates are lost, once, unless the optimizer keeps
them."""

import logging

import jax
import jax.numpy as jnp
import pytest

import jstep

SGD = jstep.sgd(1e-3)


def loss_fn(params, x):
    return jnp.sum((params["w"].astype(jnp.float32) - x) ** 2) + jnp.sum(params["b"] ** 2)


def lines_of(
    optimizer, caplog, *, w=jnp.bfloat16, b=jnp.float32, step=None, last_step=4, **options
):
    params = {"w": jnp.ones(4, w), "b": jnp.ones(2, b)}
    state = jstep.TrainState.create(params, optimizer)
    step = jstep.minimize(loss_fn, optimizer) if step is None else step
    caplog.clear()
    with caplog.at_level(logging.INFO):
        jstep.train(step, state, lambda n: jnp.zeros(4), last_step, log_steps=None, **options)
    return [record for record in caplog.records if "changes nothing" in record.getMessage()]


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_bfloat16_under_a_bare_optimizer_is_one_info_line(steps_per_call, caplog):
    (record,) = lines_of(SGD, caplog, steps_per_call=steps_per_call)
    assert record.levelno == logging.INFO
    assert "the parameters 'w' are bfloat16" in record.getMessage()
    # The largest share that the line names is indeed lost.
    assert "one below 0.002 of a value" in record.getMessage()
    assert jnp.bfloat16(1.0) - jnp.bfloat16(0.0019) == 1.0


def test_a_custom_step_and_float16_say_it_too(caplog):
    def step(state, x):
        loss, gradients = jstep.compute_gradients(loss_fn)(state.params, x)
        return jstep.apply_gradients(state, gradients, SGD), {"loss": loss}

    (record,) = lines_of(SGD, caplog, step=step, w=jnp.float16)
    assert "'w' are float16" in record.getMessage()


@pytest.mark.parametrize(
    "optimizer",
    [
        jstep.master_weights(SGD),
        jstep.stochastic_rounding(SGD, jax.random.key(0)),
        jstep.compact(jstep.adam(1e-3)),
        jstep.with_moving_average(jstep.master_weights(SGD), jstep.ExponentialMovingAverage(0.9)),
        jstep.partition({"b": SGD}, lambda path, leaf: "b" if path == "b" else None),
    ],
    ids=["master_weights", "stochastic_rounding", "compact", "nested", "frozen"],
)
def test_nothing_is_said_of_optimizers_that_keep_the_rest_or_do_not_train_it(optimizer, caplog):
    assert not lines_of(optimizer, caplog)


def test_nothing_is_said_of_float32_of_other_leaves_and_at_a_restart(caplog, tmp_path):
    assert not lines_of(SGD, caplog, w=jnp.float32)
    assert not lines_of(SGD, caplog, step=jstep.minimize(loss_fn, SGD, var_list=["b"]))
    assert len(lines_of(SGD, caplog, checkpoint_dir=tmp_path)) == 1
    assert not lines_of(SGD, caplog, checkpoint_dir=tmp_path, last_step=6)
