"""What a run logs of its steps before the first one: rates of 0, averages that are left behind or at rest."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.loop.foresight import find_scheduled_rates

EMA = jstep.ExponentialMovingAverage
SGD = jstep.gradient_descent(0.1)
PARAMS = {"body": 0.0, "body2": 0.0, "head": 0.0}  # a name is the prefix of another one


def loss(params: Any) -> Any:
    return sum((p - 3.0) ** 2 for p in params.values())


def warnings_of(
    caplog: Any, step: Any, optimizer: Any, last: int | None = 4, params: Any = PARAMS, **kwargs: Any
) -> Any:
    """The warnings of a run."""
    caplog.clear()
    create = {"global_step": kwargs.pop("start", 0)}
    state = jstep.TrainState.create(params, optimizer, **create)
    batches = kwargs.pop("batches", lambda step: ())
    with caplog.at_level(logging.WARNING, "jstep"):
        jstep.train(step, state, batches, last, progress=False, log_steps=None, **kwargs)
    return [record.getMessage() for record in caplog.records if record.name == "jstep"]


ENDS = jstep.linear(0.1, 0.0, steps=5)  # 0 at step 5 and later


def parts(first: jstep.Optimizer, second: jstep.Optimizer) -> jstep.Optimizer:
    return jstep.partition({"a": first, "ab": second}, lambda path, leaf: "a" if path == "body" else "ab")


def rates(optimizer: jstep.Optimizer) -> Any:
    return jstep.minimize(loss, optimizer), optimizer


def from_step(number: int, end: int | None) -> str:
    until = "on, for good" if end is None else f"to the end of the run at step {end}"
    return f"The learning rate is 0 from step {number} {until}, so that"


ALL_ZERO = {
    "alone": lambda: jstep.adam(ENDS),
    "wrapped": lambda: jstep.skip_nonfinite(jstep.with_moving_average(jstep.sgd(ENDS, momentum=0.5), EMA(0.9))),
    "labels": lambda: parts(jstep.scope("x", jstep.adam(ENDS)), jstep.sgd(jstep.linear(0.1, 0.0, steps=2))),
    "a plain 0 beside it": lambda: parts(jstep.adam(ENDS), jstep.sgd(0.0)),
    "negative": lambda: jstep.adam(lambda step: -ENDS(step)),
}
NOT_ZERO = {
    "plain zeros": lambda: jstep.adam(0.0),
    "a scheduled part that learns": lambda: parts(jstep.adam(ENDS), jstep.adam(jstep.linear(0.0, 0.1, steps=50))),
    "a held one": lambda: parts(jstep.adam(ENDS), jstep.adam(jstep.held("speed", 0.1))),
    "one without a rate": lambda: parts(jstep.adam(ENDS), jstep.adafactor()),
    "an unknown one": lambda: parts(jstep.adam(ENDS), jstep.Optimizer(lambda p, n: {}, UNKNOWN, lambda step: {})),
    "other schedules": lambda: jstep.adam(0.1, beta1=ENDS),
}


def UNKNOWN(updates: Any, slots: Any, params: Any, step: Any) -> Any:  # noqa: N802
    return jax.tree.map(lambda g: -0.1 * g, updates), {}


@pytest.mark.thorough(except_for=["labels"])
@pytest.mark.parametrize("name", ALL_ZERO)
def test_a_rate_that_is_0_up_to_the_end(name: str, caplog: Any) -> None:
    step, optimizer = rates(ALL_ZERO[name]())
    found = warnings_of(caplog, step, optimizer, 9)
    assert [line.startswith(from_step(5, 9)) for line in found] == [True], found
    assert jstep.plan(optimizer, 9).rate_zero_from == 5


@pytest.mark.thorough
@pytest.mark.parametrize("name", NOT_ZERO)
def test_rates_that_are_not_all_0(name: str, caplog: Any) -> None:
    step, optimizer = rates(NOT_ZERO[name]())
    assert not warnings_of(caplog, step, optimizer, 9)
    assert jstep.plan(optimizer, 9).rate_zero_from is None


def test_from_which_step_on_the_rate_is_0(caplog: Any) -> None:
    step, optimizer = rates(jstep.adam(ENDS))
    cases = [(6, 0, None), (7, 0, 5), (9, 3, 5), (9, 7, 7), (9, 8, None), (100_000, 99_997, 99_997)]
    for last, start, want in cases:
        found = warnings_of(caplog, step, optimizer, last, start=start)
        assert [line.startswith(from_step(want or 0, last)) for line in found] == [True] * (want is not None), found
        assert jstep.plan(optimizer, last, start=start).rate_zero_from == want
    warms_up, optimizer = rates(jstep.adam(lambda step: jnp.where(step < 5, 0.0, 0.1)))
    assert not warnings_of(caplog, warms_up, optimizer, 9)


def test_the_rates_of_stages(caplog: Any) -> None:
    ends, optimizer = rates(jstep.sgd(ENDS))
    constant, later, zero = (
        jstep.minimize(loss, jstep.sgd(rate)) for rate in (0.1, jstep.linear(0.1, 0.0, steps=8), 0.0)
    )
    own = lambda state: ends(state)  # noqa: E731
    cases: list[tuple[Any, int | None]] = [
        ({0: later, 11: ends}, 8),
        ({0: ends, 7: own}, None),
        ({0: own, 7: ends}, 7),
        ({0: ends, 12: constant}, 5),  # it is not reached
        ({0: constant, 11: ends}, None),  # one step
        ({0: ends, 7: zero}, None),  # a plain 0 is meant
    ]
    for stages, want in cases:
        found = [line for line in warnings_of(caplog, stages, optimizer, 12) if "learning rate" in line]
        assert [line.startswith(from_step(want or 0, 12)) for line in found] == [True] * (want is not None), stages


def test_a_schedule_that_fails_is_an_error_of_the_step() -> None:
    def schedule(step: Any) -> Any:
        raise ZeroDivisionError("my schedule")

    step, optimizer = rates(jstep.adam(schedule))
    with pytest.raises(ZeroDivisionError, match="my schedule") as caught:
        jstep.train(step, jstep.TrainState.create(PARAMS, optimizer), lambda step: (), 4, progress=False)
    assert "while running the step" in caught.value.__notes__[-1]


def test_what_rounding_leaves_of_0_is_0_and_a_small_rate_is_not() -> None:
    """A compiled step evaluates Optax's linear schedule to 0 with one rounding less, as −1.5e−9 for 0.1."""

    def ended(value: float) -> Any:
        return find_scheduled_rates(lambda step: {"learning_rate": jnp.where(step < 50, 0.1, value)})

    assert [ended(value).zero_from(0, 99) for value in (0.0, -1.5e-9, 1e-7, np.nan)] == [50, 50, None, None]
    assert [ended(value).are_zero_for_good(50) for value in (0.0, -1.5e-9, 1e-7, np.nan)] == [True, True, False, False]
    assert not ended(0.0).are_zero_for_good(49)
    from_0_to_0 = find_scheduled_rates(lambda step: {"learning_rate": jnp.where((step > 0) & (step < 50), 0.1, 0.0)})
    assert from_0_to_0 is not None
    assert not from_0_to_0.are_zero_for_good(0), "a warmup begins with 0"
    halves = find_scheduled_rates(lambda step: {"learning_rate": 0.1 * jnp.float32(0.5) ** step.astype(jnp.float32)})
    small = find_scheduled_rates(lambda step: {"learning_rate": jnp.where(step < 50, 1e-9, 2e-9)})
    assert halves is not None
    assert small is not None
    assert halves.zero_from(0, 100) == 99  # it has not ended: no two steps are alike
    assert small.zero_from(0, 99) is None


