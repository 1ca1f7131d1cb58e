"""The stages of a run: which training step runs when, and where calls must end."""

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
from jstep.training.step import TrainStep, trace_of

TrainSteps = Staircase[Callable[..., Any]]

_MOST_CHANGES = 64
"""The maximum number of changes of batch shapes to compile ahead; later ones are compiled when they are due."""
_AHEAD = 8
"""The number of ends of calls that are known ahead; more than the calls that a thread prefetches."""


class Segment(NamedTuple):
    """A range of steps that one program runs: one training step, batches of the same shapes.

    Attributes:
        first: The first step.
        stop: The step after the last.
        stage: The index of the stage.
        is_edge: Whether a stage begins with it.
    """

    first: int
    stop: int
    stage: int
    is_edge: bool


def stages_of(train_step: object) -> TrainSteps:
    """Normalize one training step, or a mapping of stages, to a staircase.

    Raises:
        TypeError: A training step is not a function, or a key is not an integer.
        ValueError: The mapping is empty, or its keys lack 0 or include a negative step.
    """
    form = "(state, *args) -> (state, metrics)"
    return as_staircase(train_step, "train_step", lambda value, name: as_function(value, name, form))


def name_of_step(step: object) -> str:
    """The name of a training step among several: that of its loss if it comes from `minimize`."""
    return str(getattr(step, "title", None) or getattr(step, "__name__", "train_step"))


def lanes_of(step: object) -> int | None:
    """The number of lanes of a training step; None if it computes in none, or is a function that does not say so."""
    found = getattr(step, "lanes", None)
    return found if isinstance(found, int) else None


@dataclasses.dataclass(eq=False)
class Stage:
    """A training step of a run, from one step on.

    Attributes:
        step: The training step, as given.
        name: Its name, for logs.
        first: The first step of the stage.
        single: What runs one step: the training step, compiled if calls of several steps are.
    """

    step: Any
    name: str
    first: int
    single: Any

    @property
    def is_compiled(self) -> bool:
        """Whether it is compiled, so that it receives JAX arrays whatever it is called with."""
        return hasattr(self.single, "lower")

    def trace(self, state: Tree, args: tuple[Any, ...]) -> Any:
        """The trace of one step, for arrays or shapes. JAX caches it, so a call and its trace share the work.

        Args:
            state: The state.
            args: The other arguments of the step.

        Returns:
            A `jax.stages.Traced`; None for a step that is not compiled, which cannot be traced.
        """
        if isinstance(self.single, TrainStep):
            return trace_of(self.single, state, args)
        if not hasattr(self.single, "trace"):
            return None
        with using_mesh(mesh_of((state, args))):
            return self.single.trace(state, *args)


def made_stages(stages: TrainSteps, *, compiled: bool) -> list[Stage]:
    """The stages of a run.

    Args:
        stages: The training steps.
        compiled: Whether a training step that is not compiled is.
    """
    return [
        Stage(
            step,
            name_of_step(step) if len(stages.values) > 1 else getattr(step, "__name__", "train_step"),
            first,
            step if hasattr(step, "lower") or not compiled else TrainStep(step, donate=False),
        )
        for step, first in zip(stages.values, stages.firsts, strict=True)
    ]


class StageBoundaries:
    """The steps at which calls must end because another program follows.

    Args:
        stages: The training steps.
        next_change: Maps a step to the next one at which the shapes of the batches change, or to None.
    """

    def __init__(self, stages: TrainSteps, next_change: Callable[[int], int | None]) -> None:
        self._stages, self._next_change = stages, next_change

    def after(self, step: int, last_step: int) -> int:
        """The first such step after `step`, at most `last_step`."""
        ends = last_step, self._next_change(step), self._stages.edge_after(step)
        return min(end for end in ends if end is not None)

    def ends(self, start: int, last_step: int, due_after: Callable[[int], int] = lambda step: NEVER) -> Iterator[int]:
        """Yield the steps at which calls must end, in order, the last one included.

        Args:
            start: The first step.
            last_step: The step at which the run ends.
            due_after: Maps a step to the next one at which a hook is due.
        """
        step = start
        while step < last_step:
            step = min(self.after(step, last_step), due_after(step))
            yield step

    def segments(self, start: int, last_step: int) -> Iterator[Segment]:
        """Yield the segments of a run in order; of each stage only the first ones, but of all stages."""
        for index, stage in enumerate(self._stages.stages()):
            first, end = max(start, stage.first), last_step if stage.stop is None else min(stage.stop, last_step)
            for _ in range(1 + _MOST_CHANGES):
                if first >= end:
                    break
                stop = self.after(first, end)
                yield Segment(first, stop, index, first == stage.first)
                first = stop


class EndsAhead(Iterator[int]):
    """The steps at which calls end, computed in the thread of the loop and read in the thread that makes the batches.

    They depend on the user's hooks, which must not be called from another thread. An error in one of them ends the run
    at the last step that is known, however far ahead that was found.

    Args:
        ends: The steps, from `StageBoundaries.ends`.
    """

    def __init__(self, ends: Iterator[int]) -> None:
        self._ends, self._thread = ends, threading.get_ident()
        self._known: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
        self._is_over = False

    def extend(self) -> None:
        """Compute the next steps; must be called in the thread of the loop after each call."""
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
