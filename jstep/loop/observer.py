"""The interface between a run and the rooms attached to it: the moments of an `Observer`.

The kernel (CONTRIBUTING, Layout) imports none of these rooms. `running/attached.py` finds their
observers. `Hook` and `RunHook` are the other interface: hooks belong to the run and may change it,
observers do not.

| moment | when, and where | returns | an error |
|---|---|---|---|
| `check` | `Run(…)` is made; nothing is open | the options as it uses them | `Run(…)` raises it |
| made, entered | the block is entered; nothing is open | | ends the start |
| `find_lineage` | a checkpoint is found, perhaps not read | the lineage | ends the start |
| `on_open` | the run may write; its checkpoint may be unread | the start number | of one ends all |
| `make_hooks` | the state is restored, the hooks have not begun | hooks to add | of one ends all |
| `on_restored` | the hooks have the run, and have not begun | | ends the start |
| `on_no_steps` | instead of the loop, if there is no step to take | | ends the run |
| `compiling` | around each wait for a program | a context | ends the run |
| `on_first_call` | after the first call of each stage | | ends the run, within the iteration |
| `on_replaced` | code of the user has replaced the state | | ends the run, within the iteration |
| `on_save` | a save that nothing prevents begins | `extra` entries | no checkpoint; ends the run |
| `flush` | in the background before the checkpoint appears | | no checkpoint: a `CheckpointError` |
| `on_close` | the run is over; its last state still exists | | ends the run |
| exited | the run has closed; in reverse order | | is raised last; all is saved |

All but `flush` are called in the loop's thread, in the order of `OBSERVERS`. An exception is
`on_save`, if the thread that watches for stalls saves the state of a run that hangs. `find_lineage`
is called on each process.
"""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from jstep.compiling.chunks import Chunk
from jstep.core.trees import Tree
from jstep.hooks.origin import Lineage, Origin
from jstep.origin.arguments import Options


class Observer(contextlib.AbstractContextManager["Observer"]):
    """An observer of a run, made from its `RunContext`.

    It is a context manager that exits once the run has closed. A thread that an observer starts may
    read the run at any time, and must change nothing. The attributes of `course` and of the feeder
    are replaced, not changed in place, so that each read gives a whole value. Two reads may be of
    different steps: take a step and its state from one `position`. `components` are there once
    `is_open`, and the state is None after `on_close`.
    """

    options: ClassVar[frozenset[str]] = frozenset()
    """The options of `Run` that it uses and the kernel does not; an option that nobody uses is an
    error."""

    def __init__(self, run: Any) -> None:
        """Create the observer of a `RunContext`, when the block is entered."""

    @classmethod
    def check(cls, options: Options) -> Options:
        """Check the options that only this observer uses; return them as a run uses them."""
        return options

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        return None

    def find_lineage(self, origin: Origin) -> Lineage:
        """Return where the run comes from, if more is known than its checkpoint records."""
        return origin.lineage

    def on_open(self, origin: Origin) -> int | None:
        """Called once the run may write to its directory, before the run has its state.

        Returns:
            The number of the start, if it is recorded; all processes get it.
        """
        return None

    def make_hooks(self, hooks: Sequence[Any]) -> Sequence[Any]:
        """Return hooks to call after `hooks`; push on `closing` what closes their files."""
        return ()

    def on_restored(self, start_number: int) -> None:
        """Called once the run is open, and its state is restored.

        Args:
            start_number: The number that `on_open` returned on process 0; 0 if nothing records the
                start.
        """

    def on_no_steps(self) -> None:
        """Called if the run takes no step."""

    def compiling(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A context for the time in which the loop waits for a program."""
        return contextlib.nullcontext()

    def on_first_call(self, chunk: Chunk, state: Tree) -> None:
        """Called after the first call of each stage, with the state that it returned."""

    def on_replaced(self, step: int, author: str, old_state: Tree, new_state: Tree) -> None:
        """Called when the body or a hook has replaced the state."""

    def flush(self) -> None:
        """Flush anything that must not be older than a checkpoint.

        Called in the background before each checkpoint appears.
        """

    def on_save(self, step: int) -> dict[str, Any]:
        """Return entries for a checkpoint's `extra`; an entry may be a function that returns it.

        Called before a save, once nothing prevents it any more.
        """
        return {}

    def on_close(self) -> None:
        """Called when the run is over, while its last state and metrics still exist."""


def observers_that_define(moment: str, observers: Iterable[Observer]) -> list[Observer]:
    """Return the observers that have something to do at a moment."""
    return [
        observer
        for observer in observers
        if getattr(type(observer), moment) is not getattr(Observer, moment)
    ]
