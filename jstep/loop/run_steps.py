"""Running the steps of a call, and the state of a run that has no hooks."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax

from jstep.loop.batch_feeder import Call

RunCall = Callable[[Any, Call], Any]
"""`run_call(state, call) -> (state, metrics)`: `Programs`."""


class Loop(Protocol):
    """The current step and state: a `LoopState`, or the `Run` of `train`."""

    step: int
    state: Any
    metrics: Any
    rows: int | None
    shape: Any


@dataclasses.dataclass(slots=True)
class LoopState:
    """The current state of a run.

    Attributes:
        step: The step of the last complete state.
        state: That state.
        metrics: The metrics of the last step; None before the first call.
        rows: The number of examples per step; None if not known.
        shape: The shape of one leaf of the batch.
    """

    step: int
    state: Any
    metrics: Any = None
    rows: int | None = None
    shape: Any = None


def take_steps(loop: Loop, run_call: RunCall, call: Call) -> None:
    """Run the steps of a call. It never waits for the device.

    Args:
        loop: The current step and state; it is up to date if the call raises.
        run_call: Runs the steps.
        call: The batches, from `jstep.loop.batch_feeder.make_calls`.
    """
    result = run_call(loop.state, call)
    # The size of one leaf, a cheap check for changes: it runs at each call.
    leaf = call.args[0] if call.args else None
    if type(leaf) is dict:
        leaf = next(iter(leaf.values()), None)
    shape = getattr(leaf, "shape", None)
    if shape != loop.shape or loop.metrics is None:
        loop.shape, loop.rows = shape, _rows(call)
    loop.state, loop.metrics = result
    loop.step = call.first + call.steps


def run_steps(loop: LoopState, run_call: RunCall, calls: Iterable[Call], stop: int) -> None:
    """Run steps up to `stop`, or until the calls end: what `train` does without hooks, for `replay`, `verify_resume`.

    To run from a state at step 3 to step 7, two steps per call:

        stages = stages_of(train_step)                                 # jstep.loop.stages
        source = source_of(batches, 3, 7)                              # jstep.data.loaders
        ends = StageBoundaries(stages, source.next_change).ends(3, 7)
        programs = Programs(stages, 2, state=state)                    # jstep.loop.programs
        calls = programs.calls(copied_batches(source), 3, ends)        # jstep.loop.batch_feeder
        loop = LoopState(3, state)
        run_steps(loop, programs, calls, 7)
        loop.step, loop.state                                          # 7, or less if the batches ended

    Args:
        loop: The initial step and state, which is donated to a compiled step; kept up to date.
        run_call: Runs the steps of a call.
        calls: The calls.
        stop: The step at which to end.
    """
    for call in calls:
        take_steps(loop, run_call, call)
        if loop.step >= stop:
            break


def _rows(call: Call) -> int | None:
    """The size of the leading axis of all arguments of a step; None if the sizes differ or no argument has one."""
    axis = int(call.is_stacked)
    shapes = [getattr(leaf, "shape", None) for leaf in jax.tree.leaves(call.args)]
    sizes = {shape[axis] for shape in shapes if shape is not None and len(shape) > axis}
    return sizes.pop() if len(sizes) == 1 else None
