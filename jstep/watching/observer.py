"""The interface of the observers of a run, which do nothing by default."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from jstep.core.trees import Tree
from jstep.loop.programs import Chunk
from jstep.state.train_state import TrainState

PAST: Final = "past"
START: Final = "start"
"""Keys of a checkpoint: in its `extra`, what a restart compares; in that, the number and `began` of its start."""


class Observer(contextlib.AbstractContextManager["Observer"]):
    """An observer of a run, made from its `RunContext`: a context manager that exits once the run has closed.

    Methods are roughly in the order of a run.
    """

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        return None

    def opened(self) -> None:
        """Called once the run may write to its directory, before the state is restored."""

    def progress_hook(self) -> Any:
        """Return a hook that replaces log lines, or None."""
        return None

    def before_begin(self) -> None:
        """Called once the run is open, and its state is restored."""

    def meter(self, state: TrainState, peak_flops: float | None, flops_per_step: float | None) -> Any:
        """Return a meter of the utilization, or None."""
        return None

    def idle(self) -> None:
        """Called if the run takes no step."""

    def compiling(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A context for the time in which the loop waits for a program."""
        return contextlib.nullcontext()

    def after_first(self, chunk: Chunk, state: Tree) -> None:
        """Called after the first call of each stage, with the state that it returned."""

    def flush(self) -> None:
        """Called in the background before each checkpoint appears: flush anything that must not be older."""

    def about_to_save(self, step: int) -> dict[str, Any]:
        """Called before a save that nothing prevents any more; return entries for the checkpoint's `extra`.

        An entry may be a function that returns it.
        """
        return {}

    def before_close(self) -> None:
        """Called when the run is over, while its last state and metrics still exist."""


Observers = tuple[Observer, ...]


@contextlib.contextmanager
def compiling_for(observers: Observers, name: str) -> Iterator[None]:
    with contextlib.ExitStack() as contexts:
        for observer in observers:
            contexts.enter_context(observer.compiling(name))
        yield
