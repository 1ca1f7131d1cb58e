"""The hook that saves checkpoints at intervals, and at the end."""

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from jstep.array_store.manifest import as_checkpoint_extra
from jstep.checkpoint.saver import Saver
from jstep.checkpoint.shared_directory import check_shared
from jstep.core.checks import as_function, as_functions
from jstep.hooks.cadence import Clock, make_cadence
from jstep.hooks.saver_hook import LatestSave, SaverHook, may_save, write
from jstep.state.train_state import TrainState


class CheckpointSaverHook(SaverHook):
    """A hook that saves checkpoints at intervals of seconds or steps, and at the end.

    Args:
        saver: A `Saver`, or a directory.
        save_secs: Interval in seconds of the host's clock.
        save_steps: Interval in steps; due at its multiples.
        extra: A function of no arguments whose JSON-serializable result is saved with each
            checkpoint, such as the position of a loader.
        before_save: Functions of the step; one that raises or returns True prevents the save.
        clock: Returns seconds; replaced in tests.

    Attributes:
        saver: The `Saver`.

    `save(step, state, wait=True)` saves at once, such as in another hook; it returns False if a
    hook prevents it.

    Source: `tf.train.CheckpointSaverHook`.
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
        self._cadence = make_cadence(
            steps=("save_steps", save_steps),
            secs=("save_secs", save_secs),
            clock=clock,
            required=False,
            together=True,
        )
        self._extra = as_function(extra, "extra", "() -> values", optional=True)
        self._checks = as_functions(before_save, "before_save", "of the step")
        # A Saver that was passed belongs to the caller; one of a directory is closed with each run,
        # and opened again.
        self._directory: str | os.PathLike[str] | None = None
        if not isinstance(saver, Saver):
            self._directory = saver
            saver = Saver(saver)
        self.saver = saver
        self._is_closed = False
        self._saved: LatestSave | None = None

    def begin(self, state: TrainState) -> None:
        super().begin(state)
        self._run.check_no_links(self.saver.directory)
        check_shared(self.saver.directory, "CheckpointSaverHook: saver")
        self._saved = None

    def close(self) -> None:
        super().close()
        if self._directory is not None and not self._is_closed:
            self._is_closed = True
            self.saver.close()

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        wait: bool = False,
        permanent_every_secs: float | None = None,
    ) -> bool:
        if self._saved is None or not self._saved.holds(step, state):
            if not may_save(self._run, step, state, self._checks):
                return False
            if self._directory is not None and self._is_closed:  # at the end of an earlier run
                self.saver = Saver(self._directory)
                self._is_closed = False
            is_finite = self._run.components.require_finite(step, self.saver)
            extra = as_checkpoint_extra(self._extra() if self._extra else None)
            extra = extra._replace(finite=is_finite, permanent_every_secs=permanent_every_secs)
            write(self._run, self.saver, state, extra)
            self._saved = LatestSave(step, weakref.ref(state))
        if wait and not self._is_closed:
            try:
                self.saver.wait()
            except Exception:
                self._saved = None  # so that another try saves it again instead of returning True
                raise
        return True
