"""Callbacks on a metric of evaluations: reading and comparing its values, and their state in checkpoints."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any, Self

from jstep.core.checks import as_text, one_of
from jstep.hooks.hook_state import key_of
from jstep.hooks.values import is_number, read
from jstep.state import TrainState

_logger = logging.getLogger("jstep")

MODES = ("min", "max")


def checked_metric(metric: Any, mode: Any) -> tuple[str, str]:
    """Validate the name of a metric and its mode.

    Raises:
        TypeError: The name is not a string.
        ValueError: The name is empty, or the mode is neither `"min"` nor `"max"`.
    """
    as_text(metric, "metric", "the name of a metric that evaluate returns")
    one_of(mode, "mode", MODES)
    return metric, mode


def score(results: Mapping[str, Any], metric: str, by: str) -> float:
    """Return the value of a metric.

    Raises:
        KeyError: `results` has no metric of that name. The message lists its metrics.
        TypeError: The value is not a number.
    """
    if metric not in results:
        raise KeyError(f"{by}: metric={metric!r}: evaluate does not return it; it returns {list(results)}")
    if not is_number(results[metric]):
        raise TypeError(f"{by}: metric={metric!r}: must be a number, evaluate returned {results[metric]!r}")
    return float(read({metric: results[metric]})[metric])


def is_better(value: float, than: float | None, mode: str, margin: float = 0.0) -> bool:
    """Return whether a value is better than another by more than a margin; NaN never is, any other beats None."""
    if math.isnan(value):
        return False
    if than is None:
        return True
    return value < than - margin if mode == "min" else value > than + margin


@dataclasses.dataclass
class Progress:
    """State of a callback between evaluations. Subclasses add counts, which may be None by default.

    Attributes:
        best: The best value; None before the first one.
        bad: The number of consecutive evaluations without improvement.
    """

    best: float | None = None
    bad: int = 0

    def to_json(self) -> dict[str, Any]:
        """Convert to a dict that JSON can hold; the inverse of `from_json`."""
        best = self.best if self.best is None or math.isfinite(self.best) else str(self.best)
        return {**dataclasses.asdict(self), "best": best}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """Read a dict from a checkpoint; other keys are ignored.

        Raises:
            KeyError: A field is missing.
            ValueError: A field has a value of another kind.
        """
        counts = {field.name: saved[field.name] for field in dataclasses.fields(cls) if field.name != "best"}
        for name, count in counts.items():
            is_unknown = count is None and getattr(cls, name) is None
            if not is_unknown and (type(count) is not int or count < 0):
                raise ValueError(f"{count!r} is not a number of evaluations")
        best = saved["best"]
        if not (best is None or type(best) in (int, float) or best in ("nan", "inf", "-inf")):
            raise ValueError(f"{best!r} is not a number")
        return cls(best if best is None else float(best), **counts)


class MetricCallback:
    """Base class of callbacks that react to a metric, and whose state is saved in checkpoints.

    Args:
        watched: The names of the metric and of what else identifies the callback, and the mode, by argument.
        settings: The other settings, which identify it among callbacks that watch the same.
        progress: The initial state; the state of a run begins as a new object of its class.
        key: The name of its state in checkpoints, or None.

    Attributes:
        watches: What it watches, which identifies the callback among others of its class.
        identifying_settings: The settings, which identify it among others that watch the same.

    Raises:
        TypeError: A name is not a string.
        ValueError: A name is empty, or the mode is neither `"min"` nor `"max"`.
    """

    on_cadence_only: bool = True
    key: str | None = None
    _progress: Progress

    def __init__(
        self, watched: Mapping[str, str], settings: Mapping[str, Any], progress: Progress, key: str | None
    ) -> None:
        self.metric, self._mode = checked_metric(watched["metric"], watched["mode"])
        self.key = None if key is None else as_text(key, "key", "the name of its state in checkpoints, or None")
        self._watched, self._progress = watched, progress
        self.watches = ", ".join(name for argument, name in watched.items() if argument != "mode")
        self.identifying_settings = {"mode": self._mode, **settings}

    @property
    def best(self) -> float | None:
        """The best value so far; None before the first one."""
        return self._progress.best

    @property
    def bad(self) -> int:
        """The number of consecutive evaluations without improvement."""
        return self._progress.bad

    def begin(self, state: TrainState) -> None:
        """Reset the state at the start of a run."""
        self._progress = type(self._progress)()

    def get_state(self) -> Any:
        """Return what it watches, the mode, the best value and the counts."""
        return {**self._watched, **self._progress.to_json()}

    def set_state(self, value: Any) -> bool | None:
        """Restore the state; an incompatible one is logged and ignored."""
        why = self._mismatch(value)
        if why is None:
            try:
                self._progress = type(self._progress).from_json(value)
            except (KeyError, TypeError, ValueError) as error:
                why = f"cannot be read ({type(error).__name__}: {error})"
        if why is not None:
            self._start_fresh(why)
        return None

    def _mismatch(self, value: Any) -> str | None:
        """Return why a state is not that of a callback like this one, or None."""
        if not isinstance(value, Mapping) or not self._watched.keys() <= value.keys():
            return "was written by another version of it"
        differ = ((name, value[name], here) for name, here in self._watched.items() if value[name] != here)
        return next((f"is for {name}={there!r}, but it has {name}={here!r}" for name, there, here in differ), None)

    def _score(self, results: Mapping[str, Any]) -> float:
        return score(results, self.metric, type(self).__name__)

    def _start_fresh(self, why: str) -> None:
        """Log that the state in the checkpoint cannot be used."""
        _logger.warning("%s starts fresh: its state in the checkpoint %s", key_of(self), why)
