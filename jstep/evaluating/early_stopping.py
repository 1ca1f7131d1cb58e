"""Stopping when it gets no better."""

import logging
from collections.abc import Mapping
from typing import Any

import jax

from jstep.core.checks import as_int, as_number
from jstep.evaluating.scores import checked_metric, found, is_better, kept, score
from jstep.state import TrainState

_logger = logging.getLogger("jstep")


class EarlyStopping:
    """Stops the run at the evaluation that makes `patience` in a row without an improvement; for `EvaluationHook`.

    What counts is the best value so far: an improvement is better than that by more than `min_delta`; NaN is none.
    Best value and patience are kept with each checkpoint; a run that stopped stays stopped when it is started again.

    Args:
        metric: The name of a metric that evaluate returns.
        patience: How many evaluations in a row may bring none, ≥ 1: at that many the run stops.
        mode: Whether less (`"min"`) or more (`"max"`) is better.
        min_delta: By how much more than this, ≥ 0.

    Attributes:
        best: The best value so far, None before there is one.
        bad: Evaluations in a row without an improvement.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is out of range.

    Example:
        >>> import jstep
        >>> stop = jstep.EarlyStopping("loss", patience=2)
        >>> [stop(step, None, {"loss": loss}) for step, loss in enumerate([3.0, 2.0, 2.5, 2.0])]
        [None, None, None, True]

    Source: Keras' `EarlyStopping`; there a stop is off by none, and its memory is lost in a restart.
    """

    def __init__(self, metric: str, patience: int = 3, mode: str = "min", min_delta: float = 0.0) -> None:
        self.metric, self._mode = checked_metric(metric, mode)
        self._patience = as_int(patience, "patience", 1, "a number of evaluations")
        self._min_delta = as_number(min_delta, "min_delta", low=0.0)
        self.best: float | None = None
        self.bad = 0

    def begin(self, state: TrainState) -> None:
        """Forgets earlier runs."""
        self.best, self.bad = None, 0

    def __call__(self, step: int, state: TrainState, results: Mapping[str, Any]) -> bool | None:
        """True where patience is over.

        Raises:
            KeyError: evaluate does not return the metric.
        """
        value = score(results, self.metric, "EarlyStopping")
        if is_better(value, self.best, self._mode, self._min_delta):
            self.best, self.bad = value, 0
            return None
        self.bad += 1
        if self.bad < self._patience:
            return None
        if jax.process_index() == 0:
            _logger.info(
                "step %d: %s has not improved on %s in %d evaluations; stopping", step, self.metric, self.best, self.bad
            )
        return True

    def get_state(self) -> Any:
        """The best value and the patience used."""
        return {"best": kept(self.best), "bad": self.bad}

    def set_state(self, value: Any) -> bool:
        """Gives them back; true where patience was over."""
        self.best, self.bad = found(value["best"]), value["bad"]
        return self.bad >= self._patience
