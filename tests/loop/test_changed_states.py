"""A state, or a hyperparameter in it, that was changed between two starts of a run: what is
logged."""

import logging

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jstep


def loss_fn(params, x):
    return jnp.sum(params["w"] ** 2) + jnp.sum(x)


def held(rate):
    return jstep.adam(jstep.held("learning_rate", rate))


def make_state(optimizer, step=0):
    return jstep.TrainState.create({"w": jnp.ones(3)}, optimizer, global_step=step)


def run(directory, optimizer, last_step, state=None, *, body=False, **options):
    state = make_state(optimizer) if state is None else state
    arguments = (
        jstep.minimize(loss_fn, optimizer),
        state,
        lambda n: np.zeros(2, np.float32),
        last_step,
    )
    options = {"checkpoint_dir": directory, "progress": False, "log_steps": None} | options
    if not body:
        return jstep.train(*arguments, **options)
    with jstep.Run(*arguments, **options) as loop:
        for _ in loop:
            pass
    return loop.state


def warnings_in(caplog):
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return [line for line in lines if line.startswith("state:")]


CHANGES = {
    "rate": lambda state: jstep.set_hyperparameter(state, "learning_rate", 0.01),
    "params": lambda state: state.with_params({"w": jnp.full(3, 9.0)}),
    "slot": lambda state: state.replace(slots={**state.slots, "m": {"w": jnp.zeros(3)}}),
}


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize(("body", "steps_per_call"), [(False, 1), (False, 4), (True, 1)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_state_of_the_same_step_is_named(change, body, steps_per_call, tmp_path, caplog):
    optimizer = held(0.1)
    run(tmp_path / "a", optimizer, 5, body=body, steps_per_call=steps_per_call)
    with jstep.Saver(tmp_path / "a") as saver:
        restored = saver.restore(make_state(optimizer))
    run(tmp_path / "a", optimizer, 6, restored, body=body, steps_per_call=steps_per_call)
    assert warnings_in(caplog) == []
    with jstep.Saver(tmp_path / "a") as saver:
        changed = CHANGES[change](saver.restore(make_state(optimizer)))
    run(tmp_path / "a", optimizer, 7, changed, body=body, steps_per_call=steps_per_call)
    path = {"rate": "slots/held/learning_rate", "params": "params/w", "slot": "slots/m/w"}[change]
    (line,) = warnings_in(caplog)
    assert f"(step 6) is ignored in favor of model-6, which has other values at {path!r}" in line
    with jstep.Saver(tmp_path / "a") as saver:
        changed = CHANGES[change](saver.restore(make_state(optimizer)))
    run(tmp_path / "b", optimizer, 8, changed, start_from=str(tmp_path / "a"))  # the remedy
    assert warnings_in(caplog) == []


def test_the_state_that_a_run_returned_is_not_a_changed_one(tmp_path, caplog):
    optimizer = held(0.1)
    run(tmp_path, optimizer, 8, run(tmp_path, optimizer, 4))
    assert warnings_in(caplog) == []


OPTIMIZERS = {
    "held": (held, "learning_rate"),
    "scope": (lambda rate: jstep.scope(held(rate), "a"), "a/learning_rate"),
    "label": (
        lambda rate: jstep.partition({"a": held(rate)}, lambda path, leaf: "a"),
        "a/learning_rate",
    ),
    "optax": (
        lambda rate: optax.inject_hyperparams(optax.sgd)(rate),
        "optax/hyperparams/learning_rate",
    ),
    "wrapped optax": (
        lambda rate: jstep.skip_nonfinite(
            jstep.scope(
                optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(rate)), "b"
            )
        ),
        "b/optax/1/hyperparams/learning_rate",
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_new_number_is_named_at_each_restart(kind, tmp_path, caplog):
    make, name = OPTIMIZERS[kind]
    run(tmp_path, make(0.1), 2)
    for last_step in (3, 4):
        run(tmp_path, make(0.01), last_step)
        (line,) = warnings_in(caplog)
        assert (
            f"the hyperparameter {name!r} is created as 0.01, but was 0.1 when this run began"
        ) in line
    run(tmp_path, make(0.1), 5)
    assert warnings_in(caplog) == []


def test_a_number_that_a_hook_has_set_is_not_named(tmp_path, caplog):
    run(tmp_path, held(0.1), 2)
    set_rate = jstep.every(
        1, lambda step, state, metrics: jstep.set_hyperparameter(state, "learning_rate", 0.01)
    )
    run(tmp_path, held(0.1), 3, hooks=[set_rate])
    run(tmp_path, held(0.01), 4)
    assert warnings_in(caplog) == []
    run(tmp_path, held(0.05), 5)
    (line,) = warnings_in(caplog)
    assert (
        "is created as 0.05, but was 0.1 when this run began. The value in model-4 is used, 0.01"
    ) in line


def test_schedules_of_optax_are_no_numbers(tmp_path, caplog):
    def optimizer(momentum, first=0.1):
        rate = optax.linear_schedule(first, 0.0, 10)
        return optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=momentum)

    run(tmp_path, optimizer(0.9), 3)
    run(tmp_path, optimizer(0.9, first=0.3), 4)
    assert warnings_in(caplog) == []
    run(tmp_path, optimizer(0.8), 5)
    (line,) = warnings_in(caplog)
    assert "'optax/hyperparams/momentum' is created as 0.8" in line
