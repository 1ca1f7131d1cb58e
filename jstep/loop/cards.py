"""Record the card of a run and its programs, in a background thread."""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from jstep.core.contexts import Thread
from jstep.core.meshes import mesh_of, using_mesh
from jstep.loop.card import card, program_card, trace_of
from jstep.loop.changed_past import warn_if_past_changed
from jstep.loop.options import Options
from jstep.loop.stages import TrainSteps
from jstep.state import TrainState

_logger = logging.getLogger("jstep")


class Write(Protocol):
    """Function that adds a line to the timeline of a run."""

    def __call__(self, kind: str, **fields: Any) -> None:
        """Add a line."""


class Cards:
    """Writer of the card of a run after its first call was dispatched, and of a line for each later program.

    The first line holds the whole card with its first program; later lines hold `programs` only. The thread of the
    loop only looks up the trace in JAX's cache. Errors are logged and never end the run.

    Args:
        write: Receives the lines; called from another thread.
        make: Makes the card without its programs.
        check: Receives that card with its first program, once a step was run.
    """

    def __init__(
        self, write: Write, make: Callable[[], dict[str, Any]], check: Callable[[dict[str, Any]], None]
    ) -> None:
        self._write, self._make = write, make  # called once: later lines hold programs only
        self._check = check
        self._is_begun = False
        self._lock = threading.Lock()  # lines are written one at a time
        self._threads: list[Thread] = []

    def record_program(
        self, step: Any, stage: int, steps: int, state: Any, metrics: Any, args: tuple[Any, ...]
    ) -> None:
        """Record a program that was called for the first time.

        Args:
            step: The training step.
            stage: The first step of its stage.
            steps: How many steps the call took.
            state: The state that it returned.
            metrics: The metrics that it returned.
            args: The batch of the call.
        """
        if not isinstance(state, TrainState):
            return  # `train` raises for it
        try:
            with using_mesh(mesh_of((state, args))):
                traced = trace_of(step, state, args)
            constants = _constants(step, metrics)
        except Exception as error:
            self._log_error(error)
            return
        found = [(stage, steps, traced, constants, args)]
        self._threads.append(Thread(target=self._record, args=(found,), name="jstep-card"))
        self._threads[-1].start()

    def close(self) -> None:
        """Wait for pending lines; write the card of a run that took no step."""
        for thread in self._threads:
            thread.join()
        if not self._is_begun:
            self._record([])

    def _record(self, programs: list[tuple[int, int, Any, Mapping[str, Any], Any]]) -> None:
        with self._lock:
            try:
                found = [
                    {"stage": stage, "steps": steps, **program_card(traced, constants, args)}
                    for stage, steps, traced, constants, args in programs
                ]
                make, self._make = self._make, dict
                is_first, self._is_begun = not self._is_begun, True
                made = make()
                self._write("card", **made, programs=found)
                if is_first and programs:
                    self._check({**made, "programs": found})
            except Exception as error:
                self._log_error(error)

    def _log_error(self, error: Exception) -> None:
        _logger.warning("the card of this run could not be recorded: %s: %s", type(error).__name__, error)


def cards_of(
    write: Write | None,
    options: Options,
    stages: TrainSteps,
    start: Any,
    batches: Any,
    stack: contextlib.ExitStack,
) -> Cards | None:
    """Make the recorder of a run's card; None without a file to write to.

    Args:
        write: Receives the lines.
        options: The arguments of `train`.
        stages: The training steps.
        start: The starting point of the run.
        batches: The argument of `train`.
        stack: Closes the recorder.
    """
    if write is None:
        return None
    make = functools.partial(card, options, stages, start.state, batches, start.step, start.held)
    saver, restored = start.saver, start.restored or 0
    place = ("", "") if saver is None else (saver.directory, saver.prefix)
    found = Cards(write, make, functools.partial(warn_if_past_changed, batches, *place, restored))
    stack.callback(found.close)
    return found


def _constants(step: Any, metrics: Any) -> dict[str, Any]:
    """The metrics of a call that no step computes, with one value each."""
    found = {}
    for name in sorted(getattr(step, "constant_metrics", ())):
        value = np.asarray(metrics[name])
        found[name] = value.reshape(-1)[0] if value.size and (value == value.reshape(-1)[0]).all() else value
    return found
