"""Summaries that a loss records, returns, or both: each is in the metrics of the step once."""

from typing import Any

import jax.numpy as jnp
import pytest

import jstep
from jstep import summary

OPTIMIZER = jstep.gradient_descent(0.1)


def _step(loss_fn: Any, **options: Any) -> Any:
    return jstep.minimize(loss_fn, OPTIMIZER, has_aux=True, **options)


def _state() -> Any:
    return jstep.TrainState.create({"w": jnp.ones(3)}, OPTIMIZER)


def _tags(metrics: Any) -> list[str]:
    return sorted(metrics["summaries"].tags)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("both", [False, True])
def test_recorded_and_returned_summaries_are_merged(microbatches: int, both: bool) -> None:
    def loss_fn(params: Any, x: Any) -> Any:
        loss = jnp.mean((params["w"] - x.mean()) ** 2)
        recorded = summary.scalar("recorded", loss)
        returned = summary.scalar("returned", 2 * loss)
        merged = summary.merge([recorded, returned] if both else [returned])
        return loss, {"summaries": merged, "other": loss}

    _, metrics = _step(loss_fn, num_microbatches=microbatches)(_state(), jnp.ones((2, 3)))
    assert _tags(metrics) == ["recorded", "returned"]
    assert metrics["other"] == metrics["loss"]


def test_error_if_summaries_is_not_a_summary() -> None:
    def loss_fn(params: Any, x: Any) -> Any:
        loss = jnp.mean((params["w"] - x.mean()) ** 2)
        summary.scalar("recorded", loss)
        return loss, {"summaries": loss}

    with pytest.raises(ValueError, match="both have 'summaries'"):
        _step(loss_fn)(_state(), jnp.ones(3))
