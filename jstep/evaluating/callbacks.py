"""Callbacks of evaluations that react to a metric: early stopping, reducing rates on plateaus.

`MetricReader` finds the metric among the results, `MetricCallback` keeps what a callback remembers
in the checkpoints of its run. `keep_best.py` has the callback that saves.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple

from jstep.core import processes
from jstep.core.checks import as_bool, as_choice, as_int, as_number, as_string
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.core.public_names import explains_attributes
from jstep.core.recorded_calls import ShownAsTyped
from jstep.core.tracebacks import shortens_tracebacks
from jstep.hooks.hook_states import StateFormat, hook_key, register_format
from jstep.hooks.run_info import RunInfo
from jstep.metering.numbers import is_number, read_values
from jstep.optimizers.hyperparameters import get_hyperparameter, set_hyperparameter
from jstep.state.train_state import TrainState

LOWER_IS_BETTER = ("loss", "error", "perplexity")
"""Suffixes of names of metrics whose mode is `"min"` by default."""
_SMALLEST_CHANGE = 1e-8
"""A hyperparameter is not changed by less, as in torch."""


class MetricReader(ShownAsTyped):
    """Base class of callbacks that read a metric, by its own or its logged name."""

    # Such as `eval/`. Empty until a run has begun, and outside of runs.
    _log_prefix = ""

    # Called by its `EvaluationHook`, through the functions below the class: public methods would be
    # shown to users by completion.

    def _use_run(self, run: RunInfo) -> None:
        """Called before `begin` of any hook."""

    def _use_evaluator(self, evaluate: Any) -> None:
        """Called before `begin`, with the function that measures."""

    def _leave_run(self) -> None:
        """Called after `close`: forget what the run gave.

        From here on, the callback may be called without a run.
        """

    def _prepare_run_save(self, step: int) -> None:
        """Called in the loop's thread before a save of the run."""

    def _wait_until_finished(self) -> None:
        """Called in another thread before a save of the run appears; an error prevents that."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            cls.__init__ = shortens_tracebacks(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, metric: Any, mode: Any) -> None:
        self.metric = as_string(metric, "metric", "the name of a metric that evaluate returns")
        if mode is not None:
            self._mode: str = as_choice(mode, "mode", ("min", "max"))
        elif metric.endswith(LOWER_IS_BETTER):
            self._mode = "min"
        else:
            raise ValueError(
                f'mode=None: must be "max" if higher values of {metric!r} are better, or "min" if '
                "lower ones are"
            )

    @property
    def mode(self) -> str:
        return self._mode

    def _use_names(self, prefix: str, names: Collection[str] | None) -> None:
        """Note the prefix of logged names; check that the metric is one of `names`, if known."""
        self._log_prefix = f"{prefix}/"
        if names is None:
            return
        # The numbers of a metric object are called name/key, and its keys are not known yet.
        metric = f"{self._name_in(names)}/"
        if not any(metric.startswith(f"{name}/") for name in names):
            raise self._missing(names)

    def _score(self, results: Mapping[str, Any]) -> float:
        """Return the value of the metric."""
        name = self._name_in(results)
        if name not in results:
            raise self._missing(results)
        if not is_number(results[name]):
            raise TypeError(
                f"{type(self).__name__}: metric={name!r}: must be a number, evaluate returned "
                f"{results[name]!r}"
            )
        return float(read_values({name: results[name]})[name])

    def _name_in(self, names: Collection[str]) -> str:
        return self.metric if self.metric in names else self.metric.removeprefix(self._log_prefix)

    def _missing(self, names: Collection[str]) -> KeyError:
        subject = f"{type(self).__name__}: metric={self.metric!r}"
        return KeyError(f"{subject}: evaluate does not return it; it returns {list(names)}")


def use_run(callback: object, run: RunInfo) -> None:
    if isinstance(callback, MetricReader):
        callback._use_run(run)


def leave_run(callback: object) -> None:
    if isinstance(callback, MetricReader):
        callback._leave_run()


def use_evaluation(
    callback: object, prefix: str, names: Collection[str] | None, evaluate: Any
) -> None:
    """Tell a callback what it will be called with.

    Args:
        callback: Any callback.
        prefix: The prefix of logged names.
        names: The names of the metrics that `evaluate` returns; None if they are not known.
        evaluate: The function that measures.
    """
    if isinstance(callback, MetricReader):
        callback._use_names(prefix, names)
        callback._use_evaluator(evaluate)


def prepare_run_save(callback: object, step: int) -> None:
    # Not a method `before_save`, which users' callbacks may have: an object with it is a hook, and
    # `KeepBest` is not one.
    if isinstance(callback, MetricReader):
        callback._prepare_run_save(step)


def wait_until_finished(callback: object) -> None:
    if isinstance(callback, MetricReader):
        callback._wait_until_finished()


def is_better(value: float, best: float | None, mode: str, margin: float = 0.0) -> bool:
    """Return whether a value is better than the best so far by more than a margin; NaN never is."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value < best - margin if mode == "min" else value > best + margin


