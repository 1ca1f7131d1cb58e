"""Record the card of a run and its programs, in a background thread."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any

from jstep.checkpoint.names import checkpoint_name
from jstep.core.meshes import in_background
from jstep.loop.background_compiler import shapes_of
from jstep.loop.card import card, program_card
from jstep.loop.past import PAST, RestoredPast, past_of, warn_if_past_changed
from jstep.loop.programs import trace_step
from jstep.loop.run import Run
from jstep.loop.stages import lanes_of
from jstep.state.train_state import TrainState

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
