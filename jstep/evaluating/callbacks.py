"""Callbacks of evaluations that react to a metric: early stopping, plateaus, and keeping the best checkpoints."""

import math
import os
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from typing import Any, ClassVar, NamedTuple

import jax

from jstep.checkpoint.hook_states import StateFormat, hook_key
from jstep.checkpoint.manifest import CheckpointError, CheckpointExtra
from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.retention import Listener
from jstep.checkpoint.saver import Saver
from jstep.checkpoint.shared_directory import check_shared
from jstep.core.checks import as_bool, as_int, as_number, as_string, check_choice, format_list
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.core.recorded_calls import ShownAsTyped
from jstep.core.threads import Task, in_background
from jstep.hooks.run_hook import RunInfo
from jstep.metering.numbers import is_number, read_values
from jstep.optimizers.hyperparameters import get_hyperparameter, set_hyperparameter
from jstep.record.differences import changes
from jstep.state.global_step import state_step
from jstep.state.nonfinite import StateContents
from jstep.state.train_state import TrainState
from jstep.stores.urls import absolute, join_path, location, resolve_path

_EPSILON = 1e-8
"""Smaller changes are not applied, as in torch."""


LOWER_IS_BETTER = ("loss", "error", "perplexity")
"""Suffixes of names of metrics whose mode is `"min"` by default."""


class MetricReader(ShownAsTyped):
    """Base class of callbacks that read a metric, by its own or its logged name."""

    _log_prefix = ""

    def __init__(self, metric: Any, mode: Any) -> None:
        self.metric = as_string(metric, "metric", "the name of a metric that evaluate returns")
        if mode is None and not metric.endswith(LOWER_IS_BETTER):
            raise ValueError(
                f'mode=None: must be "max" if higher values of {metric!r} are better, or "min" if lower ones are'
            )
        self._mode: str = "min" if mode is None else check_choice(mode, "mode", ("min", "max"))

    def use_names(self, prefix: str, names: Collection[str] | None) -> None:
        self._log_prefix = f"{prefix}/"
        # The numbers of a metric object are called name/key.
        if names is not None and not any(f"{self._name_in(names)}/".startswith(f"{name}/") for name in names):
            raise self._missing(names)

    def score(self, results: Mapping[str, Any]) -> float:
        name = self._name_in(results)
        if name not in results:
            raise self._missing(results)
        if not is_number(results[name]):
            raise TypeError(
                f"{type(self).__name__}: metric={name!r}: must be a number, evaluate returned {results[name]!r}"
            )
        return float(read_values({name: results[name]})[name])

    def _name_in(self, names: Collection[str]) -> str:
        return self.metric if self.metric in names else self.metric.removeprefix(self._log_prefix)

    def _missing(self, names: Collection[str]) -> KeyError:
        subject = f"{type(self).__name__}: metric={self.metric!r}"
        return KeyError(f"{subject}: evaluate does not return it; it returns {list(names)}")


def is_better(value: float, best: float | None, mode: str, margin: float = 0.0) -> bool:
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value < best - margin if mode == "min" else value > best + margin


class CallbackState(NamedTuple):
    """The state of a callback between evaluations.

    Attributes:
        stopped_at: The step at which `EarlyStopping` stopped the run.
        cooling: The evaluations until `ReduceOnPlateau` counts bad ones again.
    """

    best: float | None = None
    bad: int = 0
    stopped_at: int | None = None
    cooling: int = 0


class MetricCallback(MetricReader):
    """Base class of callbacks that react to a metric, and whose state is saved."""

    state_format = StateFormat(1, {"metric": None, "name": None, "mode": None, **CallbackState()._asdict()})

    on_cadence_only: bool = True
    key: str | None = None
    _progress = CallbackState()
    _settings: ClassVar[tuple[str, ...]]

    def __init__(self, watched: Mapping[str, Any], key: str | None) -> None:
        super().__init__(watched["metric"], watched["mode"])
        self.key = None if key is None else as_string(key, "key", "the name of its state in checkpoints, or None")
        self._watched = {**watched, "mode": self._mode}
        self.watches = ", ".join(name for argument, name in watched.items() if argument != "mode")

    @property
    def identifying_settings(self) -> dict[str, Any]:
        return {"mode": self._mode, **{name: getattr(self, f"_{name}") for name in self._settings}}

    @property
    def best(self) -> float | None:
        return self._progress.best

    @property
    def bad(self) -> int:
        return self._progress.bad

    def begin(self, state: TrainState) -> None:
        self._progress = CallbackState()

    def get_state(self) -> Any:
        return {**self._watched, **self._progress._asdict()}

    def set_state(self, value: Any) -> bool | None:
        saved = {name: value.get(name) for name in self._watched}
        if saved == self._watched:
            self._progress = CallbackState(*(value[name] for name in CallbackState._fields))
        else:
            self._start_fresh(f"is for {saved}, but it has {self._watched}")
        return None

    def _start_fresh(self, why: str) -> None:
        logger.warning("%s starts fresh: its state in the checkpoint %s", hook_key(self), why)


