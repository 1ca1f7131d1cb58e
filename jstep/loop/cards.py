"""The observer that records the card of a run and its programs, in a background thread."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

from jstep.checkpoint.names import checkpoint_name
from jstep.core.meshes import in_background
from jstep.loop.card import PAST, RestoredPast, card, past_of, program_card, warn_if_past_changed
from jstep.loop.compiler import shapes_of
from jstep.loop.feeder import lanes_of
from jstep.loop.programs import Dispatched
from jstep.loop.run_record import Run
from jstep.state.train_state import TrainState

_logger = logging.getLogger("jstep")


class Cards(contextlib.AbstractContextManager["Cards"]):
    """Writer of the card of a run, and of a line for each program once its first call was dispatched.

    The lines are those of the timeline; without one, nothing is written. Background threads write them, in order; the
    thread of the loop only looks up traces in JAX's cache. Errors are logged and never end the run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        run.at_beginning.append(self.begun)
        run.pasts.append(self.past)
        self._batches: Any = None
        self._optimizers: dict[str, str] = {}  # by the first step of the stage
        self._restored: RestoredPast | None = None  # until it was compared
        self._latest: Future[None] | None = None

    def begun(self, batches: Any) -> None:
        """Write the card, and wait for the programs."""
        run, self._batches = self.run, batches
        if run.write_line is None:
            return
        run.programs.after_first.append(self._add_program)
        if run.saver is not None and run.restored and isinstance(kept := run.extra.get(PAST), dict):
            self._restored = RestoredPast(run.restored, checkpoint_name(run.saver.prefix, run.restored), kept)
        given = run.options, run.stages, run.first, shapes_of(run.state), run.held, batches
        self._begin(lambda: self._write(**card(*given), programs=[]))

    def _add_program(self, done: Dispatched) -> None:
        """Record a program that was called for the first time."""
        if not isinstance(done.state, TrainState):
            return  # `train` raises for it
        with _logging_errors():
            about, traced = {"stage": done.stage.first, "steps": done.call.most}, done.trace()
            constants, args = done.constants.arrays, done.args
            self._begin(lambda: self._record(about | program_card(traced, constants, args)))

    def past(self, step: int) -> dict[str, Any]:
        """Return the past to keep with a checkpoint of this step, as `{PAST: …}`; it waits for pending lines."""
        run, found = self.run, {}
        if run.feeder is None:  # no step was run: it has not changed
            return {PAST: run.extra[PAST]} if PAST in run.extra else {}
        if run.write_line is not None:
            self._settle()
            with _logging_errors():
                found[PAST] = self._past(step)
        return found

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._settle()

    def _settle(self) -> None:
        """Wait for pending lines."""
        if self._latest is not None:
            wait([self._latest])

    def _write(self, **fields: Any) -> None:
        if self.run.write_line is not None:
            self.run.write_line("card", **fields)

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
        self._write(programs=[program])
        restored, self._restored = self._restored, None
        if restored is not None:
            warn_if_past_changed(restored, self._past(restored.step))

    def _past(self, step: int) -> dict[str, Any]:
        return past_of(self._batches, step, self._optimizers, lanes_of(self.run.stages.at(max(step - 1, 0))))


@contextlib.contextmanager
def _logging_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _logger.warning("the card of this run could not be recorded: %s: %s", type(error).__name__, error)
