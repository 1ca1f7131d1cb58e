"""Early stopping on an evaluation metric."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax

from jstep.core.checks import as_bool, as_int, as_number
from jstep.evaluating.metric_callback import MetricCallback, Progress, is_better
from jstep.hooks.hook_state import key_of
from jstep.state import TrainState

_logger = logging.getLogger("jstep")


@dataclasses.dataclass
class _Progress(Progress):
    """The state, with the step at which it stopped the run, or None."""

    stopped_at: int | None = None


class EarlyStopping(MetricCallback):
    """Stop training when a metric has not improved for `patience` evaluations; a callback of `EvaluationHook`.

    An evaluation is an improvement if it is better than the best value so far by more than `min_delta`; NaN never is.
    The best value and the number of evaluations without improvement are saved in checkpoints, so a stopped run stays
    stopped when it is started again. To continue it, pass `EarlyStopping(…, reset=True)` or a larger patience.

    Args:
        metric: The name of a metric that evaluate returns.
        patience: Number of consecutive evaluations without improvement after which training stops, ≥ 1.
        mode: `"min"` if lower values are better, `"max"` if higher values are.
        min_delta: The change must exceed this to count as an improvement, ≥ 0.
        reset: Whether to ignore the state in the checkpoint each time a run is started again.
        key: The name of its state in checkpoints; None for its class and metric.

    Attributes:
        best: The best value so far; None before the first one.
        bad: Number of consecutive evaluations without improvement.
        why: Why and at which step it stopped the run, and how to continue; None if it did not.
        key: The given name.
        on_cadence_only: True: off-schedule evaluations (the last one of a run) are ignored.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> import jstep
        >>> stop = jstep.EarlyStopping("loss", patience=2)
        >>> [stop(step, None, {"loss": loss}) for step, loss in enumerate([3.0, 2.0, 2.5, 2.0])]
        [None, None, None, True]

    Source: Keras' `EarlyStopping`, with the same count; there the state is lost in a restart.
    """

    _progress: _Progress

    def __init__(
        self,
        metric: str,
        patience: int = 3,
        mode: str = "min",
        min_delta: float = 0.0,
        *,
        reset: bool = False,
        key: str | None = None,
    ) -> None:
        self._patience = as_int(patience, "patience", 1, "a number of evaluations")
        self._min_delta = as_number(min_delta, "min_delta", low=0.0)
        self._reset = as_bool(reset, "reset")
        settings = {"patience": self._patience, "min_delta": self._min_delta}
        super().__init__({"metric": metric, "mode": mode}, settings, _Progress(), key)

    @property
    def why(self) -> str | None:
        """Why and at which step it stopped the run, and how to continue; None if it did not."""
        best, bad, step = self._progress.best, self._progress.bad, self._progress.stopped_at
        if bad < self._patience:
            return None
        return (
            f"{key_of(self)} stopped the run{'' if step is None else f' at step {step}'}: {self.metric} had not "
            f"improved on {best} in {bad} evaluations. To continue, give EarlyStopping(…, reset=True), or more patience"
        )

    def __call__(self, step: int, state: TrainState, results: Mapping[str, Any]) -> bool | None:
        """Return True when patience is exhausted.

        Raises:
            KeyError: evaluate does not return the metric.
        """
        value, progress = self._score(results), self._progress
        if is_better(value, progress.best, self._mode, self._min_delta):
            self._progress = _Progress(value)
            return None
        progress.bad += 1
        if progress.bad < self._patience:
            return None
        progress.stopped_at = step
        if jax.process_index() == 0:
            text = "step %d: %s has not improved on %s in %d evaluations; stopping"
            _logger.info(text, step, self.metric, progress.best, progress.bad)
        return True

    def set_state(self, value: Any) -> bool:
        """Restore the state and return whether patience was exhausted; an incompatible state is logged and ignored."""
        if self._reset:
            self._start_fresh("is forgotten because of reset=True")
            return False
        super().set_state(value)
        if self.why is None:  # with more patience than before
            self._progress.stopped_at = None
        return self.why is not None
