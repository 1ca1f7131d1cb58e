"""Reducing a hyperparameter when an evaluation metric stops improving."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

import jax

from jstep.core.checks import as_int, as_number, as_text
from jstep.core.contexts import internal_transfers
from jstep.evaluating.metric_callback import MetricCallback, Progress
from jstep.optimizers import get_hyperparameter, set_hyperparameter
from jstep.state import TrainState

_logger = logging.getLogger("jstep")

_EPSILON = 1e-8
"""Smaller changes are not applied, as in torch."""


@dataclasses.dataclass
class _Progress(Progress):
    """The state, with the number of evaluations that are left of the cooldown."""

    cooling: int = 0


class ReduceOnPlateau(MetricCallback):
    """Multiply a held hyperparameter by `factor` when a metric stops improving; a callback of `EvaluationHook`.

    As in torch's ReduceLROnPlateau, an evaluation is good if the metric is better than the best by more than the
    fraction `threshold` (less than best·(1 − threshold), or more than best·(1 + threshold)), and bad otherwise. The
    value is reduced after more than `patience` bad evaluations in a row. For `cooldown` evaluations after a reduction,
    none counts as bad. A change of at most 1e-8 is not applied. The counters are saved in checkpoints; the
    hyperparameter is part of the state.

    Args:
        metric: The name of a metric that evaluate returns.
        name: The name of the held hyperparameter, `jstep.held(name, value)` in the optimizer, with its prefix if any.
        factor: The factor to multiply it by, 0 < factor < 1.
        patience: Number of consecutive bad evaluations to tolerate, ≥ 0.
        mode: `"min"` if lower values are better, `"max"` if higher values are.
        threshold: The required relative improvement over the best value, ≥ 0.
        cooldown: Number of evaluations after a reduction that do not count as bad, ≥ 0.
        min_value: Lower bound of the hyperparameter, ≥ 0.
        key: The name of its state in checkpoints; None for its class, metric and hyperparameter.

    Attributes:
        best: The best value so far.
        bad: Number of consecutive bad evaluations.
        key: The given name.
        on_cadence_only: True: off-schedule evaluations (the last one of a run) are ignored.

    Raises:
        KeyError: Before the first step: the state holds no such hyperparameter.
        ValueError: An argument is out of range.

    Example:
        >>> import jstep
        >>> state = jstep.TrainState.create({"w": 1.0}, jstep.adam(jstep.held("learning_rate", 0.5)))
        >>> reduce = jstep.ReduceOnPlateau("loss", "learning_rate", factor=0.5, patience=1)
        >>> for step, loss in enumerate([3.0, 2.0, 2.0, 2.0]):
        ...     state = reduce(step, state, {"loss": loss}) or state
        >>> jstep.get_hyperparameter(state, "learning_rate")
        0.25

    Source: `torch.optim.lr_scheduler.ReduceLROnPlateau`.
    """

    _progress: _Progress

    def __init__(
        self,
        metric: str,
        name: str,
        factor: float = 0.1,
        patience: int = 10,
        mode: str = "min",
        threshold: float = 1e-4,
        cooldown: int = 0,
        min_value: float = 0.0,
        *,
        key: str | None = None,
    ) -> None:
        self._name = as_text(name, "name", "the name of a held hyperparameter")
        self._factor = as_number(factor, "factor", low=0.0, above=True, high=1.0, below=True)
        self._patience = as_int(patience, "patience", 0, "a number of evaluations")
        self._threshold = as_number(threshold, "threshold", low=0.0)
        self._cooldown = as_int(cooldown, "cooldown", 0, "a number of evaluations")
        self._min_value = as_number(min_value, "min_value", low=0.0)
        settings = {
            "factor": self._factor,
            "patience": self._patience,
            "threshold": self._threshold,
            "cooldown": self._cooldown,
            "min_value": self._min_value,
        }
        super().__init__({"metric": metric, "name": self._name, "mode": mode}, settings, _Progress(), key)

    def begin(self, state: TrainState) -> None:
        """Reset the counters at the start of a run.

        Raises:
            KeyError: The state holds no such hyperparameter. The message lists those it holds.
        """
        super().begin(state)
        with internal_transfers():
            get_hyperparameter(state, self._name)

    def __call__(self, step: int, state: TrainState, results: Mapping[str, Any]) -> TrainState | None:
        """Return the state with the reduced value if a reduction is due, or None.

        Raises:
            KeyError: evaluate does not return the metric, or the state holds no such hyperparameter.
        """
        value, progress = self._score(results), self._progress
        if self._is_good(value):
            progress.best, progress.bad = value, 0
        else:
            progress.bad += 1
        if progress.cooling > 0:
            progress.cooling -= 1
            progress.bad = 0
        if progress.bad <= self._patience:
            return None
        progress.bad, progress.cooling = 0, self._cooldown
        with internal_transfers():
            old = get_hyperparameter(state, self._name)
            new = max(old * self._factor, self._min_value)
            if old - new <= _EPSILON:
                return None
            if jax.process_index() == 0:
                _logger.info("step %d: %s is on a plateau; %s %g, was %g", step, self.metric, self._name, new, old)
            return set_hyperparameter(state, self._name, new)

    def _is_good(self, value: float) -> bool:
        best = self._progress.best
        if best is None:
            return value < math.inf if self._mode == "min" else value > -math.inf
        if self._mode == "min":
            return value < best * (1.0 - self._threshold)
        return value > best * (1.0 + self._threshold)
