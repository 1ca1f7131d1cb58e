"""The inner loop: run steps and keep track of the state."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jstep.loop.batch_feeder import Call
from jstep.loop.checks import check_result
from jstep.state import TrainState


@dataclasses.dataclass(slots=True)
class LoopState:
    """The current state of a run.

    Attributes:
        step: The step of the last complete state.
        state: That state.
        metrics: The metrics of the last step of the call that returned it; None before the first call.
        rows: The number of examples per step; None if not known.
    """

    step: int
    state: TrainState
    metrics: Any = None
    rows: int | None = None


def run_steps(
    step: Callable[..., Any],
    state: TrainState,
    source: Iterable[Call],
    start: int,
    stop: int,
    after: Callable[[int, LoopState], bool] | None = None,
    loop: LoopState | None = None,
    before: Callable[[LoopState], None] | None = None,
) -> LoopState:
    """Run steps up to `stop`, or until the source ends. It never waits for the device.

    `train`, `verify_resume` and `replay` all use it. To run from a state at step 3 to step 7, two steps per call:

        stages = stages_of(train_step)                           # jstep.loop.stages
        source = source_of(batches, 3, 7)                        # jstep.loop.sources
        boundaries = StageBoundaries(stages, source.next_change) # jstep.loop.stages
        programs = Programs(stages, 2)                           # jstep.loop.programs
        made = programs.calls(copied_batches(source), state, 3, boundaries.ends(3, 7))
        loop = run_steps(programs, state, made, 3, 7)
        loop.step, loop.state                                    # 7, or less if the batches ended

    Args:
        step: Runs the steps of a call, `step(state, call) -> (state, metrics)`: `Programs`.
        state: The initial state; it is donated to a compiled step.
        source: The calls, from `jstep.loop.batch_feeder.make_calls`.
        start: The step of the state.
        stop: The step at which to end.
        after: `after(first, loop)`, called after each call with the step before it; it may change `loop.state`. If it
            returns True, the loop ends.
        loop: A `LoopState` to update; it is up to date if a step or the source raises. Defaults to a new one.
        before: `before(loop)`, called before each call.

    Returns:
        The final `LoopState`.
    """
    if loop is None:
        loop = LoopState(start, state)
    size: Any = _UNKNOWN
    loop.step, loop.state = start, state
    for one in source:
        first = loop.step
        if before is not None:
            before(loop)
        result = step(loop.state, one)
        if first == start:
            check_result(result)
        if (own := _size_of(one)) != size:
            size, loop.rows = own, _rows(one)
        loop.state, loop.metrics = result
        loop.step = first + one.steps
        if (after is not None and after(first, loop)) or loop.step >= stop:
            break
    return loop


_UNKNOWN = object()


def _size_of(call: Call) -> Any:
    """The batch size of one leaf, a cheap check for changes: it runs at each call."""
    leaf = call.args[0] if call.args else None
    if type(leaf) is dict:
        leaf = next(iter(leaf.values()), None)
    shape = getattr(leaf, "shape", None)
    axis = call.looped is not None
    return None if shape is None else shape[axis : axis + 1]


def _rows(call: Call) -> int | None:
    """The size of the leading axis of all arguments of a step; None if the sizes differ or no argument has one."""
    axis = int(call.looped is not None)
    shapes = [getattr(leaf, "shape", None) for leaf in jax.tree.leaves(call.args)]
    sizes = {shape[axis] for shape in shapes if shape is not None and len(shape) > axis}
    return sizes.pop() if len(sizes) == 1 else None