class CallbackState(NamedTuple):
    """What a callback remembers from one evaluation to the next.

    Attributes:
        best: The best value so far; None before the first one.
        wait: The number of consecutive evaluations without an improvement.
        stopped_at: The step at which `EarlyStopping` stopped the run; None if it did not.
        cooldown_counter: The number of evaluations that `ReduceOnPlateau` does not count as bad any
            more.
    """

    best: float | None = None
    wait: int = 0
    stopped_at: int | None = None
    cooldown_counter: int = 0


_SAVED_AS = {
    "best": "best",
    "wait": "bad",
    "stopped_at": "stopped_at",
    "cooldown_counter": "cooling",
}
"""Field of a `CallbackState` → its name in checkpoints, which belongs to their format."""
_SAVED_DEFAULTS = {key: CallbackState._field_defaults[name] for name, key in _SAVED_AS.items()}


class MetricCallback(MetricReader):
    """Base class of callbacks that react to a metric, and whose state is saved.

    An evaluation that takes place only because its run ends is not passed to them: if the run is
    continued, k + k steps count as many evaluations as 2k.
    """

    on_cadence_only: bool = True
    key: str | None = None
    _progress = CallbackState()
    _settings: ClassVar[tuple[str, ...]]

    def __init__(self, watched: Mapping[str, Any], key: str | None) -> None:
        super().__init__(watched["metric"], watched["mode"])
        self.key = key
        if key is not None:
            self.key = as_string(key, "key", "the name of its state in checkpoints, or None")
        # A state that was saved with other values of these means something else.
        self._watched = {**watched, "mode": self._mode}
        self.watches = ", ".join(name for argument, name in watched.items() if argument != "mode")

    def _identifying_settings(self) -> dict[str, Any]:
        settings = {name: getattr(self, f"_{name}") for name in self._settings}
        return {"mode": self._mode, **settings}

    @property
    def best(self) -> float | None:
        return self._progress.best

    @property
    def wait(self) -> int:
        return self._progress.wait

    def begin(self, state: TrainState) -> None:
        self._progress = CallbackState()

    def get_state(self) -> Any:
        progress = {_SAVED_AS[name]: value for name, value in self._progress._asdict().items()}
        return {**self._watched, **progress}

    def set_state(self, value: Any) -> bool | None:
        saved = {name: value.get(name) for name in self._watched}
        if saved != self._watched:
            self._start_fresh(f"is for {saved}, but it has {self._watched}")
            return None
        self._progress = CallbackState(**{name: value[key] for name, key in _SAVED_AS.items()})
        return None

    def _start_fresh(self, why: str) -> None:
        logger.warning("%s starts fresh: its state in the checkpoint %s", hook_key(self), why)


register_format(
    MetricCallback,
    StateFormat(
        1,
        {"metric": None, "name": None, "mode": None, **_SAVED_DEFAULTS},
        settings=MetricCallback._identifying_settings,
    ),
)


