"""The stages of a run: the training step of each range of steps, and the steps at which calls must end."""

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jstep.core.annotations import Tree
from jstep.core.checks import as_function
from jstep.core.meshes import mesh_of, using_mesh
from jstep.data.steps import Staircase, as_staircase
from jstep.hooks.hook import NEVER
from jstep.training.step import TrainStep, trace_program

TrainSteps = Staircase[Callable[..., Any]]

_MAX_CHANGES = 64
"""The maximum number of changes of batch shapes to compile ahead; later ones are compiled when they are due."""
_AHEAD = 8
"""The number of ends to compute ahead; more than the number of calls that a thread prefetches."""


class Segment(NamedTuple):
    """A range of steps that one program runs; `is_edge` if it begins a stage."""

    first: int
    stop: int
    stage: int
    is_edge: bool


def as_stages(train_step: object) -> TrainSteps:
    """Normalize one training step, or a mapping of stages, to a staircase."""
    form = "(state, *args) -> (state, metrics)"
    return as_staircase(train_step, "train_step", lambda value, name: as_function(value, name, form))


def name_of_step(step: object) -> str:
    """Return the name of a training step: that of its loss if it comes from `minimize`."""
    return str(getattr(step, "title", None) or getattr(step, "__name__", "train_step"))


def lanes_of(step: object) -> int | None:
    """Return the number of lanes of a training step, if it reports them."""
    lanes = getattr(step, "lanes", None)
    return lanes if isinstance(lanes, int) else None


@dataclasses.dataclass(eq=False)
class Stage:
    """A training step of a run, from `first` to before `stop`. `single` runs one step, compiled if loops are used."""

    step: Any
    name: str
    first: int
    single: Any
    stop: float = NEVER

    @property
    def is_compiled(self) -> bool:
        return hasattr(self.single, "lower")

    def trace(self, state: Tree, args: tuple[Any, ...]) -> Any:
        """Return the `jax.stages.Traced` of one step, which JAX caches; None if the step is not compiled."""
        if isinstance(self.single, TrainStep):
            return trace_program(self.single, state, args)
        if not hasattr(self.single, "trace"):
            return None
        with using_mesh(mesh_of((state, args))):
            return self.single.trace(state, *args)


def make_stages(stages: TrainSteps, *, compiled: bool) -> list[Stage]:
    return [
        Stage(
            step,
            name_of_step(step) if len(stages.values) > 1 else getattr(step, "__name__", "train_step"),
            first,
            step if hasattr(step, "lower") or not compiled else TrainStep(step, donate=False),
            NEVER if stop is None else stop,
        )
        for first, stop, step in stages.stages()
    ]


class StageBoundaries:
    """The steps at which calls must end because another program follows."""

    def __init__(self, stages: TrainSteps, next_change: Callable[[int], int | None]) -> None:
        self._stages, self._next_change = stages, next_change

    def after(self, step: int, last_step: int) -> int:
        ends = last_step, self._next_change(step), self._stages.edge_after(step)
        return min(end for end in ends if end is not None)

    def ends(self, start: int, last_step: int, due_after: Callable[[int], int] = lambda step: NEVER) -> Iterator[int]:
        """Yield the steps at which calls must end, in order, including the last one."""
        step = start
        while step < last_step:
            step = min(self.after(step, last_step), due_after(step))
            yield step

    def segments(self, start: int, last_step: int) -> Iterator[Segment]:
        """Yield the segments of a run, only the first ones of each stage."""
        for index, stage in enumerate(self._stages.stages()):
            first, end = max(start, stage.first), last_step if stage.stop is None else min(stage.stop, last_step)
            for _ in range(1 + _MAX_CHANGES):
                if first >= end:
                    break
                stop = self.after(first, end)
                yield Segment(first, stop, index, first == stage.first)
                first = stop


class EndsAhead(Iterator[int]):
    """The steps at which calls end, computed by the loop's thread for the thread that makes batches.

    They depend on the user's hooks, which must not be called from another thread. An error in a hook ends the run at
    the last known step.
    """

    def __init__(self, ends: Iterator[int]) -> None:
        self._ends, self._thread = ends, threading.get_ident()
        self._known: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
        self._is_over = False

    def extend(self) -> None:
        """Compute the next steps; must be called in the loop's thread after each call."""
        while self._known.qsize() < _AHEAD and not self._is_over:
            try:
                self._known.put(next(self._ends))
            except Exception as error:
                self._is_over = True
                self._known.put(error)

    def close(self) -> None:
        """End the steps, for a thread that waits for one."""
        self._known.put(StopIteration())

    def __next__(self) -> int:
        if self._known.empty() and threading.get_ident() == self._thread:
            self.extend()
        end = self._known.get()
        if isinstance(end, Exception):
            self._known.put(end)
            raise end
        return end
