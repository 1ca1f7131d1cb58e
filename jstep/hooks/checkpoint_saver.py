"""The hook that saves checkpoints at intervals, and at the end."""

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from jstep.checkpoint.manifest import CheckpointExtra
from jstep.checkpoint.saver import Saver
from jstep.core.checks import as_function, as_functions
from jstep.core.meshes import internal_transfers
from jstep.core.stopwatch import SAVING
from jstep.hooks.run_hook import RunHook
from jstep.metering.cadence import Clock, make_cadence
from jstep.state.global_step import check_step, require_alive
from jstep.state.train_state import TrainState
from jstep.training.metrics import Metrics


class CheckpointSaverHook(RunHook):
    """A hook that saves checkpoints at intervals of seconds or steps, and at the end.

    Args:
        saver: A `Saver`, or a directory.
        save_secs: Interval in seconds of the host's clock.
        save_steps: Interval in steps; due at its multiples.
        extra: A function of no arguments whose JSON-serializable result is saved with each checkpoint, such as the
            position of a loader.
        before_save: Functions of the step; one that raises or returns True prevents the save.
        clock: Returns seconds; replaced in tests.

    Attributes:
        saver: The `Saver`.

    Source: `tf.train.CheckpointSaverHook`.
    """

    phase = SAVING
    instead = "call save(state) of a jstep.Saver"

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
        steps, secs = ("save_steps", save_steps), ("save_secs", save_secs)
        self.cadence = make_cadence(steps=steps, secs=secs, clock=clock, required=False, together=True)
        self._extra = as_function(extra, "extra", "() -> values", optional=True)
        self._before_save = as_functions(before_save, "before_save", "of the step")
        self._directory = None if isinstance(saver, Saver) else saver
        self.saver, self._is_closed = saver if isinstance(saver, Saver) else Saver(saver), False
        self._saved: tuple[int, Callable[[], TrainState | None]] | None = None

    def begin(self, state: TrainState) -> None:
        super().begin(state)
        self._saved = None

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        self.save(step, state)

    def end(self, step: int, state: TrainState) -> None:
        self.save(step, state, wait=True)

    def close(self) -> None:
        super().close()
        if self._directory is not None and not self._is_closed:
            self._is_closed = True
            self.saver.close()

    def mark_saved(self, step: int, state: TrainState) -> None:
        self._saved = step, weakref.ref(state)

    def has_saved(self, step: int, state: TrainState) -> bool:
        """Whether a checkpoint of this step holds this state, unchanged by hooks since."""
        return self._saved is not None and self._saved[0] == step and self._saved[1]() is state

    def save(self, step: int, state: TrainState, *, wait: bool = False, temporary_secs: float | None = None) -> bool:
        """Save, unless this state is saved; return False if `before_save` prevented it.

        With `wait`, the checkpoint is on disk on return. `temporary_secs` is that of `CheckpointExtra`.
        """
        if not self.has_saved(step, state):
            require_alive(state)
            run = self.run
            checks = (run.before_save, *self._before_save)
            prevented = [bool(check(step)) for check in checks]  # a list: each must be called
            if any(prevented):
                return False
            check_step(step, state)
            if self._directory is not None and self._is_closed:  # at the end of an earlier run
                self.saver, self._is_closed = Saver(self._directory), False
            is_finite = run.require_finite(step, self.saver)
            extra = CheckpointExtra.of(self._extra() if self._extra else None)
            extra = extra._replace(finite=is_finite, temporary_secs=temporary_secs)
            self.saver.set_listener(run.background)
            with internal_transfers():
                self.saver.save(state, extra=extra)
            self.mark_saved(step, state)
        if wait and not self._is_closed:
            try:
                self.saver.wait()
            except Exception:
                self._saved = None  # so that another try saves it again instead of returning True
                raise
        return True
