"""The warning about a learning rate that is 0 in the last steps of a run."""

import logging
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import jstep

ENDS = jstep.linear(0.1, 0.0, steps=5)
WARNED: dict[str, Callable[[], Any]] = {
    "scheduled": lambda: jstep.adam(ENDS),
    "wrapped": lambda: jstep.skip_nonfinite(jstep.sgd(ENDS)),
    "Optax, whose last rate is -1.5e-9": lambda: jstep.sgd(optax.linear_schedule(0.1, 0.0, 5)),
}
NOT_WARNED: dict[str, Callable[[], Any]] = {
    "plain": lambda: jstep.sgd(0.0),
    "held": lambda: jstep.sgd(jstep.held("learning_rate", 0.0)),
    "one part learns": lambda: jstep.partition(
        {"a": jstep.sgd(ENDS), "b": jstep.sgd(0.1)}, lambda path, leaf: "a" if path == "w" else "b"
    ),
    "it ends with the run": lambda: jstep.sgd(jstep.linear(0.1, 0.0, steps=8)),
    "a warmup": lambda: jstep.sgd(jstep.linear(0.0, 0.1, steps=9)),
}


def warnings_of(caplog: Any, *optimizers: Any, **given: Any) -> int:
    caplog.clear()
    steps = [jstep.minimize(lambda params: (params["w"] + params["v"]) ** 2, optimizer) for optimizer in optimizers]
    state = jstep.TrainState.create({"w": jnp.zeros(()), "v": jnp.zeros(())}, optimizers[0])
    train_step = dict(zip((0, 4), steps, strict=False)) if len(steps) > 1 else steps[0]
    with caplog.at_level(logging.WARNING, "jstep"):
        jstep.train(train_step, state, lambda step: (), given.pop("last_step", 9), progress=False, **given)
    return sum("learning rate is 0 in the last steps" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("name", [*WARNED, *NOT_WARNED])
def test_a_rate_that_is_0_in_the_last_steps(name: str, caplog: Any) -> None:
    assert warnings_of(caplog, (WARNED | NOT_WARNED)[name]()) == (name in WARNED)


def test_only_the_last_stage_counts(caplog: Any) -> None:
    assert warnings_of(caplog, jstep.sgd(ENDS), jstep.sgd(0.1), steps_per_call=2) == 0
    assert warnings_of(caplog, jstep.sgd(0.1), jstep.sgd(ENDS), steps_per_call=2) == 1