@explains_attributes
class EarlyStopping(MetricCallback):
    """Stop training when a metric has not improved for `patience` evaluations.

    This is a callback of `EvaluationHook`. An evaluation is an improvement if it is better than the
    best value so far by more than `min_delta`; NaN never is. The state is saved in checkpoints, so
    a stopped run stays stopped. To continue it, pass `reset=True` or a larger patience. A branch of
    a run begins with its best value, and counts from 0.

    Args:
        metric: The name of a metric that evaluate returns, or its logged name such as `eval/loss`.
        patience: Number of consecutive evaluations without improvement after which training stops,
            ≥ 1.
        mode: `"min"` if lower values are better, `"max"` if higher values are; None for `"min"` if
            the name ends in loss, error or perplexity, otherwise an error.
        min_delta: ≥ 0; the change must exceed it.
        start_after: A step, ≥ 0; evaluations up to it are ignored, such as those of a warmup. 0
            ignores none.
        reset: Whether to ignore the state in the checkpoint each time a run is started again.
        key: The name of its state in checkpoints; None for its class and metric.

    Attributes:
        best: The best value so far; None before the first one.
        wait: Number of consecutive evaluations without improvement.
        stop_reason: Why and at which step it stopped the run, and how to continue; None if it did
            not.
        on_cadence_only: True: off-schedule evaluations (the last one of a run) are ignored.

    Raises:
        KeyError: In a run: evaluate does not return the metric.
        ValueError: An argument is out of range, or the metric needs a mode.

    Example:
        >>> import jstep
        >>> stop = jstep.EarlyStopping("loss", patience=2)
        >>> [stop(step, None, {"loss": loss}) for step, loss in enumerate([3.0, 2.0, 2.5, 2.0])]
        [None, None, None, True]

    Source: Keras' `EarlyStopping`.
    """

    _settings = ("patience", "min_delta", "start_after")

    def __init__(
        self,
        metric: str,
        *,
        patience: int = 3,
        mode: str | None = None,
        min_delta: float = 0.0,
        start_after: int = 0,
        reset: bool = False,
        key: str | None = None,
    ) -> None:
        self._patience = as_int(patience, "patience", 1, "a number of evaluations")
        self._min_delta = as_number(min_delta, "min_delta", low=0.0)
        self._start_after = as_int(start_after, "start_after", 0, "a step")
        self._reset = as_bool(reset, "reset")
        self._is_new_branch = False
        super().__init__({"metric": metric, "mode": mode}, key)

    def _use_run(self, run: RunInfo) -> None:
        self._is_new_branch = run.origin.is_new_branch

    def _leave_run(self) -> None:
        self._is_new_branch = False

    @property
    def stop_reason(self) -> str | None:
        """Why and at which step it stopped the run, and how to continue; None if it did not."""
        progress = self._progress
        if progress.wait < self._patience:
            return None
        place = "" if progress.stopped_at is None else f" at step {progress.stopped_at!r}"
        return (
            f"{hook_key(self)} stopped the run{place}: {self._failure('had')}. To continue, give "
            "EarlyStopping(…, reset=True)"
        )

    def _failure(self, has: str) -> str:
        progress = self._progress
        problem = "been NaN" if progress.best is None else f"not improved on {progress.best!r}"
        return f"{self.metric} {has} {problem} in {progress.wait} evaluations"

    def __call__(self, step: int, state: TrainState, results: Mapping[str, Any]) -> bool | None:
        value = self._score(results)
        if self._start_after and step <= self._start_after:
            return None
        if is_better(value, self._progress.best, self._mode, self._min_delta):
            self._progress = CallbackState(best=value)
            return None
        self._progress = self._progress._replace(wait=self._progress.wait + 1)
        if self._progress.wait < self._patience:
            return None
        self._progress = self._progress._replace(stopped_at=step)
        if processes.is_process_0():
            logger.info("step %d: %s; stopping", step, self._failure("has"))
        return True

    def set_state(self, value: object) -> bool:
        """Restore the state; return whether it keeps the run stopped."""
        if self._reset:
            self._start_fresh("is forgotten because of reset=True")
            return False
        super().set_state(value)
        if self._is_new_branch and self._progress.stopped_at is not None:
            # What stopped the parent run does not stop its branch, which may have been made for
            # that reason.
            self._progress = CallbackState(best=self._progress.best)
        if self.stop_reason is None:  # with more patience than before
            self._progress = self._progress._replace(stopped_at=None)
        return self.stop_reason is not None


