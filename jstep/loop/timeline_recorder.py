"""Recorder of how a run spends its time, in a file next to its checkpoints."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jstep.checkpoint.saver import Saver
from jstep.hooks.timeline import START, TIMES, VERSION, Stopwatch, Timeline, seconds_before_training
from jstep.loop.run import Run
from jstep.stores.objects import location

_logger = logging.getLogger("jstep")

_EVERY_SECS = 1.0


class Clocks(NamedTuple):
    """The clocks of a recorder.

    Attributes:
        seconds: A monotonic clock, in seconds.
        wall: Seconds since 1970.
        before: The seconds from the start of the process to the start of training.
    """

    seconds: Callable[[], float] = time.perf_counter
    wall: Callable[[], float] = time.time
    before: Callable[[], float] = seconds_before_training


CLOCKS = Clocks()
"""The clocks of every run; replaced in tests."""


def new_watch() -> Stopwatch:
    """The stopwatch of a run; for the first run of a process, it starts with the process."""
    return Stopwatch(CLOCKS.before(), CLOCKS.seconds)


class TimelineRecorder:
    """The thread that writes the times of a run once a second.

    Only process 0 writes, and only if the run has a checkpoint_dir or a logdir.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run, options = run, run.options
        self._wall = CLOCKS.wall() - sum(run.watch.seconds().values())
        self._directory: Any = options.checkpoint_dir if options.checkpoint_dir is not None else options.logdir
        self._prefix = options.checkpoint_prefix
        if isinstance(self._directory, Saver):
            self._directory, self._prefix = self._directory.directory, self._directory.prefix
        self._timeline: Timeline | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "TimelineRecorder":
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout=10)  # it may be blocked on an object store
        if self._timeline is not None:
            self.times()
            self._timeline.close()
            self._timeline = None
        self._run.watch.stop()

    def open(self) -> None:
        """Write the first line; called once the run may write to its checkpoint directory."""
        if self._directory is None or jax.process_index() != 0:
            self._run.watch.stop()
            return
        try:
            self._timeline = Timeline(location(self._directory, "checkpoint_dir"), self._prefix)
        except OSError as error:
            _logger.warning("%s: the times of this run cannot be kept: %s", self._directory, error)
            self._run.watch.stop()
            return
        self.times(START, version=VERSION)
        self._thread = threading.Thread(target=self._tick, name="jstep-timeline", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether lines are written."""
        return self._timeline is not None

    def times(self, kind: str = TIMES, *, to_disk: bool = False, **fields: Any) -> None:
        """Write a line with the times so far."""
        run = self._run
        first, step, seconds = run.start if run.is_begun else None, run.step, run.watch.seconds()
        self.write(
            kind,
            to_disk=to_disk,
            **fields,
            time=round(self._wall + sum(seconds.values()), 6),
            step=None if first is None else [first, max(first, step)],
            seconds={part: round(max(0.0, value), 6) for part, value in seconds.items() if value},
        )

    def write(self, kind: str, *, to_disk: bool = False, **fields: Any) -> None:
        """Write a line of any kind, if the file is open."""
        if self._timeline is not None:
            self._timeline.write(kind, to_disk=to_disk, **fields)

    def flush(self) -> None:
        """Flush the lines to the disk: none is older than the newest checkpoint."""
        if (timeline := self._timeline) is not None:
            timeline.flush()

    def before_save(self) -> None:
        """Write the line that precedes each checkpoint."""
        self.times(to_disk=True, checkpoint=self._run.step)

    def _tick(self) -> None:
        while not self._over.wait(_EVERY_SECS):
            try:
                self.times()
            except Exception as error:  # an error here must not end the run
                _logger.warning("the times of this run cannot be kept: %s", error)
                self._run.watch.stop()
                return
