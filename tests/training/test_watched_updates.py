"""Warnings of updates that mean something else than they look like, given once, when a step is
traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

SGD = jstep.sgd(0.1)


def loss_fn(params, x):
    return jnp.mean((params["w"] - x) ** 2) + jnp.sum(params["b"] ** 2)


def warnings_of(step, optimizer, caplog, last_step=2, make_run=None, **options):
    state = jstep.TrainState.create({"w": jnp.zeros(2), "b": jnp.ones(())}, optimizer)
    caplog.clear()
    jstep.train(step, state, lambda n: np.ones(2, np.float32), last_step, log_steps=None, **options)
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


MAKERS = {"TrainStep": jstep.TrainStep, "jit": jax.jit, "not compiled": lambda step: step}

# What looks at the step, in a step of several updates.


def scanned(optimizer, n=4):
    update = jstep.minimize(loss_fn, optimizer, increment_global_step=False, jit=False)

    def step(state, x):
        state, metrics = jax.lax.scan(lambda state, _: update(state, x), state, length=n)
        return jstep.increment_global_step(state), {"loss": metrics["loss"].mean()}

    return step


def one_after_the_other(optimizer, n=4):
    def step(state, x):
        for i in range(n):
            loss, grads = jstep.compute_gradients(loss_fn)(state.params, x)
            state = jstep.apply_gradients(state, grads, optimizer, increment_global_step=i == n - 1)
        return state, {"loss": loss}

    return step


def label(path, leaf):
    return "a" if path == "w" else "a/b"


EMA = jstep.ExponentialMovingAverage
BY_STEP = {
    "update_every": jstep.update_every(SGD, 4),
    "accumulating": jstep.chain(
        jstep.clip_gradients(by_value=1.0), jstep.update_every(SGD, 4, accumulate=True)
    ),
    "average": jstep.with_moving_average(SGD, EMA(0.9, every=4)),
    "label": jstep.partition(
        {"a": SGD, "a/b": jstep.scope(jstep.update_every(SGD, 2), "x")}, label
    ),
    "guarded": jstep.skip_nonfinite(jstep.scope(jstep.update_every(SGD, 2), "a")),
}
NOT_BY_STEP = {
    "every update": jstep.update_every(SGD, 1),
    "once a step": jstep.with_moving_average(SGD, EMA(0.9, every=4, per_step=True)),
    "plain": jstep.with_moving_average(jstep.adam(0.1), EMA(0.9)),
}


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", BY_STEP)
@pytest.mark.parametrize("updates", [scanned, one_after_the_other])
def test_what_is_due_at_some_steps_in_a_step_of_several_updates(updates, name, make, caplog):
    (warning,) = warnings_of(MAKERS[make](updates(BY_STEP[name])), BY_STEP[name], caplog)
    assert "makes several updates, and" in warning
    assert "num_microbatches" in warning
    assert (
        "ExponentialMovingAverage (every=4)" if name == "average" else "update_every(…, "
    ) in warning


def test_the_warning_is_given_once_for_several_steps_a_call(caplog):
    optimizer = BY_STEP["update_every"]
    assert (
        len(
            warnings_of(jstep.TrainStep(scanned(optimizer)), optimizer, caplog, 6, steps_per_call=4)
        )
        == 1
    )


@pytest.mark.parametrize("name", NOT_BY_STEP)
@pytest.mark.parametrize("updates", [scanned, one_after_the_other])
def test_what_is_due_at_each_update_is_not_warned_of(updates, name, caplog):
    found = warnings_of(jstep.TrainStep(updates(NOT_BY_STEP[name])), NOT_BY_STEP[name], caplog)
    assert not [line for line in found if "makes several updates" in line]


@pytest.mark.parametrize("make", MAKERS)
def test_an_average_that_moves_once_a_step_of_a_scan(make, caplog):
    """As both warnings advise: that an average is due at some steps only, and that none moves."""
    optimizer = NOT_BY_STEP["once a step"]
    for average in (BY_STEP["average"], optimizer):
        (warning,) = warnings_of(MAKERS[make](scanned(average)), average, caplog)
        assert (
            "per_step=True), if all updates of the step have increment_global_step=False"
        ) in warning
        assert "jstep.increment_global_step(state, optimizer=optimizer)" in warning

    update = jstep.minimize(loss_fn, optimizer, increment_global_step=False, jit=False)

    def step(state, x):
        state, metrics = jax.lax.scan(lambda state, _: update(state, x), state, length=4)
        return jstep.increment_global_step(state, optimizer=optimizer), {
            "loss": metrics["loss"].mean()
        }

    params = []
    hook = jstep.every(1, lambda n, state, metrics: params.append(np.asarray(state.params["w"])))
    assert not warnings_of(MAKERS[make](step), optimizer, caplog, last_step=4, hooks=[hook])
    state = jstep.TrainState.create({"w": jnp.zeros(2), "b": jnp.ones(())}, optimizer)
    state = jstep.train(
        MAKERS[make](step), state, lambda n: np.ones(2, np.float32), 4, log_steps=None
    )
    # Averaged with every=4.
    np.testing.assert_allclose(jstep.averaged_params(state)["w"], 0.1 * params[3], rtol=1e-6)


def test_one_update_a_step_is_not_warned_of(caplog):
    for optimizer in BY_STEP.values():
        update = jstep.minimize(loss_fn, optimizer, jit=False)
        pure = jstep.minimize(loss_fn, optimizer, jit=False, increment_global_step=False)

        def whole(state, x, pure=pure):
            state, metrics = pure(state, x)
            return jstep.increment_global_step(state), metrics

        def branched(state, x, update=update):
            return jax.lax.cond(
                state.global_step < 9, lambda state: update(state, x)[0], lambda state: state, state
            ), {}

        for step in (update, whole, branched):
            assert not warnings_of(jstep.TrainStep(step), optimizer, caplog)


def test_two_players_of_whom_one_is_updated_once(caplog):
    optimizer = jstep.partition({"a": SGD, "a/b": jstep.update_every(SGD, 5)}, label)
    first = jstep.minimize(loss_fn, optimizer, var_list="w", increment_global_step=False, jit=False)
    second = jstep.minimize(loss_fn, optimizer, var_list="b", jit=False)

    def step(state, x):
        for _ in range(3):
            state, _ = first(state, x)
        return second(state, x)

    assert not warnings_of(jstep.TrainStep(step), optimizer, caplog)


# A stage that trains leaves whose age has counted the updates of others.


def stages(optimizer, first=3, before="w"):
    return {
        0: jstep.minimize(loss_fn, optimizer, var_list=before),
        first: jstep.minimize(loss_fn, optimizer),
    }


AGED = {
    "adam": jstep.adam(0.1),
    "schedule_free": jstep.schedule_free_adamw(0.1),
    "guarded": jstep.skip_nonfinite(jstep.scope(jstep.adamw(0.1), "a")),
    "one label": jstep.partition({"a": jstep.adam(0.1), "a/b": SGD}, lambda path, leaf: "a"),
}
NOT_AGED = {
    "sgd": jstep.momentum(0.1, 0.9),
    "labels": jstep.partition({"a": jstep.adam(0.1), "a/b": jstep.adam(0.1)}, label),
    "labels and a wrapper": jstep.lookahead(
        jstep.partition({"a": jstep.adam(0.1), "a/b": jstep.adam(0.1)}, label), 2
    ),
}


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("name", AGED)
def test_a_stage_that_unfreezes_leaves_with_an_age_of_others(name, steps_per_call, caplog):
    optimizer = AGED[name]
    (warning,) = warnings_of(stages(optimizer), optimizer, caplog, 5, steps_per_call=steps_per_call)
    assert "from step 3 on" in warning
    assert "trains 'b' for the first time" in warning
    assert "jstep.partition" in warning


@pytest.mark.parametrize("name", NOT_AGED)
def test_leaves_with_an_age_of_their_own_may_be_unfrozen(name, caplog):
    assert not warnings_of(stages(NOT_AGED[name]), NOT_AGED[name], caplog, 5)


def test_stages_of_custom_steps_and_the_same_leaves(caplog):
    optimizer = AGED["adam"]

    def custom(var_list):
        def step(state, x):
            loss, grads = jstep.compute_gradients(loss_fn, var_list=var_list)(state.params, x)
            return jstep.apply_gradients(state, grads, optimizer), {"loss": loss}

        return step

    for make in MAKERS.values():
        steps = {0: make(custom("w")), 2: make(custom(None)), 4: make(custom("b"))}
        (warning,) = warnings_of(steps, optimizer, caplog, 6)
        assert "from step 2 on" in warning
    assert not warnings_of(
        {0: jstep.TrainStep(custom(None)), 2: jstep.TrainStep(custom("b"))}, optimizer, caplog, 4
    )


def test_a_resumed_run_is_warned_where_the_stage_begins(caplog, tmp_path):
    optimizer = AGED["adam"]
    steps = stages(optimizer)
    assert not warnings_of(steps, optimizer, caplog, 2, checkpoint_dir=tmp_path)
    assert len(warnings_of(steps, optimizer, caplog, 4, checkpoint_dir=tmp_path)) == 1
    assert not warnings_of(steps, optimizer, caplog, 6, checkpoint_dir=tmp_path)


# `state.replace(params=…)` in a traced step, beside slots that undo it.

COPIES = {
    "masters": jstep.master_weights(SGD),
    "averages": jstep.with_moving_average(SGD, EMA(0.9)),
    "lookahead": jstep.lookahead(SGD),
    "schedule_free": jstep.schedule_free_sgd(0.1),
    "label": jstep.partition({"a": SGD, "a/b": jstep.scope(jstep.lookahead(SGD), "x")}, label),
}


def changing(optimizer, change):
    update = jstep.minimize(loss_fn, optimizer, jit=False)

    def step(state, x):
        state, metrics = update(state, x)
        return change(state, jax.tree.map(lambda p: jnp.clip(p, -0.1, 0.1), state.params)), metrics

    return step


def replaced(state, params):
    return state.replace(params=params)


def in_a_branch(state, params):
    return jax.lax.cond(
        state.global_step % 2 == 0, lambda: state.replace(params=params), lambda: state
    )


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("make", ["TrainStep", "jit"])
@pytest.mark.parametrize("change", [replaced, in_a_branch])
@pytest.mark.parametrize("name", COPIES)
def test_parameters_that_are_replaced_beside_copies(name, change, make, caplog):
    optimizer = COPIES[name]
    (warning,) = warnings_of(MAKERS[make](changing(optimizer, change)), optimizer, caplog, 3)
    assert "state.replace(params=…): the slots " in warning
    assert "state.with_params(params)" in warning
    assert "jstep.with_projection(optimizer, fn)" in warning


def test_with_params_and_parameters_without_copies_are_not_warned_of(caplog):
    for optimizer in COPIES.values():
        step = changing(optimizer, lambda state, params: state.with_params(params))
        assert not warnings_of(jstep.TrainStep(step), optimizer, caplog, 3)
        kept = changing(
            optimizer, lambda state, params: state.replace(params=params, slots=state.slots)
        )
        assert not warnings_of(jstep.TrainStep(kept), optimizer, caplog, 3)
        same = changing(optimizer, lambda state, params: state.replace(params=state.params))
        assert not warnings_of(jstep.TrainStep(same), optimizer, caplog, 3)
    adam = jstep.adam(0.1)
    assert not warnings_of(jstep.TrainStep(changing(adam, replaced)), adam, caplog, 3)


def test_parameters_replaced_for_an_evaluation_are_not_warned_of(caplog):
    optimizer = COPIES["averages"]
    state = jstep.TrainState.create({"w": jnp.zeros(2), "b": jnp.ones(())}, optimizer)

    @jax.jit
    def evaluate(state):
        state = state.replace(params=jstep.averaged_params(state))
        return loss_fn(state.params, jnp.ones(2))

    evaluate(state)
    assert not caplog.records
    jstep.TrainStep(changing(optimizer, replaced))(state, jnp.ones(2))  # outside of a run
    assert len(caplog.records) == 1