@explains_attributes
class ReduceOnPlateau(MetricCallback):
    """Multiply a held hyperparameter by `factor` when a metric stops improving.

    This is a callback of `EvaluationHook`. An evaluation is good if the metric is better than the
    best by more than threshold·|best|, and bad otherwise. The value is reduced after more than
    `patience` bad evaluations in a row, unless it would change by at most 1e-8. The counters are
    saved in checkpoints.

    Args:
        metric: As in `EarlyStopping`.
        name: The name of the held hyperparameter, `jstep.held(name, value)` in the optimizer, with
            its prefix if any.
        factor: The factor, in (0, 1).
        patience: Number of consecutive bad evaluations to tolerate, ≥ 0.
        mode: As in `EarlyStopping`.
        threshold: The required relative improvement over the best value, ≥ 0.
        cooldown: Number of evaluations after a reduction that do not count as bad, ≥ 0.
        min_value: Lower bound of the hyperparameter, ≥ 0.
        key: As in `EarlyStopping`; None for its class, metric and hyperparameter.

    Attributes:
        best: The best value so far.
        wait: Number of consecutive bad evaluations.
        on_cadence_only: True, as in `EarlyStopping`.

    Raises:
        KeyError: In a run: evaluate does not return the metric, or the state holds no such
            hyperparameter.
        ValueError: An argument is out of range, or the metric needs a mode.

    Example:
        >>> import jstep
        >>> optimizer = jstep.adam(jstep.held("learning_rate", 0.5))
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> reduce = jstep.ReduceOnPlateau("loss", "learning_rate", factor=0.5, patience=1)
        >>> for step, loss in enumerate([3.0, 2.0, 2.0, 2.0]):
        ...     state = reduce(step, state, {"loss": loss}) or state
        >>> jstep.get_hyperparameter(state, "learning_rate")
        0.25

    Source: `torch.optim.lr_scheduler.ReduceLROnPlateau`.
    """

    _settings = ("factor", "patience", "threshold", "cooldown", "min_value")

    def __init__(
        self,
        metric: str,
        name: str,
        *,
        factor: float = 0.1,
        patience: int = 10,
        mode: str | None = None,
        threshold: float = 1e-4,
        cooldown: int = 0,
        min_value: float = 0.0,
        key: str | None = None,
    ) -> None:
        self._name = as_string(name, "name", "the name of a held hyperparameter")
        self._factor = as_number(factor, "factor", low=0.0, above=True, high=1.0, below=True)
        self._patience = as_int(patience, "patience", 0, "a number of evaluations")
        self._threshold = as_number(threshold, "threshold", low=0.0)
        self._cooldown = as_int(cooldown, "cooldown", 0, "a number of evaluations")
        self._min_value = as_number(min_value, "min_value", low=0.0)
        super().__init__({"metric": metric, "name": self._name, "mode": mode}, key)

    def begin(self, state: TrainState) -> None:
        super().begin(state)
        with internal_transfers():
            get_hyperparameter(state, self._name)  # a KeyError before the first step

    def __call__(
        self, step: int, state: TrainState, results: Mapping[str, Any]
    ) -> TrainState | None:
        value = self._score(results)
        self._count(value)
        if self._progress.wait <= self._patience:
            return None
        self._progress = CallbackState(best=self._progress.best, cooldown_counter=self._cooldown)
        return self._reduce(step, state)

    def _count(self, value: float) -> None:
        """Count an evaluation, as torch does: in the cooldown, even the newest one is not bad."""
        progress = self._progress
        best = progress.best
        if best is None:
            # Not None, with which an infinite first value would be an improvement.
            best = math.inf if self._mode == "min" else -math.inf
        margin = self._threshold * abs(best) if math.isfinite(best) else 0.0
        is_good = is_better(value, best, self._mode, margin)
        is_bad = not is_good and progress.cooldown_counter == 0
        self._progress = CallbackState(
            best=value if is_good else progress.best,
            wait=progress.wait + 1 if is_bad else 0,
            cooldown_counter=max(progress.cooldown_counter - 1, 0),
        )

    def _reduce(self, step: int, state: TrainState) -> TrainState | None:
        with internal_transfers():
            old = get_hyperparameter(state, self._name)
            new = max(old * self._factor, self._min_value)
            if old - new <= _SMALLEST_CHANGE:
                return None
            if processes.is_process_0():
                logger.info(
                    "step %d: %s is on a plateau; %s %g, was %g",
                    step,
                    self.metric,
                    self._name,
                    new,
                    old,
                )
            return set_hyperparameter(state, self._name, new)
