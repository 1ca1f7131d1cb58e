"""The driver: step after step, and nothing else."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jstep.loop.checks import check_result
from jstep.loop.feed import Call
from jstep.state import TrainState


@dataclasses.dataclass(slots=True)
class At:
    """Where a run is.

    Attributes:
        step: The step of the last whole state.
        state: That state.
        metrics: Those of the call that made it. None before the first.
        rows: The number of examples of a step, where it is known.
        stacked: Whether the metrics are stacked, one for each step of the call.
    """

    step: int
    state: TrainState
    metrics: Any = None
    rows: int | None = None
    stacked: bool = False


def drive(
    step: Callable[..., Any],
    state: TrainState,
    source: Iterable[Call],
    start: int,
    stop: int,
    after: Callable[[int, At], bool] | None = None,
    at: At | None = None,
    before: Callable[[At], None] | None = None,
) -> At:
    """Takes steps up to `stop`, or until the source ends; nothing in it waits for the device.

    `train`, `verify_resume` and `replay` all drive so. To go from a state at step 3 to step 7, two steps a call:

        stages = stages_of(train_step)                           # jstep.loop.stages
        source = source_of(batches, 3, 7)                        # jstep.loop.sources
        edges = Edges(stages, source.next_change)                # jstep.loop.stages
        steps = lengths(3, 7, 2, lambda n: edges.after(n, 7))
        made = calls(owned(source), 3, steps)                           # jstep.loop.feed; None for one step a call
        at = drive(Programs(stages), state, made, 3, 7)          # jstep.loop.programs
        at.step, at.state                                        # 7, or less if the batches ended

    Args:
        step: What takes the steps of a call, `step(state, call) -> (state, metrics)`: `Programs`.
        state: The state to start from; a compiled step takes over its memory.
        source: The calls, as `jstep.loop.feed.calls` makes them of batches.
        start: The step of the state.
        stop: Where to end.
        after: `after(first, at)`, called after each call with the step before it; it may change `at.state`. True ends
            the drive.
        at: Where to keep track; one's own is up to date where a step or the source raises.
        before: `before(at)`, called before each call.

    Returns:
        Where it ended.
    """
    if at is None:
        at = At(start, state)
    size: Any = _UNKNOWN
    at.step, at.state = start, state
    for one in source:
        first = at.step
        if before is not None:
            before(at)
        result = step(at.state, one)
        if first == start:
            check_result(result)
        if (own := _size_of(one)) != size:
            size, at.rows = own, _rows(one)
        at.state, at.metrics = result
        at.stacked = one.stacked
        at.step = first + one.steps
        if (after is not None and after(first, at)) or at.step >= stop:
            break
    return at


_UNKNOWN = object()


def _size_of(call: Call) -> Any:
    """What tells batches of different sizes apart, of one leaf alone: it is asked at each call."""
    leaf = call.args[0] if call.args else None
    if type(leaf) is dict:
        leaf = next(iter(leaf.values()), None)
    shape = getattr(leaf, "shape", None)
    return None if shape is None else shape[call.stacked : call.stacked + 1]


def _rows(call: Call) -> int | None:
    """The size of the leading axis of all arguments of a step; None where they differ, or have none."""
    axis = 1 if call.stacked else 0
    shapes = [getattr(leaf, "shape", None) for leaf in jax.tree.leaves(call.args)]
    sizes = {shape[axis] for shape in shapes if shape is not None and len(shape) > axis}
    return sizes.pop() if len(sizes) == 1 else None
