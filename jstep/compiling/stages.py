"""The stages of a run: its train steps, and the steps at which each of them begins and stops."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jstep.core.checks import as_function
from jstep.core.logs import logger
from jstep.core.meshes import mesh_of, using_mesh
from jstep.core.trees import Tree
from jstep.data.steps import Staircase, as_staircase
from jstep.hooks.cadence import NEVER
from jstep.training.step import TrainStep, trace_program
from jstep.training.watched_updates import remember_updates, watch_updates

TrainSteps = Staircase[Callable[..., Any]]


def as_stages(train_step: object) -> TrainSteps:
    def as_step(value: object, name: str) -> Callable[..., Any]:
        return as_function(value, name, "(state, *args) -> (state, metrics)")

    return as_staircase(train_step, "train_step", as_step)


def name_of_step(step: object) -> str:
    return str(getattr(step, "title", None) or getattr(step, "__name__", "train_step"))


def lanes_of(step: object) -> int | None:
    """Return the number of members of the population that a step trains; None if it trains none."""
    lanes = getattr(step, "lanes", None)
    return lanes if isinstance(lanes, int) else None


@dataclasses.dataclass(eq=False)
class Stage:
    """A train step of a run.

    Attributes:
        step: The train step as it was given.
        first: The step of the run at which the stage begins.
        single_step: A function of one step; it is compiled if the run loops over steps, even if
            `step` is not.
        stop: The step at which the next stage begins; `NEVER` if there is none.
        is_begun: Whether it was called.
        is_compiled_ahead: Whether its first program was compiled before it was due.
        is_slow: Whether XLA runs it much slower in a loop.
    """

    step: Any
    name: str
    first: int
    single_step: Any
    stop: float = NEVER
    is_begun: bool = False
    is_compiled_ahead: bool = False
    is_slow: bool = False

    def begin(self) -> bool:
        """Note that the stage was called; return whether this was its first call."""
        is_first = not self.is_begun
        self.is_begun = True
        return is_first

    def mark_slow(self) -> None:
        if not self.is_slow:
            logger.info(
                "%s runs one step per call: XLA runs convolutions on a CPU much slower in a loop",
                self.name,
            )
        self.is_slow = True

    @property
    def is_compilable(self) -> bool:
        return hasattr(self.single_step, "lower")

    def trace(self, state: Tree, args: tuple[Any, ...]) -> Any:
        """The `jax.stages.Traced` of one step; None if the step is not compiled."""
        if isinstance(self.single_step, TrainStep):
            return trace_program(self.single_step, state, args)
        if not hasattr(self.single_step, "trace"):
            return None
        with using_mesh(mesh_of((state, args))), self.watching():
            return self.single_step.trace(state, *args)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A context that records what the step trains, if it is traced there."""
        with watch_updates() as found:
            yield
        remember_updates(self.step, found)
        if isinstance(self.step, TrainStep):
            # The loop over steps of another run traces the function again, but not what it calls
            # and the user compiles.
            remember_updates(self.step.__wrapped__, found)
