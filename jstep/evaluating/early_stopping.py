"""Early stopping on an evaluation metric."""

import logging
from collections.abc import Mapping
from typing import Any

import jax

from jstep.core.checks import as_bool, as_int, as_number
from jstep.evaluating.scores import (
    as_count,
    checked_key,
    checked_metric,
    deserialized,
    is_better,
    is_compatible_state,
    score,
    serialized,
    warn_starts_fresh,
)
from jstep.hooks.hook_state import key_of
from jstep.state import TrainState

_logger = logging.getLogger("jstep")


class EarlyStopping:
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

    on_cadence_only: bool = True
    key: str | None = None

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
        self.metric, self._mode = checked_metric(metric, mode)
        self._patience = as_int(patience, "patience", 1, "a number of evaluations")
        self._min_delta = as_number(min_delta, "min_delta", low=0.0)
        self._reset, self.key = as_bool(reset, "reset"), checked_key(key)
        self._forget()

    @property
    def watches(self) -> str:
        """The metric, which identifies the callback among others of its class."""
        return self.metric

    @property
    def identifying_settings(self) -> dict[str, Any]:
        """The settings, which identify the callback among others with the same metric."""
        return {"mode": self._mode, "patience": self._patience, "min_delta": float(self._min_delta)}

    def _forget(self) -> None:
        self.best: float | None = None
        self.bad = 0
        self.why: str | None = None
        self._stopped_at: int | None = None

    def begin(self, state: TrainState) -> None:
        """Reset the state at the start of a run."""
        self._forget()

    def __call__(self, step: int, state: TrainState, results: Mapping[str, Any]) -> bool | None:
        """Return True when patience is exhausted.

        Raises:
            KeyError: evaluate does not return the metric.
        """
        value = score(results, self.metric, "EarlyStopping")
        if is_better(value, self.best, self._mode, self._min_delta):
            self._forget()
            self.best = value
            return None
        self.bad += 1
        if self.bad < self._patience:
            return None
        self._stop(step)
        if jax.process_index() == 0:
            _logger.info(
                "step %d: %s has not improved on %s in %d evaluations; stopping", step, self.metric, self.best, self.bad
            )
        return True

    def _stop(self, step: int | None) -> None:
        self._stopped_at = step
        self.why = (
            f"{key_of(self)} stopped the run{'' if step is None else f' at step {step}'}: {self.metric} had not "
            f"improved on {self.best} in {self.bad} evaluations. To continue, give EarlyStopping(…, reset=True), or "
            "more patience"
        )

    def get_state(self) -> Any:
        """Return the metric, mode, best value, number of bad evaluations, and the step at which it stopped."""
        watched = {"metric": self.metric, "mode": self._mode}
        return {**watched, "best": serialized(self.best), "bad": self.bad, "stopped_at": self._stopped_at}

    def set_state(self, value: Any) -> bool:
        """Restore the state and return whether patience was exhausted; an incompatible state is logged and ignored."""
        if self._reset:
            warn_starts_fresh(self, "is forgotten because of reset=True")
            return False
        if not is_compatible_state(self, value, {"metric": self.metric, "mode": self._mode}):
            return False
        try:
            best, bad, step = deserialized(value["best"]), as_count(value["bad"]), value["stopped_at"]
            step = None if step is None else as_count(step)
        except (KeyError, TypeError, ValueError) as error:
            warn_starts_fresh(self, f"cannot be read ({type(error).__name__}: {error})")
            return False
        self.best, self.bad = best, bad
        if bad >= self._patience:
            self._stop(step)
            return True
        return False
