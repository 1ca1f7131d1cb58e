"""A partial restore with new slots: their age is that of fresh ones, unless restored slots share
it."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_states import NO_SLOTS, assert_same
from optimizer_table import TABLE

import jstep
from jstep.checkpoint.saver import Saver

STEP = 5000
AVERAGE = jstep.ExponentialMovingAverage(0.999, zero_debias=True)
LATE_AVERAGE = jstep.ExponentialMovingAverage(0.999, zero_debias=True, start_step=STEP)


def params_of(*names, value=1.0):
    return {name: jnp.full((8, 4), value) for name in names}


def by_name(*names):
    return jstep.partition({name: jstep.adam(0.1) for name in names}, lambda path, leaf: path)


def restored(directory, before, saved_params, optimizer, params, names=None, global_step=0):
    """Return a state of `optimizer`, restored in part from a run of `before` at STEP."""
    with Saver(directory) as saver:
        saver.save(
            jstep.TrainState.create(saved_params, before).replace(global_step=jnp.int32(STEP))
        )
        target = jstep.TrainState.create(params, optimizer, global_step=global_step)
        return saver.restore(target, partial=True, names=names)


@pytest.mark.thorough(except_for=["adam", "schedule_free_adamw", "skip_nonfinite"])
@pytest.mark.parametrize("name", TABLE)
def test_slots_of_which_none_was_restored_equal_fresh_ones(name, tmp_path):
    optimizer = TABLE[name].make(0.1)
    params = {"w": jnp.full((8, 4), 2.0), "b": jnp.full(4, 3.0)}
    state = restored(tmp_path, NO_SLOTS, params, optimizer, jax.tree.map(lambda p: 0.5 * p, params))
    fresh = jstep.TrainState.create(params, optimizer, global_step=STEP)
    assert_same(state, fresh)


@pytest.mark.parametrize(
    ("before", "optimizer", "new_age"),
    [
        (jstep.momentum(0.1, 0.9), jstep.adam(0.1), "start_step"),
        (jstep.adam(0.1), jstep.lookahead(jstep.momentum(0.1, 0.9)), "start_step"),
        (by_name("body"), by_name("body", "head"), "head/start_step"),
        (
            by_name("body"),
            jstep.skip_nonfinite(jstep.lookahead(by_name("body", "head"))),
            "lookahead/head/start_step",
        ),
        (jstep.adam(0.1), jstep.scope(jstep.adam(0.1), "new"), "new/start_step"),
        (
            jstep.lion(0.1),
            jstep.with_moving_average(jstep.lion(0.1), LATE_AVERAGE),
            "with_moving_average/ExponentialMovingAverage/start_step",
        ),
        (jstep.gradient_descent(0.1), jstep.compact(jstep.adam(0.1), min_size=0), "start_step"),
        (jstep.gradient_descent(0.1), jstep.master_weights(jstep.adam(0.1)), "start_step"),
        (jstep.gradient_descent(0.1), jstep.update_every(jstep.adam(0.1), 2), "start_step"),
        (
            jstep.gradient_descent(0.1),
            jstep.chain(jstep.scale_by_adam(), jstep.sgd(0.1)),
            "start_step",
        ),
    ],
    ids=[
        "other", "lookahead", "part", "wrapped part", "scope", "average", "compact", "masters",
        "every", "chain",
    ],
)  # fmt: skip
def test_an_age_of_new_slots_counts_from_the_restored_step(
    before, optimizer, new_age, tmp_path, caplog
):
    params = params_of("body", "head")
    state = restored(tmp_path, before, params_of("body"), optimizer, params)
    assert int(state.slots[new_age]) == STEP
    assert f"started at step {STEP}, because their slots are new" in caplog.text
    assert "share an age" not in caplog.text
    fresh = jstep.TrainState.create(params, optimizer, global_step=STEP)
    gradients = jax.tree.map(jnp.ones_like, params)
    updated = jstep.apply_gradients(state, gradients, optimizer)
    expected = jstep.apply_gradients(fresh, gradients, optimizer)
    np.testing.assert_array_equal(updated.params["head"], expected.params["head"])


def test_updates_that_the_slots_of_the_target_have_had_count(tmp_path):
    optimizer = jstep.adam(0.1)
    target = jstep.TrainState.create(params_of("w"), optimizer)
    for _ in range(3):
        target = jstep.apply_gradients(target, params_of("w"), optimizer)
    target = jstep.increment_global_step(target, 4)  # steps without an update
    target = target.replace(slots={**target.slots, "start_step": jnp.int32(4)})
    with Saver(tmp_path) as saver:
        saver.save(jstep.TrainState.create(params_of("w"), NO_SLOTS, global_step=STEP))
        state = saver.restore(target, partial=True)
    assert int(state.slots["start_step"]) == STEP - 3


def test_an_age_that_names_maps_is_restored(tmp_path):
    with Saver(tmp_path) as saver:
        saver.save(jstep.TrainState.create(params_of("w"), jstep.adam(0.1), global_step=100))
        target = jstep.TrainState.create(params_of("w"), jstep.scope(jstep.adam(0.1), "a"))
        names = {"slots/a/start_step": "slots/start_step"}
        assert int(saver.restore(target, partial=True, names=names).slots["a/start_step"]) == 100
        assert int(saver.restore(target, partial=True).slots["a/start_step"]) == 100


@pytest.mark.parametrize("is_shared", [True, False])
def test_new_slots_beside_restored_ones_are_named_in_one_line(is_shared, tmp_path, caplog):
    optimizer = jstep.adam(0.1) if is_shared else jstep.lion(0.1)
    state = restored(tmp_path, optimizer, params_of("body"), optimizer, params_of("body", "head"))
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert ("share an age (2): 'slots/m/head', 'slots/v/head'" in caplog.text) == is_shared
    if is_shared:
        assert int(state.slots["start_step"]) == 0


def test_an_average_that_shares_the_age_of_adam_is_named(tmp_path, caplog):
    optimizer = jstep.with_moving_average(jstep.adam(0.1), AVERAGE)
    restored(tmp_path, jstep.adam(0.1), params_of("w"), optimizer, params_of("w"))
    assert "share an age (1): 'slots/ExponentialMovingAverage/w'" in caplog.text
    assert "ExponentialMovingAverage(start_step=…)" in caplog.text


@pytest.mark.parametrize(
    "optimizer", [jstep.lion(0.1), jstep.momentum(0.1, 0.9), optax.adam(0.1), jstep.adam(0.1)]
)
@pytest.mark.parametrize("global_step", [0, STEP])
def test_no_line_where_no_age_is_shared(optimizer, global_step, tmp_path, caplog):
    restored(tmp_path, NO_SLOTS, params_of("w"), optimizer, params_of("w"), global_step=global_step)
    assert "share an age" not in caplog.text


def test_the_count_of_optax_is_kept_if_its_moments_are_new(tmp_path, caplog):
    with Saver(tmp_path) as saver:
        optimizer = optax.adam(0.1)
        state = jstep.TrainState.create(params_of("body"), optimizer)
        saver.save(jstep.apply_gradients(state, params_of("body"), optimizer))
        new = saver.restore(jstep.TrainState.create(params_of("head"), optimizer), partial=True)
        assert int(new.slots["optax/0/count"]) == 0
        both = saver.restore(
            jstep.TrainState.create(params_of("body", "head"), optimizer), partial=True
        )
        assert int(both.slots["optax/0/count"]) == 1
        assert "share an age (2): 'slots/optax/0/mu/head', 'slots/optax/0/nu/head'" in caplog.text


def custom_optimizer(declares):
    inner = jstep.adam(0.1)

    def init(params, global_step=0):
        slots = inner.init(params, global_step)
        if declares:
            return jax.tree.map(jnp.copy, slots)
        return {f"own/{name}": tree for name, tree in slots.items()}

    def update(gradients, slots, params, step):
        prefix = "" if declares else "own/"
        updates, new = inner.update(
            gradients,
            {name.removeprefix(prefix): tree for name, tree in slots.items()},
            params,
            step,
        )
        return updates, {f"{prefix}{name}": tree for name, tree in new.items()}

    if declares:
        init.ages = ("start_step",)
    return jstep.Optimizer(init, update, inner.hyperparameters)


@pytest.mark.parametrize(("declares", "age"), [(True, "start_step"), (False, "own/start_step")])
def test_ages_of_custom_optimizers(declares, age, tmp_path):
    state = restored(tmp_path, NO_SLOTS, params_of("w"), custom_optimizer(declares), params_of("w"))
    assert int(state.slots[age]) == STEP


def test_each_member_of_a_population_has_an_age(tmp_path):
    steps = jnp.asarray([20, 20, 20])
    with Saver(tmp_path) as saver:
        make = jax.vmap(lambda rate: jstep.TrainState.create({"w": jnp.ones(3) * rate}, NO_SLOTS))
        saver.save(make(jnp.arange(3.0)).replace(global_step=steps))
        make = jax.vmap(
            lambda rate: jstep.TrainState.create({"w": jnp.ones(3) * rate}, jstep.adam(rate))
        )
        state = saver.restore(make(jnp.arange(3.0)), partial=True)
    assert state.slots["start_step"].tolist() == [20, 20, 20]


def test_a_state_in_the_model_state_has_a_step_and_ages_of_its_own(tmp_path):
    def nested(optimizer, step):
        inner = jstep.TrainState.create(params_of("w"), optimizer, global_step=step)
        return jstep.TrainState.create(params_of("w"), NO_SLOTS, model_state={"inner": inner})

    with Saver(tmp_path) as saver:
        saver.save(nested(NO_SLOTS, 70).replace(global_step=jnp.int32(STEP)))
        state = saver.restore(nested(jstep.adam(0.1), 0), partial=True)
    assert int(state.model_state["inner"].slots["start_step"]) == 70
