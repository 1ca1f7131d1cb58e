"""Warnings about the updates of one step: an age that counts an update without a gradient of its leaf."""

import jax
import jax.numpy as jnp
import pytest

import jstep


def fit(p, x):
    return jnp.sum((p["d"]["w"] - x) ** 2) + jnp.sum(p["d"]["bias"] ** 2)


def penalize(p, x):
    return jnp.sum((p["d"]["w"] + x) ** 2)


def penalize_both(p, x):
    return penalize(p, x) + 0 * jnp.sum(p["d"]["bias"])


def generate(p, x):
    return jnp.sum((p["g"]["w"] - x * p["d"]["w"]) ** 2)


def players(**optimizers):
    return jstep.partition(optimizers, lambda path, leaf: path[0])


def one_after_the_other(optimizer, *losses):
    updates = [
        jstep.minimize(loss, optimizer, var_list=var_list, increment_global_step=i == len(losses) - 1, jit=False)
        for i, (loss, var_list) in enumerate(losses)
    ]

    def step(state, x):
        for update in updates:
            state, metrics = update(state, x)
        return state, metrics

    return step


def with_gradients(optimizer, *losses):
    differentiated = [jstep.compute_gradients(loss, var_list=var_list) for loss, var_list in losses]

    def step(state, x):
        for differentiate in differentiated:
            loss, grads = differentiate(state.params, x)
            state = jstep.apply_gradients(state, grads, optimizer, increment_global_step=False)
        return jstep.increment_global_step(state), {"loss": loss}

    return step


def sometimes(optimizer, first, other, last):
    first, other, last = (one_after_the_other(optimizer, loss) for loss in (first, other, last))

    def step(state, x):
        n = state.global_step
        state = first(state, x)[0].replace(global_step=n)
        state = jax.lax.cond(n % 4 == 0, lambda s: other(s, x)[0], lambda s: s, state).replace(global_step=n)
        return last(state, x)

    return step


ADAM, D, G = jstep.adam(0.1), "d/*", "g/*"
PLAYERS = players(g=jstep.adam(0.1), d=jstep.adam(0.1))
WRAPPED = jstep.skip_nonfinite(
    jstep.with_moving_average(
        jstep.chain(jstep.clip_gradients(by_global_norm=1.0), ADAM), jstep.ExponentialMovingAverage(0.9)
    )
)
SHARED = jstep.chain(jstep.scale_by_adam(), players(g=jstep.gradient_descent(0.1), d=jstep.gradient_descent(0.1)))
FROZEN = jstep.partition({"d": jstep.adam(0.1)}, lambda path, leaf: None if path == "d/bias" else "d")
SEPARATE = jstep.partition(
    {"bias": jstep.adam(0.1), "d": jstep.adam(0.1)}, lambda path, leaf: "bias" if path == "d/bias" else "d"
)

CASES = {
    "one optimizer": (one_after_the_other, ADAM, [(fit, D), (penalize, D)], True),
    "gradients": (with_gradients, ADAM, [(fit, D), (penalize, D)], True),
    "a player": (one_after_the_other, PLAYERS, [(fit, D), (penalize, D), (generate, G)], True),
    "in a condition": (sometimes, PLAYERS, [(fit, D), (penalize, D), (generate, G)], True),
    "wrapped": (one_after_the_other, WRAPPED, [(fit, D), (penalize, D)], True),
    "an age of all labels": (one_after_the_other, SHARED, [(fit, D), (penalize, D)], True),
    "one update": (one_after_the_other, ADAM, [(penalize, D)], False),
    "players": (one_after_the_other, PLAYERS, [(fit, D), (generate, G)], False),
    "players of one optimizer": (one_after_the_other, ADAM, [(fit, D), (generate, G)], False),
    "left out": (one_after_the_other, ADAM, [(fit, D), (penalize, "d/w")], False),
    "frozen": (one_after_the_other, FROZEN, [(fit, D), (penalize, D)], False),
    "a term": (one_after_the_other, ADAM, [(fit, D), (penalize_both, D)], False),
    "a label": (one_after_the_other, SEPARATE, [(fit, D), (penalize, D)], False),
    "no age": (one_after_the_other, jstep.momentum(0.1, 0.9), [(fit, D), (penalize, D)], False),
    "no age of the label": (
        one_after_the_other,
        players(g=ADAM, d=jstep.momentum(0.1, 0.9)),
        [(fit, D), (penalize, D), (generate, G)],
        False,
    ),
}


def warnings_of_run(step, optimizer, caplog, **kwargs):
    params = {"g": {"w": jnp.ones(2)}, "d": {"w": jnp.ones(2), "bias": jnp.ones(2)}}
    state = jstep.TrainState.create(params, optimizer)
    jstep.train(step, state, lambda n: (jnp.ones(2),), 3, progress=False, log_steps=None, **kwargs)
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("name", CASES)
def test_an_age_that_counts_updates_without_a_gradient_is_one_warning(name, caplog):
    make, optimizer, losses, is_warned = CASES[name]
    found = warnings_of_run(jstep.TrainStep(make(optimizer, *losses)), optimizer, caplog)
    assert len(found) == is_warned, found
    assert all("no gradient of 'd/bias'" in text and "0 * …" in text and "jstep.partition" in text for text in found)


@pytest.mark.parametrize("compiled", [lambda step: step, jax.jit])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_steps_that_jstep_does_not_compile(compiled, steps_per_call, caplog):
    step = compiled(one_after_the_other(ADAM, (fit, D), (penalize, D)))
    assert len(warnings_of_run(step, ADAM, caplog, steps_per_call=steps_per_call)) == 1
