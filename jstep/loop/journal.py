"""The files of a run about itself: its card and its timeline."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import jax

from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import Saver
from jstep.core.meshes import in_background
from jstep.hooks.timeline import START, TIMES, VERSION, Stopwatch, Timeline, seconds_before_training
from jstep.loop.card import PAST, RestoredPast, card, past_of, program_card, warn_if_past_changed
from jstep.loop.compiler import shapes_of
from jstep.loop.feeder import lanes_of
from jstep.loop.programs import trace_step
from jstep.loop.run import Run
from jstep.state.train_state import TrainState
from jstep.stores.objects import location

# Record the card of a run and its programs, in a background thread.

_logger = logging.getLogger("jstep")


class Cards:
    """Writer of the card of a run, and of a line for each program once its first call was dispatched.

    Background threads write the lines, in order; the thread of the loop only looks up traces in JAX's cache. Errors are
    logged and never end the run.

    Args:
        write: Adds a line of a kind to the timeline, `write(kind, **fields)`; called from another thread.
        run: The run, at its start.
        batches: The argument of `train`.
    """

    def __init__(self, write: Callable[..., None], run: Run, batches: Any) -> None:
        self._write, self._batches, self._stages = write, batches, run.stages
        self._optimizers: dict[str, str] = {}  # by the first step of the stage
        self._restored: RestoredPast | None = None  # until it was compared
        if run.saver is not None and run.restored and isinstance(kept := run.extra.get(PAST), dict):
            self._restored = RestoredPast(run.restored, checkpoint_name(run.saver.prefix, run.restored), kept)
        self._latest: Future[None] | None = None
        given = run.options, run.stages, run.first, shapes_of(run.state), run.held, batches
        self._begin(lambda: write("card", **card(*given), programs=[]))

    def record_program(
        self, step: Any, stage: int, steps: int, constants: Mapping[str, Any], state: Any, args: tuple[Any, ...]
    ) -> None:
        """Record a program that was called for the first time.

        Args:
            step: The training step.
            stage: The first step of its stage.
            steps: How many steps the call took.
            constants: The metrics that no step computes: the hyperparameters that are plain numbers, by name.
            state: The state that it returned.
            args: The batch of the call.
        """
        if not isinstance(state, TrainState):
            return  # `train` raises for it
        with _logging_errors():
            traced = trace_step(step, state, args)
            self._begin(lambda: self._record({"stage": stage, "steps": steps, **program_card(traced, constants, args)}))

    def past(self, step: int) -> dict[str, Any]:
        """Return the past to keep with a checkpoint of this step, as `{PAST: …}`; it waits for pending lines."""
        self.close()
        found = {}
        with _logging_errors():
            found[PAST] = self._past(step)
        return found

    def close(self) -> None:
        """Wait for pending lines."""
        if self._latest is not None:
            wait([self._latest])

    def _begin(self, task: Callable[[], None]) -> None:
        """Run a task in a thread, after the earlier tasks."""
        before = self._latest

        def run() -> None:
            if before is not None:
                wait([before])
            with _logging_errors():
                task()

        self._latest = in_background(run, name="jstep-card")

    def _record(self, program: dict[str, Any]) -> None:
        if program.get("optimizer"):
            self._optimizers[str(program["stage"])] = ", ".join(program["optimizer"])
        self._write("card", programs=[program])
        restored, self._restored = self._restored, None
        if restored is not None:
            warn_if_past_changed(restored, self._past(restored.step))

    def _past(self, step: int) -> dict[str, Any]:
        return past_of(self._batches, step, self._optimizers, lanes_of(self._stages.at(max(step - 1, 0))))


@contextlib.contextmanager
def _logging_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _logger.warning("the card of this run could not be recorded: %s: %s", type(error).__name__, error)


# Recorder of how a run spends its time, in a file next to its checkpoints.

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
