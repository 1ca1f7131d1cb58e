"""Save checkpoints periodically."""

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from jstep.checkpoint.saver import Saver
from jstep.core.checks import as_function, kind
from jstep.core.meshes import internal_transfers
from jstep.hooks.cadence import cadence_or_never
from jstep.hooks.hook import Clock, Metrics, check_step
from jstep.hooks.run_hook import RunHook
from jstep.state.train_state import TrainState


class CheckpointSaverHook(RunHook):
    """A hook that saves checkpoints at intervals of seconds or steps, and at the end.

    Args:
        saver: A `Saver`, or a directory.
        save_secs: Interval in seconds of the host's clock.
        save_steps: Interval in steps; due at its multiples.
        extra: A function of no arguments whose JSON-serializable result is saved with each checkpoint, such as the
            position of a loader.
        before_save: Functions of the step, called before every save. One that raises or returns True prevents the
            save.
        clock: Returns seconds; replaced in tests.

    Attributes:
        prefix: The prefix of the checkpoints' names.

    Source: `tf.train.CheckpointSaverHook`, which also saves at the first step.
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
        self.cadence = cadence_or_never(
            steps=("save_steps", save_steps), secs=("save_secs", save_secs), clock=clock, together=True
        )
        self._extra = as_function(extra, "extra", "() -> values", optional=True)
        self._before_save = _functions(before_save)
        self._directory = None if isinstance(saver, Saver) else saver
        self._saver: Saver | None = saver if isinstance(saver, Saver) else Saver(saver)
        self.prefix = self._saver.prefix
        self._saved: tuple[int, Callable[[], TrainState | None]] | None = None

    def begin(self, state: TrainState) -> None:
        """Start to count seconds."""
        super().begin(state)
        self._saved = None

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Save."""
        self.save(step, state)

    def end(self, step: int, state: TrainState) -> None:
        """Save the last state, and wait until it is on disk."""
        self.save(step, state, wait=True)

    def close(self) -> None:
        """Wait for pending writes, and close the `Saver` if the hook created it."""
        super().close()
        if self._directory is not None and self._saver is not None:
            saver, self._saver = self._saver, None
            saver.close()

    def is_saved(self, step: int, state: TrainState) -> None:
        """Record that a checkpoint of this step holds this state, such as the restored one."""
        self._saved = step, _weakly(state)

    def has_saved(self, step: int, state: TrainState) -> bool:
        """Whether a checkpoint of this step holds this state, not changed by a hook since."""
        return self._saved is not None and self._saved[0] == step and self._saved[1]() is state

    def save(self, step: int, state: TrainState, *, wait: bool = False) -> bool:
        """Save, unless this state is saved already.

        Args:
            step: The current step of the loop.
            state: The state at that step.
            wait: Whether to wait until the checkpoint is on disk.

        Returns:
            Whether there is a checkpoint of this step; False if a function in `before_save` prevented it.

        Raises:
            CheckpointError: The checkpoint could not be written.
            ValueError: The state is at another step.
        """
        if not self.has_saved(step, state):
            checks = (self.run.before_save, *self._before_save)
            prevented = [bool(check(step)) for check in checks]  # a list: each must be called
            if any(prevented):
                return False
            check_step(step, state)
            if self._saver is None:  # closed at the end of an earlier run
                self._saver = Saver(self._directory or "")
            extra = self._extra() if self._extra else None
            with internal_transfers():
                self._saver.save(state, extra=extra)
            self.is_saved(step, state)
        if wait and self._saver is not None:
            self._saver.wait()
        return True


def _weakly(state: Any) -> Callable[[], Any]:
    """A weak reference to the state, or the state itself if it cannot be weakly referenced."""
    try:
        return weakref.ref(state)
    except TypeError:  # a NamedTuple with a global step
        return lambda: state


def _functions(before_save: Any) -> tuple[Any, ...]:
    if callable(before_save) or not isinstance(before_save, tuple | list):
        raise TypeError(f"before_save: must be a tuple of functions of the step, got {kind(before_save)}")
    return tuple(as_function(check, f"before_save[{i}]", "of the step") for i, check in enumerate(before_save))
