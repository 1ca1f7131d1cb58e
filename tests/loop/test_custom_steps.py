"""Custom steps: each is recorded, and resumes bitwise."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import same

import jstep
from jstep.record.starts import load_setup, read_starts
from jstep.watching import start_setup

PARAMS = {"w": np.full((8, 8), 0.125, np.float32), "v": np.full((8, 1), 0.125, np.float32)}
ROWS = np.random.default_rng(0).normal(size=(8, 4, 8)).astype(np.float32)


class Parts:
    """What a custom step is made of, for a learning rate and an exponent of the loss."""

    def __init__(self, rate, power):
        self.adam, self.power = jstep.adam(rate), power
        self.players = jstep.partition(
            {"w": jstep.adam(rate), "v": jstep.adam(rate)}, lambda path, leaf: path
        )
        self.teacher = jstep.with_moving_average(self.adam, jstep.ExponentialMovingAverage(0.9))

    def loss(self, params, x):
        return jnp.mean(jnp.abs(x @ params["w"] @ params["v"] - 1.0) ** self.power)

    def step(self, loss=None, optimizer=None, **options):
        return jstep.minimize(loss or self.loss, optimizer or self.adam, jit=False, **options)

    def inner(self, state, x):
        return self.step(increment_global_step=False)(state, x)

    def apply(self, state, gradients, **options):
        return jstep.apply_gradients(state, gradients, self.adam, **options)


def two_updates(parts, state, x):
    for rows in (slice(0, 2), slice(2, 4)):
        loss, gradients = jstep.compute_gradients(parts.loss)(state.params, x[rows])
        state = parts.apply(state, gradients, increment_global_step=False)
    return jstep.increment_global_step(state), {"loss": loss}


def gan(parts, state, x):
    step = parts.step(optimizer=parts.players, var_list="w", increment_global_step=False)
    state, first = step(state, x)
    state, second = parts.step(optimizer=parts.players, var_list="v")(state, x)
    return state, {"first": first["loss"], "second": second["loss"]}


def loop(parts, state, x):
    state, metrics = jax.lax.scan(parts.inner, state, jnp.stack([x, x]))
    return jstep.increment_global_step(state), {"loss": metrics["loss"].mean()}


def loop_and_update(parts, state, x):
    state, _ = jax.lax.scan(parts.inner, state, jnp.stack([x, x]))
    return parts.step()(state, x)


def branch(parts, state, x):
    state, metrics = parts.inner(state, x)
    is_due = state.global_step % 2 == 0
    state = jax.lax.cond(is_due, lambda state: parts.inner(state, x)[0], lambda state: state, state)
    return jstep.increment_global_step(state), {"loss": metrics["loss"]}


def loss_afterwards(parts, state, x):
    state, _ = parts.step()(state, x)
    return state, {"loss": parts.loss(state.params, x)}


def average_by_hand(parts, state, x):
    state, metrics = parts.step()(state, x)
    average = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state.model_state, state.params)
    return state.replace(model_state=average), {"loss": metrics["loss"]}


def update_in_the_loss(parts, state, x):
    def loss(params, x):
        inner = jstep.TrainState.create(params, parts.adam)
        return parts.loss(parts.apply(inner, jax.grad(parts.loss)(params, x)).params, x)

    return parts.step(loss)(state, x)


def per_example(parts, state, x):
    gradients = jax.vmap(jax.grad(parts.loss), (None, 0))(state.params, x[:, None])
    state = parts.apply(state, jax.tree.map(lambda g: g.mean(0), gradients))
    return state, {"loss": parts.loss(state.params, x)}


def teacher(parts, state, x):
    def loss(params, x, averages):
        return parts.loss(params, x) + jnp.mean((x @ (params["w"] - averages["w"])) ** 2)

    return parts.step(loss, parts.teacher, use_averages=True)(state, x)


def statistics_of_a_skipped_step(parts, state, x):
    def loss(params, mean, x):
        return parts.loss(params, x), jax.tree.map(lambda leaf: 0.9 * leaf, mean)

    return parts.step(loss, jstep.skip_nonfinite(parts.adam), has_model_state=True)(state, x)


def by_hand(parts, state, x):
    state, metrics = parts.step()(state, x)
    return jstep.TrainState(state.params, state.slots, state.global_step), metrics


TOLD_APART = {teacher, by_hand}
"""Steps of which nothing but the update uses the results of the update. With a guard,
`restore_guards` reads the slots that it returns."""
KINDS = [
    two_updates, gan, loop, loop_and_update, branch, loss_afterwards, average_by_hand,
    update_in_the_loss, per_example, statistics_of_a_skipped_step, *TOLD_APART,
]  # fmt: skip
OPTIMIZERS = {gan: "players", teacher: "teacher"}


def run(kind, where, last_step, *, rate=1e-3, power=2.0, wrapped=jstep.TrainStep, **options):
    parts = Parts(rate, power)
    optimizer = getattr(parts, OPTIMIZERS.get(kind, "adam"))
    if kind is statistics_of_a_skipped_step:
        optimizer = jstep.skip_nonfinite(optimizer)
    state = jstep.TrainState.create(PARAMS, optimizer, model_state=PARAMS)
    step = wrapped(lambda state, x: kind(parts, state, x))
    return jstep.train(
        step,
        state,
        lambda n: ROWS[n],
        last_step,
        checkpoint_dir=where,
        progress=False,
        log_steps=None,
        **options,
    )


@pytest.mark.thorough(except_for=["two_updates", "branch", "teacher"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_custom_step_is_recorded_and_resumes(kind, tmp_path, caplog):
    """A restart with another rate or another loss says so."""
    run(kind, tmp_path / "same", 2)
    resumed = run(kind, tmp_path / "same", 4)
    assert same(resumed, run(kind, tmp_path / "whole", 4))
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ] == []
    start = read_starts(tmp_path / "same")["model"][-1]
    (program,) = load_setup(tmp_path / "same", start)["setup"]["programs"]
    assert program["hash"]
    assert ({"gradients", "update"} <= program.keys()) == (kind in TOLD_APART)
    for change in ({"rate": 3e-3}, {"power": 4.0}):
        caplog.clear()
        name = next(iter(change))
        run(kind, tmp_path / name, 2)
        run(kind, tmp_path / name, 4, **change)
        (warning,) = [
            record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
        ]
        assert "the traced step differs (" in warning


def test_an_entry_that_fails_costs_no_other_entry_of_the_card(tmp_path, monkeypatch, caplog):
    def failing(program):
        raise KeyError(program)

    monkeypatch.setattr(start_setup, "program_hash", failing)
    run(teacher, tmp_path, 2)
    found = load_setup(tmp_path, read_starts(tmp_path)["model"][-1])["setup"]
    assert found["programs"][0]["hash"] is None
    assert found["programs"][0]["hyperparameters"]["learning_rate"] == pytest.approx(1e-3)
    assert found["state"]["leaves"] > 0
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ] == []
