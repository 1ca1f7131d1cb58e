"""The observer that records how a run spends its time, in a file next to its checkpoints."""

import logging
import threading

import jax

from jstep.checkpoint.saver import Saver
from jstep.core import stopwatch
from jstep.loop.run import Observer, Origin
from jstep.loop.setup import Setup
from jstep.stores.timeline import AGAIN, START, TIMES, VERSION, Timeline

_EVERY_SECS = 1.0
_logger = logging.getLogger("jstep")


class TimelineRecorder(Observer):
    """The thread that writes the times of a run once a second.

    Only process 0 writes, and only if the run has a checkpoint_dir or a logdir.

    Args:
        setup: What the run is made of.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._wall = stopwatch.CLOCKS.wall() - sum(setup.watch.seconds().values())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="jstep-timeline", daemon=True)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)  # it may be blocked on an object store
        self.times()
        self.setup.lines.close()
        self.setup.watch.stop()

    def opened(self, saver: Saver | None, origin: Origin) -> None:
        """Write the first line."""
        options, where = self.setup.options, self.setup.options.where
        if where is None or jax.process_index() != 0:
            self.setup.watch.stop()
            return
        try:
            timeline = Timeline(where, options.checkpoint_prefix if saver is None else saver.prefix)
        except OSError as error:
            _logger.warning("%s: the times of this run cannot be kept: %s", where, error)
            self.setup.watch.stop()
            return
        self.setup.lines.open(timeline)
        self.times(START, version=VERSION)
        self._thread.start()

    def times(self, kind: str = TIMES, **fields: object) -> None:
        """Write a line with the times so far, if the file is open."""
        loop, seconds = self.setup.loop, self.setup.watch.seconds()
        time = round(self._wall + sum(seconds.values()), 6)
        self.setup.lines.write(
            kind,
            **fields,
            time=time,
            step=[loop.first, max(loop.first, loop.step)] if loop.is_known else None,
            seconds={part: round(max(0.0, value), 6) for part, value in seconds.items() if value},
            **{AGAIN: time},
        )

    def flush(self) -> None:
        """No line is older than the newest checkpoint."""
        timeline = self.setup.lines.timeline
        if timeline is not None:
            timeline.flush()

    def about_to_save(self) -> None:
        """Write the line that precedes each checkpoint."""
        self.times(checkpoint=self.setup.loop.step)

    def _tick(self) -> None:
        while not self._over.wait(_EVERY_SECS):
            try:
                self.times()
            except Exception as error:  # an error here must not end the run
                _logger.warning("the times of this run cannot be kept: %s", error)
                self.setup.watch.stop()
                return
