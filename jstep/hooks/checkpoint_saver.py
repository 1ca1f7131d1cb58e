"""Saving on the way."""

import os
import time
from collections.abc import Callable
from typing import Any

from jstep import _agreement
from jstep.checkpoint import Saver
from jstep.hooks._hook import Clock, Hook, Metrics, every
from jstep.state import TrainState


class CheckpointSaverHook(Hook):
    """Saves every so many seconds or steps, and at the end.

    Args:
        saver: A `Saver`, or the directory of one.
        save_secs: How often, in seconds of the host's clock.
        save_steps: How often, in steps: at their multiples.
        extra: A function of no arguments whose result, JSON-able, is kept with each checkpoint, such as the position
            of a loader.
        before_save: `before_save(step)` for each, called before every save; one that raises prevents it.
        clock: Seconds; for tests.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is not positive.

    Source: `tf.train.CheckpointSaverHook`; it does not save at the first step.
    """

    def __init__(
        self,
        saver: Saver | str | os.PathLike[str],
        save_secs: float | None = None,
        save_steps: int | None = None,
        *,
        extra: Callable[[], Any] | None = None,
        before_save: tuple[Callable[[int], None], ...] = (),
        clock: Clock = time.monotonic,
    ) -> None:
        self._owned = not isinstance(saver, Saver)
        self._saver = Saver(saver) if not isinstance(saver, Saver) else saver
        self._every = every(
            steps=("save_steps", save_steps), secs=("save_secs", save_secs), clock=clock, at_least_one=False
        )
        self._agreed: _agreement.AgreedClock | None = None
        self._secs, self._clock = save_secs, clock
        self._extra, self._before_save = extra, before_save
        self._saved: int | None = None

    def begin(self, state: TrainState) -> None:
        """Seconds count from here."""
        self._every.start()
        if self._secs is not None and not _agreement.is_alone():
            # All processes take part in a save, so one clock has to tell all of them.
            self._agreed = _agreement.AgreedClock(self._secs, self._clock)

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Saves when due."""
        if self._due(step):
            self.save(step, state)

    def end(self, step: int, state: TrainState) -> None:
        """Saves the last state, and waits for it to be on disk."""
        self.save(step, state)
        self._saver.close() if self._owned else self._saver.wait()

    def save(self, step: int, state: TrainState) -> None:
        """Saves, unless this step is saved already."""
        if self._saved == step:
            return
        for check in self._before_save:
            check(step)
        self._saver.save(state, extra=self._extra() if self._extra else None)
        self._saved = step
        self._every.done()
        if self._agreed is not None:
            self._agreed.done()

    def _due(self, step: int) -> bool:
        if self._agreed is None:
            return self._every.due(step)
        by_steps = self._every.steps is not None and step % self._every.steps == 0
        return self._agreed.due(step) or by_steps

    def next_due(self, step: int) -> int | None:
        """The next multiple of `save_steps`, where no clock has to be asked."""
        if self._every.secs is None and self._every.steps is None:
            return NEVER
        return self._every.next_due(step)


NEVER = 2**63
