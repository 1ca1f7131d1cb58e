"""Stages, batch sizes and rows of each source over a run."""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from jstep.core.checks import shown
from jstep.data import Batches, BatchSequence
from jstep.data.definition import weights_of
from jstep.loop.sources import check_batches
from jstep.loop.stages import name_of_step, stages_of

T = TypeVar("T")


def stages(train_step: Any, start: int, last_step: int) -> dict[int, str]:
    """Return first step → name of the training step, for the stages between `start` and `last_step`."""
    return {
        stage.first: name_of_step(stage.value)
        for stage in stages_of(train_step).stages()
        if stage.first < last_step and (stage.stop is None or stage.stop > start)
    }


def data(batches: Any, start: int, last_step: int, steps: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return the fields of a `Plan` about the batches; empty if they are not made by jstep.

    Raises:
        ValueError: The batches end before the first step.
    """
    if batches is None:
        return {}
    check_batches(batches)
    if not isinstance(batches, BatchSequence):
        return {}
    stop = last_step if batches.is_endless else min(last_step, len(batches))
    if start >= stop:
        raise ValueError(f"batches={shown(batches)}: they end at step {stop}, before start={start}")
    size, rows = batches.batch_size, _by_source(batches, stop)
    total = {"rows": batches.num_rows} if isinstance(batches, Batches) else batches.num_rows  # type: ignore[attr-defined]
    at = [_by_source(batches, min(int(step), stop)) for step in steps]
    return {
        "batch_size": _between(size if isinstance(size, dict) else {0: size}, start, stop),
        "rows": rows,
        "passes": {name: count / total[name] for name, count in rows.items()},
        "_rows_at": {name: np.array([one[name] for one in at]) for name in rows},
        "_weights": _between(weights_of(batches), start, stop),
    }


def _between(stages: Mapping[int, T], start: int, stop: int) -> dict[int, T]:
    """The stages of some steps; the first of them may begin earlier."""
    in_force = max((first for first in stages if first <= start), default=0)
    return {first: value for first, value in stages.items() if in_force <= first < stop}


def _by_source(batches: Any, step: int) -> dict[str, int]:
    rows = batches.rows_before(step)
    return rows if isinstance(rows, dict) else {"rows": rows}
