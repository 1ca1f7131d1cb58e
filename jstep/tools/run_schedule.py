"""Stages, batch sizes and rows of each source over a run."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jstep.core.checks import shown
from jstep.data import Batches, BatchSequence
from jstep.data.definition import weights_of
from jstep.loop.sources import check_batches
from jstep.loop.stages import name_of_step, stages_of

T = TypeVar("T")


class Data(NamedTuple):
    """Known properties of the batches of a run.

    Attributes:
        batch_size: First step of each batch size → rows of a batch.
        weights: First step of each weights of a mixture → source → weight.
        rows: Source → rows read from it by the last step.
        passes: Source → passes over it by the last step.
        rows_at: Source → rows read before each of the evaluated steps.
    """

    batch_size: Mapping[int, int]
    weights: Mapping[int, Mapping[str, float]]
    rows: Mapping[str, int]
    passes: Mapping[str, float]
    rows_at: Mapping[str, np.ndarray[Any, Any]]


def stages(train_step: Any, start: int, last_step: int) -> dict[int, str]:
    """Return first step → name of the training step, for the stages between `start` and `last_step`."""
    return {
        stage.first: name_of_step(stage.value)
        for stage in stages_of(train_step).stages()
        if stage.first < last_step and (stage.stop is None or stage.stop > start)
    }


def data(batches: Any, start: int, last_step: int, steps: np.ndarray[Any, Any]) -> Data:
    """Return the known properties of the batches; empty if they are not made by jstep.

    Raises:
        ValueError: The batches end before the first step.
    """
    if batches is None:
        return Data({}, {}, {}, {}, {})
    check_batches(batches)
    if not isinstance(batches, BatchSequence):
        return Data({}, {}, {}, {}, {})
    stop = last_step if batches.is_endless else min(last_step, len(batches))
    if start >= stop:
        raise ValueError(f"batches={shown(batches)}: they end at step {stop}, before start={start}")
    given = batches.batch_size
    sizes = given if isinstance(given, dict) else {0: given}
    rows = _by_source(batches, stop)
    total = {"rows": batches.num_rows} if isinstance(batches, Batches) else batches.num_rows  # type: ignore[attr-defined]
    at = [_by_source(batches, min(int(step), stop)) for step in steps]
    return Data(
        _between(sizes, start, stop),
        _between(weights_of(batches), start, stop),
        rows,
        {name: count / total[name] for name, count in rows.items()},
        {name: np.array([one[name] for one in at]) for name in rows},
    )


def _between(stages: Mapping[int, T], start: int, stop: int) -> dict[int, T]:
    """The stages of some steps; the first of them may begin earlier."""
    in_force = max((first for first in stages if first <= start), default=0)
    return {first: value for first, value in stages.items() if in_force <= first < stop}


def _by_source(batches: Any, step: int) -> dict[str, int]:
    rows = batches.rows_before(step)
    return rows if isinstance(rows, dict) else {"rows": rows}
