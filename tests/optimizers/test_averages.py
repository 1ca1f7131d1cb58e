"""Moving averages: their equation in NumPy, and those with an interval, a `var_list` or another
name."""

import dataclasses
from typing import NamedTuple

import equations
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

VALUES = np.random.default_rng(0).normal(size=(15, 3))
AVERAGES = "ExponentialMovingAverage"


@pytest.mark.thorough(except_for=["0.3-True-True"])
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("num_updates", [False, True])
@pytest.mark.parametrize("zero_debias", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 0.999])
def test_apply(decay, num_updates, zero_debias):
    ema = jstep.ExponentialMovingAverage(decay, num_updates=num_updates, zero_debias=zero_debias)
    averages = ema.init({"w": VALUES[0]})
    np.testing.assert_array_equal(averages["w"], np.zeros(3) if zero_debias else VALUES[0])
    expected = [equations.averages(ema, column[0], enumerate(column[1:])) for column in VALUES.T]
    for n, value in enumerate(VALUES[1:], 1):
        averages = ema.apply(averages, {"w": value}, num_updates=n)
        np.testing.assert_allclose(averages["w"], [one[n - 1] for one in expected], rtol=1e-11)


def test_a_decay_near_one_is_precise_in_float32():
    """In float32, 1 − 0.999999 is wrong in the second digit."""
    ema = jstep.ExponentialMovingAverage(0.999999)
    moved = ema.apply(ema.init({"w": jnp.float32(0)}), {"w": jnp.float32(1)})
    np.testing.assert_allclose(moved["w"], 1e-6, rtol=1e-5)
    debiased = jstep.ExponentialMovingAverage(0.999999, zero_debias=True)
    first = debiased.apply(
        debiased.init({"w": jnp.float32(0)}), {"w": jnp.float32(3)}, num_updates=1
    )
    np.testing.assert_allclose(first["w"], 3.0, rtol=1e-6)


def test_num_updates_takes_the_smaller_decay():
    ema = jstep.ExponentialMovingAverage(0.9, num_updates=True)
    zero, one = {"w": jnp.float32(0)}, {"w": jnp.float32(1)}
    traced = jax.jit(lambda n: ema.apply(zero, one, num_updates=n))
    for n in (0, 1, 5, 79, 80, 81, 10**6, 2**31 - 1):
        expected = 1 - min(0.9, (1 + n) / (10 + n))
        np.testing.assert_allclose(ema.apply(zero, one, num_updates=n)["w"], expected, rtol=1e-6)
        np.testing.assert_allclose(traced(n)["w"], expected, rtol=1e-6)


# With an optimizer.

PARAMS = {"w": jnp.array([1.0, 2.0]), "half": jnp.ones(2, jnp.bfloat16), "n": jnp.int32(3)}
ONES = {"w": jnp.ones(2), "half": jnp.ones(2, jnp.bfloat16), "n": None}


def test_nonfinite_params_between_updates_are_ignored():
    """Between two updates the parameters do not enter the average, not even as 0 · ∞."""
    ema = jstep.ExponentialMovingAverage(0.5, every=2)
    averages = ema.apply(
        ema.init({"w": jnp.float32(1.0)}), {"w": jnp.float32(jnp.inf)}, num_updates=1
    )
    assert float(averages["w"]) == 1.0


def test_var_list_selects_the_averaged_params():
    optimizer = jstep.with_moving_average(
        jstep.gradient_descent(0.1), jstep.ExponentialMovingAverage(0.5), "w*"
    )
    state = jstep.apply_gradients(jstep.TrainState.create(PARAMS, optimizer), ONES, optimizer)
    assert jstep.get_slot(state, AVERAGES, "half") is None
    averaged = jstep.averaged_params(state)
    np.testing.assert_array_equal(averaged["half"], state.params["half"])
    assert not np.array_equal(averaged["w"], state.params["w"])


