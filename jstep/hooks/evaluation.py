"""Evaluating on the way."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jstep.hooks.hook import CadencedHook, Clock, Metrics, every
from jstep.hooks.summaries import scalar
from jstep.hooks.values import LeaveOut, text
from jstep.state import TrainState

_logger = logging.getLogger("jstep")


class EvaluationHook(CadencedHook):
    """Calls a function of the state every so often, and at the end; logs and writes what it returns.

    Args:
        evaluate: `evaluate(state) -> {name: number}`. It must not donate the state. With moving averages:
            `lambda state: accuracy(jstep.averaged_params(state), …)`.
        every_n_steps: How often, in steps: at their multiples.
        every_n_secs: How often, in seconds, instead.
        summary_writer: Any object with `add_summary(summary, global_step)`; gets each number as `prefix/name`.
            None for the one that `train` opens in its `logdir`, if any.
        prefix: Before the names, in the log and in the summaries.
        clock: Seconds; for tests.

    Attributes:
        results: Step → what evaluate returned.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is not positive, or none is given.

    Source: `tf.contrib.learn` monitors; the ValidationMonitor of old.
    """

    def __init__(
        self,
        evaluate: Callable[[TrainState], Mapping[str, Any]],
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        *,
        summary_writer: Any = None,
        prefix: str = "eval",
        clock: Clock = time.monotonic,
    ) -> None:
        if not callable(evaluate):
            raise TypeError(f"evaluate={evaluate!r}: must be a function of the state")
        self._evaluate, self._writer, self._prefix = evaluate, summary_writer, prefix
        self._takes_writer = summary_writer is None
        super().__init__(
            every(steps=("every_n_steps", every_n_steps), secs=("every_n_secs", every_n_secs), clock=clock),
            together=True,  # the state lies over all processes, so all of them evaluate it
        )
        self.results: dict[int, Mapping[str, Any]] = {}

    def use_writer(self, summary_writer: Any, leave_out: LeaveOut) -> None:
        """Takes the writer of `train`, where the hook was made without one."""
        if self._takes_writer:
            self._writer = summary_writer

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Evaluates when due."""
        if self.is_due(step):
            self.has_happened()
            self._run(step, state)

    def end(self, step: int, state: TrainState) -> None:
        """Evaluates the last state, unless that is done."""
        if step not in self.results:
            self._run(step, state)

    def _run(self, step: int, state: TrainState) -> None:
        values = self._evaluate(state)
        if not isinstance(values, Mapping):
            raise TypeError(f"evaluate returned {type(values).__name__}; it must return a mapping of names to numbers")
        self.results[step] = values
        named = {f"{self._prefix}/{name}": value for name, value in values.items()}
        if jax.process_index() == 0:
            _logger.info("step %d  %s", step, text(named))
        if self._writer is not None:
            for name, value in named.items():
                self._writer.add_summary(scalar(name, value), step)
