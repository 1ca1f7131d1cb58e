"""Save checkpoints."""

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from jstep.checkpoint import Saver
from jstep.core.checks import as_function, kind
from jstep.core.contexts import internal_transfers
from jstep.hooks.cadence import CadencedHook, cadence
from jstep.hooks.hook import Clock, Metrics, check_step
from jstep.state import TrainState


class CheckpointSaverHook(CadencedHook):
    """Saves every so many seconds or steps, and at the end.

    Args:
        saver: A `Saver`, or the directory of one.
        save_secs: How often, in seconds of the host's clock.
        save_steps: How often, in steps: at their multiples.
        extra: A function of no arguments whose result, JSON-able, is kept with each checkpoint, such as the position
            of a loader.
        before_save: `before_save(step)` for each, called before every save; one that raises, or returns a true
            result, prevents it.
        clock: Seconds; for tests.

    Attributes:
        prefix: Of the checkpoints' names.


    Source: `tf.train.CheckpointSaverHook`; it does not save at the first step.
    """

    def __init__(
        self,
        saver: Saver | str | os.PathLike[str],
        *,
        save_secs: float | None = None,
        save_steps: int | None = None,
        extra: Callable[[], Any] | None = None,
        before_save: tuple[Callable[[int], bool | None], ...] = (),
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(
            cadence(steps=("save_steps", save_steps), secs=("save_secs", save_secs), clock=clock, at_least_one=False),
            together=True,
        )
        self._extra = as_function(extra, "extra", "() -> values", optional=True)
        self._before_save = _functions(before_save)
        self._directory = None if isinstance(saver, Saver) else saver
        self._saver: Saver | None = saver if isinstance(saver, Saver) else Saver(saver)
        self.prefix = self._saver.prefix
        self._saved: tuple[int, Callable[[], TrainState | None]] | None = None

    def begin(self, state: TrainState) -> None:
        """Seconds count from here."""
        super().begin(state)
        self._saved = None

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Saves when due."""
        if self.is_due(step):
            self.save(step, state)

    def end(self, step: int, state: TrainState) -> None:
        """Saves the last state, and waits for it to be on disk."""
        self.save(step, state, wait=True)

    def close(self) -> None:
        """Waits for what is being written, and closes a Saver of its own."""
        super().close()
        if self._directory is not None and self._saver is not None:
            saver, self._saver = self._saver, None
            saver.close()

    def is_saved(self, step: int, state: TrainState) -> None:
        """Says that there is a checkpoint of this step that holds this state: the one that was restored."""
        self._saved = step, _weakly(state)

    def has_saved(self, step: int, state: TrainState) -> bool:
        """Whether there is a checkpoint of this step already, and no hook has changed the state since."""
        return self._saved is not None and self._saved[0] == step and self._saved[1]() is state

    def save(self, step: int, state: TrainState, *, wait: bool = False) -> bool:
        """Saves, unless this state is saved already.

        Args:
            step: The step that the loop is at.
            state: The state after it.
            wait: Whether to return when it is on disk.

        Returns:
            Whether there is a checkpoint of this step: False where one of `before_save` prevented it.

        Raises:
            CheckpointError: It could not be written.
            ValueError: The state is at another step.
        """
        if not self.has_saved(step, state):
            prevented = [bool(check(step)) for check in self._before_save]  # each of them is asked
            if any(prevented):
                return False
            check_step(step, state)
            if self._saver is None:  # it was closed with the run before
                self._saver = Saver(self._directory or "")
            extra = self._extra() if self._extra else None
            with internal_transfers():
                self._saver.save(state, extra=extra)
            self.is_saved(step, state)
            self.has_happened()
        if wait and self._saver is not None:
            self._saver.wait()
        return True


def _weakly(state: Any) -> Callable[[], Any]:
    """The state, which is not kept alive, where that can be had."""
    try:
        return weakref.ref(state)
    except TypeError:  # a NamedTuple with a global step
        return lambda: state


def _functions(before_save: Any) -> tuple[Any, ...]:
    if callable(before_save) or not isinstance(before_save, tuple | list):
        raise TypeError(f"before_save: must be a tuple of functions of the step, got {kind(before_save)}")
    return tuple(as_function(check, f"before_save[{i}]", "of the step") for i, check in enumerate(before_save))
