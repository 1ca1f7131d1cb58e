"""What a run logs of its steps before the first one: averages that are left behind or at rest."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

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


def by_label(ema: EMA) -> Any:
    parts = {"all": jstep.scope("mine", jstep.with_moving_average(SGD, ema))}
    return jstep.skip_nonfinite(jstep.partition(parts, lambda path, leaf: "all"))


WRAPPED = {
    "alone": ("ExponentialMovingAverage", lambda ema: jstep.with_moving_average(SGD, ema)),
    "below a label": ("all/mine/ExponentialMovingAverage", by_label),
    "in a chain": (
        "ExponentialMovingAverage",
        lambda ema: jstep.chain(jstep.clip_gradients(by_norm=1.0), jstep.with_moving_average(SGD, ema)),
    ),
    "compact": ("ExponentialMovingAverage", lambda ema: jstep.compact(jstep.with_moving_average(SGD, ema))),
}


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
                f"train_step[2] stops training 'body', 'body2': their moving averages ('{slot}')"
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
        ({0: head, 2: whole}, 4, {}, []),  # more is trained
        ({0: whole, 2: losses}, 4, {}, []),  # what is no longer trained has no average
        ({0: whole, 4: head}, 4, {}, []),  # it is not reached
        ({0: whole, 2: head}, 4, {"start": 3}, ["[2] stops training 'body':"]),  # a restart in the stage
        ({0: whole, 1: head, 2: whole}, 4, {"start": 3}, []),  # it is over
        ({0: losses, 1: others}, 4, {}, ["[1] stops training 'head':"]),
        ({0: losses, 1: others, 2: head}, 4, {}, ["[1] stops training 'head':", "[2] stops training 'body':"]),
        ({0: whole, 1: lambda state: whole(state), 2: head}, 4, {}, ["[2] stops training 'body':"]),
    ]
    for stages, last, given, want in cases:
        found = warnings_of(caplog, stages, optimizer, last, **given)
        assert len(found) == len(want), found
        assert all(part in message for part, message in zip(want, found, strict=True)), found


def test_before_the_first_step(caplog: Any) -> None:
    optimizer = jstep.with_moving_average(SGD, EMA(0.9))
    stages = {0: jstep.minimize(loss, optimizer), 5: jstep.minimize(loss, optimizer, var_list="head")}
    state = jstep.TrainState.create(PARAMS, optimizer)

    def batches(step: int) -> tuple[()]:
        if step == 1:
            raise ZeroDivisionError
        return ()

    with caplog.at_level(logging.WARNING, "jstep"), pytest.raises(ZeroDivisionError):
        jstep.train(stages, state, batches, 10, progress=False)
    assert "train_step[5] stops training" in caplog.text


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


@pytest.mark.thorough(except_for=["None-1-plain", "Explicit-2-jit"])
@pytest.mark.parametrize("kind", ["plain", "jit", "compiled"])
@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.parametrize("axes", [None, "Auto", "Explicit"])
def test_averages_that_no_update_of_a_step_moves(axes: Any, steps_per_call: int, kind: str, caplog: Any) -> None:
    step, optimizer = two_players(EMA(0.5, follows="step"))
    step = {"plain": lambda fn: fn, "jit": jax.jit, "compiled": jstep.TrainStep}[kind](step)
    params: Any = {"d": jnp.ones(8), "g": jnp.ones(8)}
    batches: Any = np.ones(8, np.float32)
    if axes is not None:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType[axes],))
        place = jax.NamedSharding(mesh, jax.P("data"))
        params, batches = jax.device_put((params, batches), place)
    for _ in range(2):
        found = warnings_of(
            caplog, step, optimizer, params=params, batches=lambda n: batches, steps_per_call=steps_per_call
        )
        assert len(found) == 1, found
        assert "moving averages that follow the step ('d/ExponentialMovingAverage', follows" in found[0]
        assert "none of them advances the step" in found[0]


def test_averages_that_move(caplog: Any) -> None:
    step, optimizer = two_players(EMA(0.5))
    params, batch = {"d": jnp.ones(2), "g": jnp.ones(2)}, np.ones(2, np.float32)
    assert not warnings_of(caplog, step, optimizer, params=params, batches=lambda n: batch)
    whole = jstep.skip_nonfinite(jstep.with_moving_average(SGD, EMA(0.5, follows="step")))
    accumulated = jstep.minimize(lambda p, x: jnp.mean(x * (p["d"] + p["g"])), whole, num_microbatches=2)
    assert not warnings_of(caplog, accumulated, whole, params=params, batches=lambda n: batch)
    assert not warnings_of(caplog, lambda s, x: accumulated(s, x), whole, params=params, batches=lambda n: batch)
