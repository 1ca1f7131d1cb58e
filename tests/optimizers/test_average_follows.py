"""Averages that follow the step: every leaf moves once in each update that advances the step and is not skipped."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import PARAMS, compile_step, for_each, gradients, make_optimizer
from optimizer_table import TABLE

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
    "plain": EMA(0.9, follows="step"),
    "rate": EMA(rate=jstep.linear(0.5, 0.1, steps=6), follows="step"),
    "num_updates": EMA(0.95, num_updates=True, follows="step"),
    "zero_debias": EMA(0.9, zero_debias=True, follows="step"),
    "every": EMA(0.5, start_step=2, every=2, follows="step"),
    "swa": EMA(1.0, zero_debias=True, every=2, follows="step"),
    "swa from a step": EMA(1.0, zero_debias=True, start_step=2, every=2, follows="step"),
}


def with_average(inner: jstep.Optimizer, ema: EMA) -> jstep.Optimizer:
    return jstep.with_moving_average(inner, ema)


AROUND: dict[str, Callable[[EMA], jstep.Optimizer]] = {
    "guard outside": lambda ema: jstep.skip_nonfinite(with_average(players(), ema)),
    "guard inside": lambda ema: with_average(jstep.skip_nonfinite(players()), ema),
    "guards of all parts": lambda ema: with_average(players(jstep.skip_nonfinite), ema),
    "loss scale outside": lambda ema: jstep.dynamic_loss_scale(with_average(players(), ema), 1.0),
    "loss scale inside": lambda ema: with_average(jstep.dynamic_loss_scale(players(), 1.0), ema),
    "chain": lambda ema: jstep.skip_nonfinite(
        jstep.chain(jstep.clip_gradients(by_global_norm=0.5), with_average(players(), ema))
    ),
    "scope": lambda ema: jstep.skip_nonfinite(jstep.scope("all", with_average(players(), ema))),
    "one label": lambda ema: jstep.skip_nonfinite(
        jstep.partition({"all": with_average(players(), ema)}, lambda path, leaf: "all")
    ),
    "masters": lambda ema: jstep.skip_nonfinite(jstep.master_weights(with_average(players(), ema))),
    "compact outside": lambda ema: jstep.skip_nonfinite(jstep.compact(with_average(players(), ema))),
    "compact inside": lambda ema: with_average(jstep.compact(jstep.skip_nonfinite(players())), ema),
    "projection": lambda ema: with_average(
        jstep.with_projection(jstep.skip_nonfinite(players()), lambda p: jax.tree.map(lambda x: jnp.clip(x, -1, 1), p)),
        ema,
    ),
    "two averages": lambda ema: with_average(
        with_average(jstep.skip_nonfinite(players()), ema), dataclasses.replace(ema, name=f"{ema.name}/all")
    ),
}


def averages_by_hand(states: list[Any], ema: EMA, player: str, moves: Callable[[int], bool] = lambda n: True) -> Any:
    """The averages after each update of PROGRAM, in float64."""
    found: list[Any] = []
    for i, update in enumerate(PROGRAM):
        is_made = update.increment and not update.is_nan and moves(i)
        found.append((int(states[i].global_step), float(states[i + 1].params[player])) if is_made else None)
    return equations.averages(ema, float(states[0].params[player]), found)


def run(optimizer: jstep.Optimizer, jit: bool = True) -> list[Any]:
    def update(state: Any, one: Update) -> Any:
        def gradient(name: str) -> Any:
            return jnp.cos(3 * state.params[name] + 1) * (jnp.nan if one.is_nan else 1) if name in one.leaves else None

        grads = {name: gradient(name) for name in PLAYERS}
        return jstep.apply_gradients(state, grads, optimizer, increment_global_step=one.increment)

    apply = jax.jit(update, static_argnums=1) if jit else update
    states = [jstep.TrainState.create({"d": 1.0, "dd": -1.0, "g": 2.0}, optimizer)]
    for one in PROGRAM:
        states.append(apply(states[-1], one))
    return states


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", AVERAGES)
def test_every_leaf_moves_once_in_each_update_that_advances_the_step(name: str, around: str) -> None:
    ema = AVERAGES[name]
    optimizer = AROUND[around](ema)
    states = run(optimizer)
    slots = [slot for slot in states[0].slots if slot.rsplit("/", 1)[-1] in (ema.name, "all")]
    assert len(slots) == (2 if around == "two averages" else 1)
    for slot in slots:
        for player in PLAYERS:
            got = [float(state.slots[slot][player]) for state in states[1:]]
            np.testing.assert_allclose(got, averages_by_hand(states, ema, player), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["plain", "zero_debias"])
def test_below_a_label_it_moves_in_the_updates_of_its_part(name: str) -> None:
    ema = AVERAGES[name]
    states = run(jstep.skip_nonfinite(players(lambda part: with_average(part, ema))), jit=False)
    for player in PLAYERS:
        want = averages_by_hand(states, ema, player, lambda i: player in PROGRAM[i].leaves)  # noqa: B023
        got = [float(state.slots[f"{player}/{ema.name}"][player]) for state in states[1:]]
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("accumulate", [False, True])
def test_every_few_steps(accumulate: bool) -> None:
    """Around `update_every` it follows every step, inside only the updates that are due."""
    ema = EMA(0.5, follows="step")
    outer = with_average(jstep.skip_nonfinite(jstep.update_every(2, players(), accumulate=accumulate)), ema)
    inner = jstep.skip_nonfinite(jstep.update_every(2, with_average(players(), ema), accumulate=accumulate))
    for optimizer, due in ((outer, lambda step: True), (inner, lambda step: step % 2 == 1)):
        states = run(optimizer, jit=False)
        for player in PLAYERS:
            want = averages_by_hand(states, ema, player, lambda i: due(int(states[i].global_step)))  # noqa: B023
            got = [float(state.slots[ema.name][player]) for state in states[1:]]
            np.testing.assert_allclose(got, want, rtol=1e-5)


@for_each(list(TABLE))
def test_with_every_optimizer(name: str) -> None:
    """The averages of leaves that lose their gradient still move; the optimizer is as without them."""
    ema = EMA(0.75, name="top", follows="step")
    plain, optimizer = make_optimizer(name), with_average(make_optimizer(name), ema)
    alone, state = jstep.TrainState.create(PARAMS, plain), jstep.TrainState.create(PARAMS, optimizer)
    step, step_alone = compile_step(optimizer), compile_step(plain)
    averages = jax.tree.map(lambda x: None if x is None else np.asarray(x, np.float64), state.slots[ema.name])
    for i in range(4):
        given = gradients(0.5 * state.slots.get("loss_scale", 1.0))
        leaves, treedef = jax.tree.flatten(given)
        given = treedef.unflatten([leaf if i < 2 or n == 0 else None for n, leaf in enumerate(leaves)])
        state, alone = step(state, given), step_alone(alone, given)
        averages = jax.tree.map(
            lambda avg, p: avg + 0.25 * (np.asarray(p, np.float64) - avg), averages, averaged(state, averages)
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), averages, state.slots[ema.name])
    jax.tree.map(np.testing.assert_array_equal, alone.params, state.params)


def averaged(state: Any, like: Any) -> Any:
    """The parameters that have an average."""
    treedef = jax.tree.structure(like)
    kept = jax.tree.leaves(like, is_leaf=lambda x: x is None)
    params = jax.tree.leaves(state.params)
    return treedef.unflatten([p for p, avg in zip(params, kept, strict=True) if avg is not None])
