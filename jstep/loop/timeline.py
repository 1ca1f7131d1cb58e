"""The observer that records how a run spends its time, in a file next to its checkpoints."""

import logging
import threading
from typing import Any

import jax

from jstep.core import stopwatch
from jstep.loop.run import Observer, Run
from jstep.stores.timeline import AGAIN, START, TIMES, VERSION, Timeline

_EVERY_SECS = 1.0
_logger = logging.getLogger("jstep")


class TimelineRecorder(Observer):
    """The thread that writes the times of a run once a second.

    Only process 0 writes, and only if the run has a checkpoint_dir or a logdir.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._wall = stopwatch.CLOCKS.wall() - sum(run.watch.seconds().values())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="jstep-timeline", daemon=True)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)  # it may be blocked on an object store
        reports = self.run.reports
        if reports.timeline is not None:
            self.times()
            reports.timeline.close()
            reports.timeline = None
        self.run.watch.stop()

    def opened(self) -> None:
        """Write the first line."""
        run, where = self.run, self.run.options.where
        if where is None or jax.process_index() != 0:
            self.run.watch.stop()
            return
        try:
            timeline = Timeline(where, run.options.checkpoint_prefix if run.saver is None else run.saver.prefix)
        except OSError as error:
            _logger.warning("%s: the times of this run cannot be kept: %s", where, error)
            self.run.watch.stop()
            return
        run.reports.timeline = timeline
        run.reports.flushes.append(timeline.flush)  # no line is older than the newest checkpoint
        self.times(START, version=VERSION)
        self._thread.start()

    def times(self, kind: str = TIMES, **fields: Any) -> None:
        """Write a line with the times so far, if the file is open."""
        run, timeline = self.run, self.run.reports.timeline
        if timeline is None:
            return
        first, step, seconds = run.resumed.first if run.resumed.is_begun else None, run.step, run.watch.seconds()
        time = round(self._wall + sum(seconds.values()), 6)
        timeline.write(
            kind,
            **fields,
            time=time,
            step=None if first is None else [first, max(first, step)],
            seconds={part: round(max(0.0, value), 6) for part, value in seconds.items() if value},
            **{AGAIN: time},
        )

    def about_to_save(self) -> None:
        """Write the line that precedes each checkpoint."""
        self.times(checkpoint=self.run.step)

    def _tick(self) -> None:
        while not self._over.wait(_EVERY_SECS):
            try:
                self.times()
            except Exception as error:  # an error here must not end the run
                _logger.warning("the times of this run cannot be kept: %s", error)
                self.run.watch.stop()
                return