def test_averaged_params_keep_dtypes_and_other_leaves():
    optimizer = jstep.with_moving_average(
        jstep.gradient_descent(1.0), jstep.ExponentialMovingAverage(0.5)
    )
    params = {
        "f": jnp.zeros(2),
        "h": jnp.zeros(2, jnp.bfloat16),
        "i": jnp.arange(2),
        "n": None,
        "k": jax.random.key(0),
    }
    state = jstep.TrainState.create(params, optimizer)
    grads = {"f": -jnp.ones(2), "h": -jnp.ones(2, jnp.bfloat16), "i": None, "n": None, "k": None}
    state = jstep.apply_gradients(state, grads, optimizer)
    averaged = jstep.averaged_params(state)
    assert jax.tree.structure(averaged) == jax.tree.structure(state.params)
    np.testing.assert_array_equal(averaged["f"], [0.5, 0.5])
    assert averaged["h"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(averaged["h"].astype(jnp.float32), [0.5, 0.5])
    np.testing.assert_array_equal(averaged["i"], [0, 1])
    assert averaged["k"].dtype == params["k"].dtype


# Moving averages with a decay that changes, and with initial values of their own.


def averages_of(optimizer, steps=3, changes=None):
    """Return the averages of "w" at each step, and the parameters, after `changes(state, step)`."""
    state = jstep.TrainState.create(PARAMS, optimizer)
    averages, params = [state.slots[AVERAGES]["w"]], [state.params["w"]]
    for step in range(steps):
        state = changes(state, step) if changes else state
        state = jstep.apply_gradients(state, ONES, optimizer)
        averages.append(state.slots[AVERAGES]["w"])
        params.append(state.params["w"])
    return averages, params


DECAYS = [0.0, 0.25, 0.75]


@pytest.mark.thorough(except_for=["False"])
@pytest.mark.parametrize("zero_debias", [False, True])
def test_a_schedule_is_read_at_the_step_of_the_update(zero_debias):
    schedule = jstep.piecewise_constant([0, 1], DECAYS)
    ema = jstep.ExponentialMovingAverage(schedule, zero_debias=zero_debias)
    optimizer = jstep.with_moving_average(jstep.gradient_descent(1.0), ema)
    averages, params = averages_of(optimizer)
    average = averages[0]
    alone = ema.init(PARAMS)["w"]
    for step, decay in enumerate(DECAYS):
        rate = (1 - decay) / (1 - decay ** (step + 1)) if zero_debias else 1 - decay
        average = average - rate * (average - params[step + 1])
        np.testing.assert_allclose(averages[step + 1], average, rtol=1e-6)
        alone = ema.apply({"w": alone}, {"w": params[step + 1]}, num_updates=step + 1)["w"]
        np.testing.assert_allclose(alone, average, rtol=1e-6)
    assert {name: float(value) for name, value in optimizer.hyperparameters(1).items()} == {
        "learning_rate": 1.0,
        "ExponentialMovingAverage/decay": 0.25,
    }
    with pytest.raises(ValueError, match=r"num_updates=None: must be given for this average"):
        jstep.ExponentialMovingAverage(schedule).apply({"w": alone}, {"w": alone})


def test_a_held_decay_is_in_the_state():
    ema = jstep.ExponentialMovingAverage(jstep.held("teacher", 0.0))
    optimizer = jstep.with_moving_average(jstep.gradient_descent(1.0), ema)

    def changes(state, step):
        return jstep.set_hyperparameter(state, "teacher", DECAYS[step])

    averages, params = averages_of(optimizer, changes=changes)
    for step, decay in enumerate(DECAYS):
        np.testing.assert_allclose(
            averages[step + 1], decay * averages[step] + (1 - decay) * params[step + 1]
        )
    step = jstep.minimize(lambda p: jnp.sum(p["w"]), optimizer)
    _, metrics = step(jstep.TrainState.create(PARAMS, optimizer))
    assert float(metrics["teacher"]) == 0
    with pytest.raises(
        TypeError,
        match=r"decay=held\('teacher', …\): its value is in the state; use jstep.with_moving",
    ):
        ema.apply(ema.init(PARAMS), PARAMS)


def moved_by(ema, change=lambda state: state):
    """Return how far the average of a parameter that stays 1 moves from 0 in one update."""
    optimizer = jstep.with_moving_average(
        jstep.gradient_descent(0.0),
        ema,
        initial=None if ema.zero_debias else lambda p: jax.tree.map(jnp.zeros_like, p),
    )
    state = change(jstep.TrainState.create({"w": jnp.ones(2)}, optimizer))
    state, metrics = jstep.minimize(lambda p: jnp.sum(p["w"]), optimizer)(state)
    return float(state.slots[ema.name]["w"][1]), metrics


@pytest.mark.thorough(except_for=["1e-07"])
@pytest.mark.parametrize("rate", [1.0, 1e-4, 1e-7, 0.0])
def test_a_rate_is_applied_as_it_is_given_where_a_decay_loses_digits(rate):
    exact = np.float32(rate)
    number, metrics = moved_by(jstep.ExponentialMovingAverage(rate=rate))
    assert number == exact
    assert "ExponentialMovingAverage/rate" not in metrics
    scheduled, metrics = moved_by(
        jstep.ExponentialMovingAverage(rate=lambda step: rate, name="mean")
    )
    assert scheduled == exact
    assert float(metrics["mean/rate"]) == exact
    held = jstep.ExponentialMovingAverage(rate=jstep.held("speed", 0.5))
    moved, metrics = moved_by(held, lambda state: jstep.set_hyperparameter(state, "speed", rate))
    assert moved == exact
    assert float(metrics["speed"]) == exact


def test_a_rate_with_num_updates_and_zero_debias():
    moved = moved_by(jstep.ExponentialMovingAverage(rate=1e-7, num_updates=True))
    assert moved[0] == np.float32(9 / 11)
    moved = moved_by(jstep.ExponentialMovingAverage(rate=0.95, num_updates=True))
    assert moved[0] == np.float32(0.95)
    assert moved_by(jstep.ExponentialMovingAverage(rate=1e-7, zero_debias=True))[0] == 1
    for rate in (1e-3, 0.0):
        given = jstep.ExponentialMovingAverage(rate=rate, zero_debias=True)
        same = jstep.ExponentialMovingAverage(1 - rate, zero_debias=True)
        for age in (1, 2, 50):
            np.testing.assert_allclose(given._weight(age), same._weight(age), rtol=1e-6)


@pytest.mark.parametrize(
    "given", [lambda params: {**params, "w": params["w"] * 10}, {**PARAMS, "w": PARAMS["w"] * 10}]
)
def test_initial_values(given):
    ema = jstep.ExponentialMovingAverage(0.75)
    optimizer = jstep.with_moving_average(jstep.gradient_descent(1.0), ema, initial=given)
    averages, params = averages_of(optimizer, steps=1)
    assert averages[0].tolist() == [10.0, 20.0]
    assert averages[1].tolist() == (0.75 * averages[0] + 0.25 * params[1]).tolist()
    state = jstep.TrainState.create(PARAMS, optimizer)
    assert state.slots[AVERAGES]["half"].dtype == jnp.float32
    assert state.slots[AVERAGES]["n"] is None
    shapes = jax.eval_shape(lambda: jstep.TrainState.create(PARAMS, optimizer))
    assert shapes.slots[AVERAGES]["w"].shape == (2,)
    step = jstep.minimize(lambda p: jnp.sum(p["w"]), optimizer)
    step(state)  # donates the averages, and neither params nor the initial values
    assert jstep.averaged_params(jstep.TrainState.create(PARAMS, optimizer))["w"].tolist() == [
        10.0,
        20.0,
    ]


# Averages move once in each update of their leaf.

PLAYERS = ("d", "dd", "g")  # a label is the prefix of another one


class Update(NamedTuple):
    """An update: the leaves that have a gradient, whether the step advances, whether the gradients
    are NaN."""

    leaves: tuple[str, ...]
    increment: bool = True
    is_nan: bool = False


PROGRAM = [
    Update(("d", "dd", "g")),
    Update(("d",)),
    Update(("g",), increment=False),
    Update(("d", "g"), is_nan=True),
    Update(("g",)),
    Update(("d", "dd"), increment=False, is_nan=True),
    Update(("d", "dd"), increment=False),
    Update(("dd",)),
    Update(("d", "dd", "g")),
]


def players(wrap=lambda part: part):
    parts = {name: wrap(jstep.gradient_descent(0.5)) for name in PLAYERS}
    return jstep.partition(parts, lambda path, leaf: path)


AVERAGES_OF_PLAYERS = {
    "plain": jstep.ExponentialMovingAverage(0.9),
    "rate": jstep.ExponentialMovingAverage(rate=jstep.linear(0.5, 0.1, steps=6)),
    "num_updates": jstep.ExponentialMovingAverage(0.95, num_updates=True),
    "zero_debias": jstep.ExponentialMovingAverage(0.9, zero_debias=True),
    "every": jstep.ExponentialMovingAverage(0.5, start_step=2, every=2),
    "swa": jstep.ExponentialMovingAverage(1.0, zero_debias=True, every=2),
    "swa from a step": jstep.ExponentialMovingAverage(1.0, zero_debias=True, start_step=2, every=2),
}


with_average = jstep.with_moving_average
AROUND = {
    "guard outside": lambda ema: jstep.skip_nonfinite(with_average(players(), ema)),
    "guard inside": lambda ema: with_average(jstep.skip_nonfinite(players()), ema),
    "guards of all parts": lambda ema: with_average(players(jstep.skip_nonfinite), ema),
    "chain": lambda ema: jstep.skip_nonfinite(
        jstep.chain(jstep.clip_gradients(by_global_norm=0.5), with_average(players(), ema))
    ),
    "one label": lambda ema: jstep.skip_nonfinite(
        jstep.partition({"all": with_average(players(), ema)}, lambda path, leaf: "all")
    ),
    "masters": lambda ema: jstep.skip_nonfinite(jstep.master_weights(with_average(players(), ema))),
    "compact inside": lambda ema: with_average(jstep.compact(jstep.skip_nonfinite(players())), ema),
    "projection": lambda ema: with_average(
        jstep.with_projection(
            jstep.skip_nonfinite(players()), lambda p: jax.tree.map(lambda x: jnp.clip(x, -1, 1), p)
        ),
        ema,
    ),
    "two averages": lambda ema: with_average(
        with_average(jstep.skip_nonfinite(players()), ema),
        dataclasses.replace(ema, name=f"{ema.name}/all"),
    ),
    "labels": lambda ema: players(lambda part: jstep.skip_nonfinite(with_average(part, ema))),
    "labels of wrappers": lambda ema: players(
        lambda part: jstep.skip_nonfinite(
            jstep.update_every(
                jstep.chain(jstep.master_weights(with_average(part, ema))), 1, accumulate=True
            )
        )
    ),
}


AROUND_GUARDS = (
    "guard inside",
    "guards of all parts",
    "compact inside",
    "projection",
    "two averages",
)
"""Averages that follow updates count those that a guard inside of them skips, as around
`update_every`."""


def averages_by_hand(states, ema, player, around):
    """The averages after each update of PROGRAM, in float64."""
    found = []
    for i, update in enumerate(PROGRAM):
        has_gradient = player in update.leaves
        is_skipped = (
            update.is_nan
            and around not in AROUND_GUARDS
            and (has_gradient or "labels" not in around)
        )
        is_made = (update.increment if ema.per_step else has_gradient) and not is_skipped
        found.append(
            (int(states[i].global_step), float(states[i + 1].params[player])) if is_made else None
        )
    return equations.averages(ema, float(states[0].params[player]), found)


def run_of_players(optimizer, first=0):
    def update(state, one):
        def gradient(name):
            return (
                jnp.cos(3 * state.params[name] + 1) * (jnp.nan if one.is_nan else 1)
                if name in one.leaves
                else None
            )

        grads = {name: gradient(name) for name in PLAYERS}
        return jstep.apply_gradients(state, grads, optimizer, increment_global_step=one.increment)

    states = [jstep.TrainState.create({"d": 1.0, "dd": -1.0, "g": 2.0}, optimizer, first)]
    for one in PROGRAM:
        states.append(update(states[-1], one))
    return states


@pytest.mark.thorough(
    except_for=["True-zero_debias-labels of wrappers", "True-plain-guard outside"]
)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", AVERAGES_OF_PLAYERS)
@pytest.mark.parametrize("per_step", [False, True])
def test_every_leaf_moves_once_in_each_update_that_counts(per_step, name, around):
    ema = dataclasses.replace(AVERAGES_OF_PLAYERS[name], per_step=per_step)
    optimizer = AROUND[around](ema)
    states = run_of_players(optimizer, first=7 if name in ("num_updates", "every") else 0)
    slots = [slot for slot in states[0].slots if slot.rsplit("/", 1)[-1] in (ema.name, "all")]
    assert len(slots) == {"two averages": 2, "labels": 3, "labels of wrappers": 3}.get(around, 1)
    for slot in slots:
        for player in PLAYERS:
            if states[0].slots[slot][player] is None:
                continue
            got = [float(state.slots[slot][player]) for state in states[1:]]
            want = averages_by_hand(states, ema, player, around)
            # Before its first update, an average from zeros may have taken the value of its
            # parameter.
            first = next(i for i, value in enumerate(want) if value)
            np.testing.assert_allclose(got[first:], want[first:], rtol=2e-5, atol=1e-6)


def equal_ends(optimizer, compiled=False):
    """Return the states after steps of which the last update, or `increment_global_step`,
    increments the step."""

    def update(state, leaves, increment=False):
        grads = {
            name: jnp.cos(3 * state.params[name] + 1) if name in leaves else None
            for name in PLAYERS
        }
        return jstep.apply_gradients(state, grads, optimizer, increment_global_step=increment)

    def by_update(state):
        state = update(state, ("d", "g"))
        return update(update(state, ("d", "dd")), PLAYERS, increment=True)

    def by_end(state):
        state = update(state, ("d", "g"))
        state = update(update(state, ("d", "dd")), PLAYERS)
        return jstep.increment_global_step(state, optimizer=optimizer)

    states = []
    for step in (by_update, by_end):
        state = jstep.TrainState.create({"d": 1.0, "dd": -1.0, "g": 2.0}, optimizer)
        step = jax.jit(step) if compiled else step
        for _ in range(5):
            state = step(state)
        states.append(state)
    return states


@pytest.mark.thorough(except_for=["zero_debias-labels of wrappers", "every-guard outside"])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", AVERAGES_OF_PLAYERS)
def test_the_end_of_a_step_moves_averages_as_its_last_update_does(name, around):
    ema = dataclasses.replace(AVERAGES_OF_PLAYERS[name], per_step=True)
    by_update, by_end = equal_ends(AROUND[around](ema))
    assert by_end.global_step == 5
    assert by_end.params == by_update.params
    for slot in by_update.slots:
        if not slot.endswith("last_finite_step"):
            assert by_end.slots[slot] == by_update.slots[slot], slot