def test_a_schedule_that_cannot_be_traced() -> None:
    assert find_scheduled_rates(lambda step: {"learning_rate": 0.0 if step > 3 else 0.1}) is None
    plan = jstep.plan({"learning_rate": lambda step: 0.0 if step > 3 else 0.1}, 9)
    assert plan.rate_zero_from is None


@pytest.mark.thorough(except_for=["below a label"])
@pytest.mark.parametrize("around", ["alone", "below a label"])
def test_gradients_that_no_update_has_used(around: str, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "jstep")
    every = jstep.update_every(4, SGD, accumulate=True)
    wrapped = {
        "alone": (jstep.skip_nonfinite(every), ["gradient_count"]),
        "below a label": (parts(every, jstep.scope("x", every)), ["a/gradient_count", "ab/x/gradient_count"]),
    }
    optimizer, slots = wrapped[around]
    step = jstep.minimize(loss, optimizer)
    for last, steps_per_call, many in ((10, 1, "2 steps"), (9, 3, "1 step"), (8, 1, None)):
        caplog.clear()
        state = jstep.TrainState.create(PARAMS, optimizer)
        jstep.train(step, state, lambda n: (), last, progress=False, steps_per_call=steps_per_call)
        found = [record.getMessage() for record in caplog.records if "accumul" in record.getMessage()]
        named = ", ".join(map(repr, slots))
        want = [f"the run ends with the gradients of {many} accumulated ({named}), which no update has used"]
        assert [line.split(";")[0] for line in found] == want * (many is not None)


def by_label(ema: EMA) -> Any:
    parts = {"all": jstep.scope("mine", jstep.with_moving_average(SGD, ema))}
    return jstep.skip_nonfinite(jstep.partition(parts, lambda path, leaf: "all"))


WRAPPED = {
    "alone": ("ExponentialMovingAverage", lambda ema: jstep.with_moving_average(SGD, ema)),
    "below a label": ("all/mine/ExponentialMovingAverage", by_label),
    "compact": ("ExponentialMovingAverage", lambda ema: jstep.compact(jstep.with_moving_average(SGD, ema))),
}


