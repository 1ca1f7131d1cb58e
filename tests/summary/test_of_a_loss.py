"""Summaries that a loss makes, returns, or both: each is in the step's metrics once."""

from typing import Any

import jax
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
def test_made_and_returned_ones_are_one(microbatches: int, both: bool) -> None:
    def loss_fn(params: Any, x: Any) -> Any:
        loss = jnp.mean((params["w"] - x.mean()) ** 2)
        made = summary.scalar("made", loss)
        returned = summary.scalar("returned", 2 * loss)
        whole = summary.merge([made, returned] if both else [returned])
        return loss, {"summaries": whole, "other": loss}

    _, metrics = _step(loss_fn, num_microbatches=microbatches)(_state(), jnp.ones((2, 3)))
    assert _tags(metrics) == ["made", "returned"]
    assert metrics["other"] == metrics["loss"]


def test_several_at_a_call_are_written_once(tmp_path: Any) -> None:
    def loss_fn(params: Any, x: Any) -> Any:
        loss = jnp.mean((params["w"] - x.mean()) ** 2)
        summary.scalar("made", loss)
        return loss, {"summaries": summary.merge([summary.scalar("returned", loss)])}

    step = _step(loss_fn)
    jstep.train(
        step,
        _state(),
        lambda n: jnp.float32(n),
        4,
        logdir=tmp_path,
        save_summaries_steps=1,
        steps_per_call=2,
        progress=False,
    )
    seen: dict[str, list[int]] = {"made": [], "returned": []}
    for path in tmp_path.glob("*tfevents*"):
        for event in summary.summary_iterator(path):
            for value in event.summary.value:
                if value.tag in seen:
                    seen[value.tag].append(event.step)
    assert seen == {"made": [1, 2, 3, 4], "returned": [1, 2, 3, 4]}


def test_under_a_scan_of_ones_own() -> None:
    def loss_fn(params: Any, x: Any) -> Any:
        loss = jnp.mean((params["w"] - x.mean()) ** 2)
        summary.scalar("made", loss)
        return loss, {"summaries": summary.scalar("returned", loss)}

    _, metrics = jax.jit(jstep.scan_steps(_step(loss_fn, jit=False)))(_state(), jnp.ones((3, 2, 3)))
    assert _tags(metrics) == ["made", "returned"]


def test_what_is_no_summary_still_collides() -> None:
    def loss_fn(params: Any, x: Any) -> Any:
        loss = jnp.mean((params["w"] - x.mean()) ** 2)
        summary.scalar("made", loss)
        return loss, {"summaries": loss}

    with pytest.raises(ValueError, match="both have 'summaries'"):
        _step(loss_fn)(_state(), jnp.ones(3))