class EarlyStopping(MetricCallback):
    """Stop training when a metric has not improved for `patience` evaluations; a callback of `EvaluationHook`.

    An evaluation is an improvement if it is better than the best value so far by more than `min_delta`; NaN never is.
    The state is saved in checkpoints, so a stopped run stays stopped. To continue it, pass `reset=True` or a larger
    patience. A branch of a run begins with its best value, and counts from 0.

    Args:
        metric: The name of a metric that evaluate returns, or its logged name such as `eval/loss`.
        patience: Number of consecutive evaluations without improvement after which training stops, ≥ 1.
        mode: `"min"` if lower values are better, `"max"` if higher values are; None for `"min"` if the name ends in
            loss, error or perplexity, otherwise an error.
        min_delta: ≥ 0; the change must exceed it.
        reset: Whether to ignore the state in the checkpoint each time a run is started again.
        key: The name of its state in checkpoints; None for its class and metric.

    Attributes:
        best: The best value so far; None before the first one.
        bad: Number of consecutive evaluations without improvement.
        why: Why and at which step it stopped the run, and how to continue; None if it did not.
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

    _settings = ("patience", "min_delta")

    def __init__(
        self,
        metric: str,
        patience: int = 3,
        mode: str | None = None,
        min_delta: float = 0.0,
        *,
        reset: bool = False,
        key: str | None = None,
    ) -> None:
        self._patience = as_int(patience, "patience", 1, "a number of evaluations")
        self._min_delta = as_number(min_delta, "min_delta", low=0.0)
        self._reset = as_bool(reset, "reset")
        self._is_new_branch = False
        super().__init__({"metric": metric, "mode": mode}, key)

    def use_run(self, run: RunInfo) -> None:
        self._is_new_branch = run.is_new_branch

    @property
    def why(self) -> str | None:
        """Why and at which step it stopped the run, and how to continue; None if it did not."""
        step = self._progress.stopped_at
        if self._progress.bad < self._patience:
            return None
        return (
            f"{hook_key(self)} stopped the run{'' if step is None else f' at step {step}'}: {self._failure('had')}. To "
            "continue, give EarlyStopping(…, reset=True)"
        )

    def _failure(self, has: str) -> str:
        best, bad = self._progress.best, self._progress.bad
        return f"{self.metric} {has} {'been NaN' if best is None else f'not improved on {best}'} in {bad} evaluations"

    def __call__(self, step: int, state: TrainState, results: Mapping[str, Any]) -> bool | None:
        value, progress = self.score(results), self._progress
        if is_better(value, progress.best, self._mode, self._min_delta):
            self._progress = CallbackState(value)
            return None
        progress = self._progress = progress._replace(bad=progress.bad + 1)
        if progress.bad < self._patience:
            return None
        self._progress = progress._replace(stopped_at=step)
        if jax.process_index() == 0:
            logger.info("step %d: %s; stopping", step, self._failure("has"))
        return True

    def set_state(self, value: object) -> bool:
        if self._reset:
            self._start_fresh("is forgotten because of reset=True")
            return False
        super().set_state(value)
        if self._is_new_branch and self._progress.stopped_at is not None:  # not stopped by what stopped the trunk
            self._progress = CallbackState(self._progress.best)
        if self.why is None:  # with more patience than before
            self._progress = self._progress._replace(stopped_at=None)
        return self.why is not None


class ReduceOnPlateau(MetricCallback):
    """Multiply a held hyperparameter by `factor` when a metric stops improving; a callback of `EvaluationHook`.

    An evaluation is good if the metric is better than the best by more than threshold·|best|, and bad otherwise. The
    value is reduced after more than `patience` bad evaluations in a row, unless it would change by at most 1e-8. The
    counters are saved in checkpoints.

    Args:
        metric: As in `EarlyStopping`.
        name: The name of the held hyperparameter, `jstep.held(name, value)` in the optimizer, with its prefix if any.
        factor: The factor, in (0, 1).
        patience: Number of consecutive bad evaluations to tolerate, ≥ 0.
        mode: As in `EarlyStopping`.
        threshold: The required relative improvement over the best value, ≥ 0.
        cooldown: Number of evaluations after a reduction that do not count as bad, ≥ 0.
        min_value: Lower bound of the hyperparameter, ≥ 0.
        key: As in `EarlyStopping`; None for its class, metric and hyperparameter.

    Attributes:
        best: The best value so far.
        bad: Number of consecutive bad evaluations.
        on_cadence_only: True, as in `EarlyStopping`.

    Raises:
        KeyError: In a run: evaluate does not return the metric, or the state holds no such hyperparameter.
        ValueError: An argument is out of range, or the metric needs a mode.

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

    _settings = ("factor", "patience", "threshold", "cooldown", "min_value")

    def __init__(
        self,
        metric: str,
        name: str,
        factor: float = 0.1,
        patience: int = 10,
        mode: str | None = None,
        threshold: float = 1e-4,
        cooldown: int = 0,
        min_value: float = 0.0,
        *,
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
            get_hyperparameter(state, self._name)

    def __call__(self, step: int, state: TrainState, results: Mapping[str, Any]) -> TrainState | None:
        value, progress = self.score(results), self._progress
        reference = (-math.inf if self._mode == "max" else math.inf) if progress.best is None else progress.best
        margin = self._threshold * abs(reference) if math.isfinite(reference) else 0.0
        is_good = is_better(value, reference, self._mode, margin)
        bad = 0 if is_good or progress.cooling > 0 else progress.bad + 1
        best, cooling = value if is_good else progress.best, max(progress.cooling - 1, 0)
        self._progress = CallbackState(best, bad, cooling=cooling)
        if bad <= self._patience:
            return None
        self._progress = CallbackState(best, cooling=self._cooldown)
        with internal_transfers():
            old = get_hyperparameter(state, self._name)
            new = max(old * self._factor, self._min_value)
            if old - new <= _EPSILON:
                return None
            if jax.process_index() == 0:
                logger.info("step %d: %s is on a plateau; %s %g, was %g", step, self.metric, self._name, new, old)
            return set_hyperparameter(state, self._name, new)


class Best(NamedTuple):
    value: float
    step: int
    path: str


class _Complete:
    def __init__(self, notifier: Listener | None = None) -> None:
        self.paths: dict[int, str] = {}
        self.notifier = notifier

    def saved(self, step: int, path: str) -> None:
        self.paths[step] = path
        if self.notifier is not None:
            self.notifier.saved(step, path)

    def wait(self, path: str | None = None) -> None:
        if self.notifier is not None:
            self.notifier.wait(path)

    def is_calling(self) -> bool:
        return self.notifier is not None and self.notifier.is_calling()


_CHANGED = "KeepBest: %s before the %s changed, so later values may not compare%s"


class KeepBest(MetricReader):
    """Keep the checkpoints of the best evaluations, such as `best-1200`; a callback of `EvaluationHook`.

    Each checkpoint leaves out the parameters that the run's checkpoints leave out, and stores its value
    (`saver.extra()` returns `{"accuracy": 0.93}`), and `"averages": True` if it was measured with averages of the
    parameters. Every run competes with the checkpoints in `directory`; a warning is logged if the best value was
    measured with another config, or on other data. On a tie the earlier checkpoint is kept. A nonfinite value is never
    kept, nor are parameters with NaN.

    Args:
        directory: The directory or URL to keep the checkpoints in.
        metric: As in `EarlyStopping`.
        mode: As in `EarlyStopping`.
        keep: Number of checkpoints to keep, ≥ 1; worse ones are deleted.
        prefix: The prefix of their names, before the step.

    Attributes:
        values: Step → value of each checkpoint that is kept.

    Raises:
        KeyError: In a run: evaluate does not return the metric.
        ValueError: An argument is out of range, or the metric needs a mode. Before the first step: the run uses the
            same directory and prefix.

    Example:
        >>> import jstep, tempfile
        >>> state = jstep.TrainState.create({"w": 1.0}, jstep.adam(), global_step=3)
        >>> directory = tempfile.mkdtemp()
        >>> best = jstep.KeepBest(directory, "accuracy", mode="max")
        >>> best(3, state, {"accuracy": 0.5})
        >>> best.close()
        >>> with jstep.Saver(directory, prefix="best") as saver:
        ...     print(saver.latest_step(), saver.extra())
        3 {'accuracy': 0.5}

    Source: Keras' `ModelCheckpoint(save_best_only=True)`.
    """

    state_format = StateFormat(1, {"measured_on": {}})

    def __init__(
        self,
        directory: str | os.PathLike[str],
        metric: str,
        mode: str | None = None,
        keep: int = 1,
        prefix: str = "best",
    ) -> None:
        super().__init__(metric, mode)
        self._keep = as_int(keep, "keep", 1, "a number of checkpoints")
        checkpoint_name(prefix, 0)  # validates the prefix
        self._directory, self._prefix = location(directory, "directory"), prefix
        self._run: RunInfo | None = None  # None if it is called outside of a run
        self._saver: Saver | None = None
        self._at_start: StateContents | None = None
        self._are_averages = False
        self._data: Task[str | None] | None = None
        self._measured_on: dict[int, str] = {}  # step of a value → hash of the data
        self.values: dict[int, float] = {}
        self._complete = _Complete()

    def use_run(self, run: RunInfo) -> None:
        self._run = run
        saver = run.saver
        if saver is None or saver.prefix != self._prefix:
            return
        if resolve_path(saver.directory) == resolve_path(self._directory):
            raise ValueError(
                f"KeepBest: prefix={self._prefix!r}: the run's checkpoints in {saver.directory!r} have it; give another"
            )

    @property
    def _config(self) -> dict[str, Any] | None:
        return None if self._run is None else self._run.config

    def use_evaluator(self, evaluate: Any) -> None:
        """Note whether values are measured with averages, and hash the data in the background."""
        self._are_averages = bool(getattr(evaluate, "use_averages", False))
        first_hash = getattr(getattr(evaluate, "batches", None), "first_hash", None)
        self._data = None if first_hash is None else in_background(first_hash, name="jstep-data-hash", daemon=True)

    @property
    def identifying_settings(self) -> dict[str, Any]:
        return {"metric": self.metric, "prefix": self._prefix}

    @property
    def data(self) -> str | None:
        """A hash of the data on which the values are measured, once known."""
        task = self._data
        is_known = task is not None and task.done() and task.exception() is None
        return task.result() if is_known else None  # type: ignore[union-attr]

    def get_state(self) -> Any:
        measured_on = {str(step): data for step, data in self._measured_on.items() if step in self.values}
        return {"measured_on": measured_on}

    def set_state(self, value: Any) -> None:
        """Warn, in the background, if the best value was measured on other data."""
        saved = value["measured_on"]
        self._measured_on = {step: saved[str(step)] for step in self.values if str(step) in saved}
        best = self._best_step()
        if best is None or self._data is None or jax.process_index() != 0:
            return
        measured_on, kept = self._measured_on.get(best), self._kept_text(best)

        def compare(task: Future[str | None]) -> None:
            if None not in (measured_on, self.data) and measured_on != self.data:
                logger.warning(_CHANGED, kept, "data of the evaluation", "")

        self._data.add_done_callback(compare)

    def _best_step(self) -> int | None:
        return max(self.values, key=lambda step: self._rank(step, self.values[step]), default=None)

    def _kept_text(self, best: int) -> str:
        return f"{checkpoint_name(self._prefix, best)} ({self.metric}={self.values[best]:g}) was kept"

    def _warn_of_config(self, saver: Saver) -> None:
        best = self._best_step()
        if best is None or self._config is None or jax.process_index() != 0:
            return
        extra = saver.extra(best)
        config = extra.get("config") if isinstance(extra, dict) else None
        if found := changes({"config": config}, {"config": self._config}).lines:
            logger.warning(_CHANGED, self._kept_text(best), "config", f": {format_list(found, 5, '; ')}")

    def begin(self, state: TrainState) -> None:
        saver = self._open()
        self._at_start = StateContents(state, params_only=True)
        run = self._run
        best = self._best_step()
        if run is None or (run.restored is not None and not run.is_new_branch):
            self._warn_of_config(saver)
        elif best is not None and jax.process_index() == 0:
            is_own = run.was_best_checkpoint(absolute(self._complete.paths[best]))
            logger.warning(
                "KeepBest: this run starts at step %d, not from a checkpoint of its own, but %s holds %s of %s with "
                "%s=%g, which is kept unless this %s does better; give a new directory to keep only its own",
                state_step(state),
                self._directory,
                checkpoint_name(self._prefix, best),
                "an earlier start of this run" if is_own else "another run",
                self.metric,
                self.values[best],
                "start" if is_own else "run",
            )

    def __call__(self, step: int, state: TrainState, results: Mapping[str, Any]) -> None:
        value = self.score(results)
        saver = self._saver or self._open()
        # The step already has a value if the run resumed from an earlier step.
        has_rival = step in self.values or len(self.values) >= self._keep
        rival = self.values[step if step in self.values else self._worst()] if has_rival else None
        if not math.isfinite(value) or not is_better(value, rival, self._mode):
            return
        contents = StateContents(state, params_only=True)
        if nan := contents.with_nan():  # a metric may be the best ever for NaN
            text = "KeepBest: step %d is not kept, though %s=%g: NaN in %s"
            logger.warning(text, step, self.metric, value, format_list(nan))
            return
        worse, _ = contents.worse_since(self._at_start)
        try:
            self._save(saver, step, state, value, is_finite=not worse)
        except Exception as error:
            if self._run is None:
                raise
            self._run.log_failed(self, error, "save")

    def _save(self, saver: Saver, step: int, state: TrainState, value: float, *, is_finite: bool) -> None:
        wait([] if self._data is None else [self._data], timeout=10)  # it hashes a batch that this evaluation has read
        with internal_transfers():
            extra: dict[str, Any] = {} if self._config is None else {"config": dict(self._config)}
            extra |= {"averages": True} if self._are_averages else {}
            content = CheckpointExtra.of(extra | {self.metric: value})
            saver.save(state, extra=content._replace(finite=is_finite))
            self.values[step] = value
            if self.data is not None:
                self._measured_on[step] = self.data
            # The new checkpoint must be on disk before another is deleted.
            while len(self.values) > self._keep:
                saver.wait()
                worst = self._worst()
                saver.delete(worst)
                del self.values[worst]
                self._complete.paths.pop(worst, None)

    @property
    def mode(self) -> str:
        return self._mode

    @property
    def best_kept(self) -> Best | None:
        """The best checkpoint that is complete."""
        values, paths = dict(self.values), dict(self._complete.paths)
        complete = [Best(values[step], step, path) for step, path in paths.items() if step in values]
        return max(complete, key=lambda best: self._rank(best.step, best.value), default=None)

    def close(self) -> None:
        if self._saver is not None:
            saver, self._saver = self._saver, None
            saver.close()

    def settle(self) -> None:
        """Wait until the save in progress has ended; if it failed, the next call raises its error."""
        if (saver := self._saver) is not None:
            saver.settle()

    def _worst(self) -> int:
        return min(self.values, key=lambda step: self._rank(step, self.values[step]))

    def _rank(self, step: int, value: float) -> tuple[float, int]:
        """Sort key, worst first; of equal values, the later one is worse."""
        return (-value if self._mode == "min" else value), -step

    def _open(self) -> Saver:
        self.close()
        run = self._run
        check_shared(self._directory, "KeepBest: directory")
        leave_out = None if run is None or run.saver is None else run.saver.leave_out
        saver = Saver(self._directory, prefix=self._prefix, max_to_keep=None, leave_out=leave_out)
        self._saver = saver
        self._complete = _Complete(None if run is None else run.background)
        saver.set_listener(self._complete)
        self.values = {}
        for step in saver.all_steps():
            try:
                kept = saver.extra(step)
                value = kept.get(self.metric) if isinstance(kept, Mapping) else None
                if not isinstance(value, int | float):
                    raise ValueError(f"its extra {kept!r} has no {self.metric!r}")
                self.values[step] = float(value)
                self._complete.paths[step] = join_path(saver.directory, checkpoint_name(self._prefix, step))
            except (CheckpointError, ValueError) as error:
                text = "KeepBest skips %s: %s. Saver.restore may still return it; give a new directory"
                logger.warning(text, checkpoint_name(self._prefix, step), error)
        saver.claim()
        return saver
