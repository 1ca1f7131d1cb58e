"""The functions of jstep between a user's call and the user's loss: what a reader of a traceback scrolls through."""

import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from loop_runs import train

import jstep

OPTIMIZER = jstep.adam(0.1)
BATCH = np.ones(3, np.float32)


def fresh() -> jstep.TrainState:
    return jstep.TrainState.create({"w": jnp.ones(3)}, OPTIMIZER)


def frames_of_jstep() -> list[str]:
    """The functions of jstep that the caller was called through, the innermost first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if "/jstep/" in frame.f_code.co_filename:
            found.append(f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return found


CALLS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "by hand": (lambda step: step(fresh(), BATCH), 10),
    "train": (lambda step: train(3, lambda n: BATCH, step=step, state=fresh()), 14),
    "K steps": (lambda step: train(3, lambda n: BATCH, step=step, state=fresh(), steps_per_call=2), 15),
}


@pytest.mark.parametrize("summaries", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_traceback_shows_few_functions_of_jstep(name: str, summaries: bool) -> None:
    seen: list[list[str]] = []

    def loss(params: Any, x: Any) -> Any:
        seen.append(frames_of_jstep())
        if summaries:
            jstep.summary.scalar("x", jnp.sum(x))
        return jnp.sum((params["w"] - x) ** 2)

    call, most = CALLS[name]
    call(jstep.minimize(loss, OPTIMIZER))
    assert seen
    for frames in seen:
        assert len(frames) <= most, frames