@pytest.mark.thorough(except_for=["below a label"])
@pytest.mark.parametrize("name", WRAPPED)
def test_a_stage_that_stops_training_averaged_leaves(name: str, caplog: Any) -> None:
    slot, wrap = WRAPPED[name]
    for ema, is_left in ((EMA(0.9), True), (EMA(0.9, follows="step"), False)):
        optimizer = wrap(ema)
        head = jstep.minimize(loss, optimizer, var_list="head")
        stages = {0: jstep.minimize(loss, optimizer), 2: head, 3: head}
        found = warnings_of(caplog, stages, optimizer)
        assert len(found) == is_left, found
        if is_left:
            assert found[0].startswith(
                f"train_step[2] no longer trains 'body', 'body2'. Their moving averages ('{slot}')"
            )
            assert 'ExponentialMovingAverage(…, follows="step")' in found[0]


def test_which_stages_leave_averages_behind(caplog: Any) -> None:
    optimizer = jstep.with_moving_average(SGD, EMA(0.9), var_list=["body", "head"])
    whole = jstep.minimize(loss, optimizer)
    head = jstep.minimize(loss, optimizer, var_list="head")
    others = jstep.minimize(loss, optimizer, var_list=["body", "body2"], jit=False)
    losses = jstep.minimize({"one": (loss, "head"), "two": (loss, "body")}, optimizer)
    cases: list[tuple[Any, int, dict[str, Any], list[str]]] = [
        ({0: whole}, 4, {}, []),
        ({0: whole, 2: losses}, 4, {}, []),  # what is no longer trained has no average
        ({0: whole, 4: head}, 4, {}, []),  # it is not reached
        ({0: whole, 2: head}, 4, {"start": 3}, ["[2] no longer trains 'body'."]),  # a restart in the stage
        ({0: whole, 1: head, 2: whole}, 4, {"start": 3}, []),  # it is over
        ({0: losses, 1: others, 2: head}, 4, {}, ["[1] no longer trains 'head'.", "[2] no longer trains 'body'."]),
        ({0: whole, 1: lambda state: whole(state), 2: head}, 4, {}, ["[2] no longer trains 'body'."]),
    ]
    for stages, last, given, want in cases:
        found = warnings_of(caplog, stages, optimizer, last, **given)
        assert len(found) == len(want), found
        assert all(part in message for part, message in zip(want, found, strict=True)), found


def two_players(ema: EMA) -> tuple[Any, Any]:
    """A step of two updates, of which the second advances the step, and its optimizer."""
    parts = {name: jstep.with_moving_average(SGD, ema) for name in ("d", "g")}
    optimizer = jstep.partition(parts, lambda path, leaf: path)

    def player_loss(params: Any, x: Any) -> Any:
        return jnp.sum((params["d"] * x) ** 2) + jnp.sum((params["g"] * x - 2.0) ** 2)

    critic = jstep.minimize(player_loss, optimizer, var_list="d", increment_global_step=False, jit=False)
    generator = jstep.minimize(player_loss, optimizer, var_list="g", jit=False)

    def step(state: Any, x: Any) -> Any:
        state, _ = critic(state, x)
        return generator(state, x)

    return step, optimizer


@pytest.mark.thorough(except_for=["1-plain"])
@pytest.mark.parametrize("kind", ["plain", "jit", "compiled"])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_averages_that_no_update_of_a_step_moves(steps_per_call: int, kind: str, caplog: Any) -> None:
    step, optimizer = two_players(EMA(0.5, follows="step"))
    step = {"plain": lambda fn: fn, "jit": jax.jit, "compiled": jstep.TrainStep}[kind](step)
    params: Any = {"d": jnp.ones(8), "g": jnp.ones(8)}
    batches: Any = np.ones(8, np.float32)
    for _ in range(2):
        found = warnings_of(
            caplog, step, optimizer, params=params, batches=lambda n: batches, steps_per_call=steps_per_call
        )
        assert len(found) == 1, found
        assert "moving averages that follow the step ('d/ExponentialMovingAverage', follows" in found[0]
        assert "no update with increment_global_step=True is one of theirs" in found[0]


def test_averages_that_move(caplog: Any) -> None:
    step, optimizer = two_players(EMA(0.5))
    params, batch = {"d": jnp.ones(2), "g": jnp.ones(2)}, np.ones(2, np.float32)
    assert not warnings_of(caplog, step, optimizer, params=params, batches=lambda n: batch)
    whole = jstep.skip_nonfinite(jstep.with_moving_average(SGD, EMA(0.5, follows="step")))
    accumulated = jstep.minimize(lambda p, x: jnp.mean(x * (p["d"] + p["g"])), whole, num_microbatches=2)
    assert not warnings_of(caplog, accumulated, whole, params=params, batches=lambda n: batch)
    assert not warnings_of(caplog, lambda s, x: accumulated(s, x), whole, params=params, batches=lambda n: batch)
