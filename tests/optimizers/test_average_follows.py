"""Averages move once in each update of their leaf."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equations
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

EMA = jstep.ExponentialMovingAverage
PLAYERS = ("d", "dd", "g")  # a label is the prefix of another one


class Update(NamedTuple):
    """An update: the leaves that have a gradient, whether the step advances, whether the gradients are NaN."""

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


def players(wrap: Callable[[jstep.Optimizer], jstep.Optimizer] = lambda part: part) -> jstep.Optimizer:
    parts = {name: wrap(jstep.gradient_descent(0.5)) for name in PLAYERS}
    return jstep.partition(parts, lambda path, leaf: path)


AVERAGES = {
    "plain": EMA(0.9),
    "rate": EMA(rate=jstep.linear(0.5, 0.1, steps=6)),
    "num_updates": EMA(0.95, num_updates=True),
    "zero_debias": EMA(0.9, zero_debias=True),
    "every": EMA(0.5, start_step=2, every=2),
    "swa": EMA(1.0, zero_debias=True, every=2),
    "swa from a step": EMA(1.0, zero_debias=True, start_step=2, every=2),
}


def with_average(inner: jstep.Optimizer, ema: EMA) -> jstep.Optimizer:
    return jstep.with_moving_average(inner, ema)


AROUND: dict[str, Callable[[EMA], jstep.Optimizer]] = {
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
        jstep.with_projection(jstep.skip_nonfinite(players()), lambda p: jax.tree.map(lambda x: jnp.clip(x, -1, 1), p)),
        ema,
    ),
    "two averages": lambda ema: with_average(
        with_average(jstep.skip_nonfinite(players()), ema), dataclasses.replace(ema, name=f"{ema.name}/all")
    ),
}


AROUND_GUARDS = ("guard inside", "guards of all parts", "compact inside", "projection", "two averages")
"""Averages that follow updates count those that a guard inside of them skips, as around `update_every`."""


def averages_by_hand(states: list[Any], ema: EMA, player: str, counts_skipped: bool = False) -> Any:
    """The averages after each update of PROGRAM, in float64."""
    found: list[Any] = []
    for i, update in enumerate(PROGRAM):
        is_made = player in update.leaves and (counts_skipped or not update.is_nan)
        found.append((int(states[i].global_step), float(states[i + 1].params[player])) if is_made else None)
    return equations.averages(ema, float(states[0].params[player]), found)


def run(optimizer: jstep.Optimizer, first: int = 0) -> list[Any]:
    def update(state: Any, one: Update) -> Any:
        def gradient(name: str) -> Any:
            return jnp.cos(3 * state.params[name] + 1) * (jnp.nan if one.is_nan else 1) if name in one.leaves else None

        grads = {name: gradient(name) for name in PLAYERS}
        return jstep.apply_gradients(state, grads, optimizer, increment_global_step=one.increment)

    apply = jax.jit(update, static_argnums=1)
    states = [jstep.TrainState.create({"d": 1.0, "dd": -1.0, "g": 2.0}, optimizer, first)]
    for one in PROGRAM:
        states.append(apply(states[-1], one))
    return states


@pytest.mark.thorough(except_for=["every-guard outside", "swa-guard inside"])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", AVERAGES)
def test_every_leaf_moves_once_in_each_update_that_counts(name: str, around: str) -> None:
    ema = AVERAGES[name]
    optimizer = AROUND[around](ema)
    states = run(optimizer, first=7 if name in ("num_updates", "every") else 0)
    slots = [slot for slot in states[0].slots if slot.rsplit("/", 1)[-1] in (ema.name, "all")]
    assert len(slots) == (2 if around == "two averages" else 1)
    for slot in slots:
        for player in PLAYERS:
            got = [float(state.slots[slot][player]) for state in states[1:]]
            want = averages_by_hand(states, ema, player, around in AROUND_GUARDS)
            # Before its first update, an average from zeros may have taken the value of its parameter.
            first = next(i for i, value in enumerate(want) if value)
            np.testing.assert_allclose(got[first:], want[first:], rtol=2e-5, atol=1e-6)
