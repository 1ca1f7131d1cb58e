"""The hook that evaluates the state of a run, and calls callbacks with the results."""

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jstep import summary
from jstep.core import processes, trees
from jstep.core.checks import as_bool, as_function, as_functions, as_string, format_value, hook_name
from jstep.core.exceptions import setting
from jstep.core.logs import IN_BAR, logger
from jstep.core.meshes import internal_transfers
from jstep.core.stopwatch import EVALUATING, STEPPING
from jstep.evaluating.callbacks import (
    leave_run,
    prepare_run_save,
    use_evaluation,
    use_run,
    wait_until_finished,
)
from jstep.evaluating.evaluator import STOP_REQUESTED, EvaluationAbandoned, Evaluator
from jstep.evaluating.keep_best import Best, KeepBest, best_on_disk
from jstep.hooks.cadence import Clock, make_cadence
from jstep.hooks.hook import StopWith, as_hook_result, check_spellings
from jstep.hooks.hook_states import (
    StateFormat,
    check_stateful,
    get_states,
    hook_key,
    register_format,
    set_states,
)
from jstep.hooks.run_hook import RunHook
from jstep.hooks.run_info import RunInfo
from jstep.metering.numbers import format_numbers, is_numeric, numbers_in, read_values
from jstep.state.global_step import check_alive
from jstep.state.train_state import TrainState
from jstep.summary.run_writer import writer_of
from jstep.training.metrics import Metrics

_CALLBACKS = "EvaluationHook(callbacks=…)"
_METHODS_OF_CALLBACKS = ("begin", "before_save", "get_state", "set_state", "close")
"""The methods that are called on a callback that is an object."""

EvaluationCallback = Callable[[int, TrainState, Mapping[str, Any]], "bool | TrainState | None"]


class EvaluationHook(RunHook):
    """A hook that evaluates the state periodically and at the end.

    It logs the results, and runs callbacks. Results are also written to `train`'s `logdir`. The
    states of callbacks are saved with each checkpoint. If a run ends between two due evaluations,
    its last evaluation is not passed to callbacks with a true attribute `on_cadence_only`. A
    callback that is an object may also have the methods `begin`, `before_save`, `get_state` and
    `set_state`, and `close()`, and the attributes `key` and `watches`, with the same meaning as for
    a `Hook`. An evaluation that a signal interrupts is repeated after a restart.

    Args:
        evaluate: `evaluate(state) -> {name: number}`, such as a `jstep.evaluator`. It must not
            donate the state.
        every_n_steps: Interval in steps; due at its multiples.
        every_n_secs: Interval in seconds. If both are given, the first to elapse counts.
        callbacks: Functions `(step, state, results)`, such as `EarlyStopping`, called in order
            after each evaluation. Each returns None, True (stop after this step) or a `TrainState`
            to continue with.
        prefix: Prefix of the names in the log and in the summaries, different for each hook of a
            run.
        key: The name of its state in checkpoints; None for its class and prefix.
        clock: Returns seconds; replaced in tests.
        at_start: Whether to evaluate the state before the first step of a fresh run, too.

    Attributes:
        results: Step → result of `evaluate`, for all evaluations since the run was started or
            restarted. Before the first of these, it has the result of the step that the run resumed
            from, if there is one.
        stop_reason: The `stop_reason` of the first callback that has stopped the run, such as
            `EarlyStopping`; None if none did.

    Raises:
        KeyError: Before the first step or after an evaluation: evaluate does not return the metric
            of a callback.
        ValueError: An argument is not positive, or neither interval is given. Before the first
            step: two hooks have the same prefix, or two callbacks the same `key`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> stop = jstep.EarlyStopping("w", patience=2, mode="max", min_delta=0.2)
        >>> hook = jstep.EvaluationHook(
        ...     lambda state: {"w": float(state.params["w"])}, every_n_steps=1, callbacks=[stop]
        ... )
        >>> state = jstep.train(train_step, state, lambda n: jnp.ones(()), 10, hooks=[hook])
        >>> hook.results
        {1: {'w': 0.5}, 2: {'w': 0.75}, 3: {'w': 0.875}, 4: {'w': 0.9375}}

    Source: `ValidationMonitor` of `tf.contrib.learn`.
    """

    key: str | None = None

    _phase = EVALUATING
    _instead = "call the evaluator itself, evaluate(state), and the callbacks with its results"

    def __init__(
        self,
        evaluate: Callable[[TrainState], Mapping[str, Any]],
        *,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        callbacks: Sequence[EvaluationCallback] = (),
        prefix: str = "eval",
        key: str | None = None,
        clock: Clock = time.monotonic,
        at_start: bool = False,
    ) -> None:
        self._evaluates_first = as_bool(at_start, "at_start")
        self._evaluate = as_function(evaluate, "evaluate", "of the state")
        self.prefix = as_string(prefix, "prefix")
        self.watches = self.prefix  # identifies the hook among others of its class
        self.key = key
        if key is not None:
            self.key = as_string(key, "key", "the name under which checkpoints store its state")
        self._callbacks = as_functions(callbacks, "callbacks", "(step, state, results)")
        for i, callback in enumerate(self._callbacks):
            check_spellings(callback, f"callbacks[{i}]", "a callback", _METHODS_OF_CALLBACKS)
        self._stopping_key: str | None = None  # the key of the callback that stopped the run
        # The state is sharded over all processes, so all of them evaluate it.
        self._cadence = make_cadence(
            steps=("every_n_steps", every_n_steps),
            secs=("every_n_secs", every_n_secs),
            clock=clock,
            together=True,
        )
        self.results: dict[int, Mapping[str, Any]] = {}
        self._newest: dict[str, Any] | None = None  # the last results, by their logged names
        self._restored_step = -1  # the step whose result an earlier start has made
        # The step whose evaluation was due, and abandoned by a signal.
        self._interrupted_step: int | None = None

    @property
    def _returns_state(self) -> bool:  # type: ignore[override]
        return bool(self._callbacks)

    def _owes_end(self, step: int) -> bool:
        return step not in self.results

    @property
    def _stopped_by(self) -> str | None:
        return self._stopping_key

    @property
    def stop_reason(self) -> str | None:
        reasons = (getattr(callback, "stop_reason", None) for callback in self._callbacks)
        return next((reason for reason in reasons if isinstance(reason, str)), None)

    def _use_run(self, run: RunInfo) -> None:
        """Pass the run to callbacks; reject a duplicate prefix."""
        if sum(other.prefix == self.prefix for other in run.evaluations) > 1:
            raise ValueError(
                f"hooks: prefix={self.prefix!r}: must be of one EvaluationHook, whose results it "
                "names; give another"
            )
        super()._use_run(run)
        for callback in self._callbacks:
            use_run(callback, run)

    def begin(self, state: TrainState) -> bool:
        """Begin the callbacks; if one of them returns True, no step is run."""
        super().begin(state)
        check_alive(state)
        self.results = {}
        self._newest = None
        self._interrupted_step = None
        self._restored_step = -1
        names = self._evaluate.check(state) if isinstance(self._evaluate, Evaluator) else None
        for callback in self._callbacks:
            use_evaluation(callback, self.prefix, names, self._evaluate)
        check_stateful(self._callbacks, _CALLBACKS)
        self._stopping_key = None
        return any(self._call_each("begin", state))

    @property
    def callbacks(self) -> Sequence[EvaluationCallback]:
        return self._callbacks

    def get_state(self) -> Any:
        """Return the states of callbacks, and any results at the step of the checkpoint.

        A start that finds these does not evaluate that step again: a hook behind this one, or the
        body, may have replaced the state since.
        """
        results = self.results.get(self._run.step)
        return {
            "results": None if results is None else read_values(numbers_in(results)),
            "interrupted_step": self._interrupted_step,
            "callbacks": get_states(self._callbacks, _CALLBACKS),
        }

    def set_state(self, value: Any) -> bool:
        if value["results"] is not None:
            self._restored_step = self._run.step
            self.results = {self._restored_step: value["results"]}
        self._interrupted_step = value["interrupted_step"]
        return set_states(self._callbacks, value["callbacks"], _CALLBACKS)

    def _call_at_start(self, step: int, state: TrainState) -> Any:
        if not self._evaluates_first:
            return None
        return self._evaluate_at(step, state, is_scheduled=False)

    def _call_again(self, step: int, state: TrainState) -> Any:
        """Repeat the evaluation of this step that a signal interrupted."""
        if not self._was_interrupted(step):
            return None
        result = self._evaluate_at(step, state, is_scheduled=True)
        if self._was_interrupted(step):  # again, which ends the run
            return True
        return result

    def _when_due(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        return self._evaluate_at(step, state, is_scheduled=True)

    def end(self, step: int, state: TrainState) -> "TrainState | None":
        if step in self.results:
            return None
        result = self._evaluate_at(step, state, self._is_scheduled(step))
        if isinstance(result, StopWith):
            return result.state
        return result if isinstance(result, TrainState) else None

    def before_save(self, step: int) -> bool | None:
        for callback in self._callbacks:
            prepare_run_save(callback, step)
        return any(self._call_each("before_save", step))

    def flush(self) -> None:
        for callback in self._callbacks:
            wait_until_finished(callback)

    def close(self) -> None:
        super().close()
        try:
            self._call_each("close")
        finally:
            for callback in self._callbacks:
                leave_run(callback)

    def _is_scheduled(self, step: int) -> bool:
        is_due = self._cadence is not None and self._cadence.has_multiple(step)
        return is_due or self._was_interrupted(step)

    def _was_interrupted(self, step: int) -> bool:
        return self._interrupted_step == step

    def _evaluate_at(self, step: int, state: TrainState, is_scheduled: bool) -> Any:
        """Evaluate and report the results; return what callbacks want of the run."""
        # If a signal abandons this evaluation, the checkpoint of this step records it, for
        # `_call_again`. Unscheduled ones need no record: the one at the end is repeated with the
        # whole end, and only a fresh run makes the one before the first step.
        self._interrupted_step = step if is_scheduled else None
        try:
            results = self._results_of(state)
        except EvaluationAbandoned:
            if processes.is_process_0():
                logger.info(
                    "step %d: stopping; %s is interrupted and runs after the restart",
                    step,
                    hook_key(self),
                )
            return None
        self._interrupted_step = None
        self._report(step, results)
        return self._run_callbacks(step, state, results, is_scheduled)

    def _results_of(self, state: TrainState) -> Mapping[str, Any]:
        check_alive(state)  # another hook may have donated it; on a mesh, JAX would crash
        with self._run.watch.phase(STEPPING), contextlib.suppress(Exception):
            # A failed step raises below.
            jax.block_until_ready(state)
        self._run.transfers.deliver_all()  # rows of earlier steps precede these results
        with setting(STOP_REQUESTED, self._run.components.poll_stop_signal):
            results = self._evaluate(state)
        if not isinstance(results, Mapping):
            raise TypeError(
                f"evaluate returned {type(results).__name__}; it must return a mapping "
                "of names to numbers"
            )
        for name, value in results.items():
            if not is_numeric(value) or np.size(value) != 1:
                raise TypeError(
                    f"evaluate: results[{name!r}]={format_value(value)}: "
                    "must be a number; log it in evaluate"
                )
        donated = trees.find_donated(state)
        if donated is not None:
            raise RuntimeError(
                f"evaluate: must not donate the state, and donated its {donated!r}; "
                "compile it without"
            )
        if self._callbacks and not processes.is_single_process():
            # Callbacks decide from these, and a user's function may return other numbers on another
            # process.
            return {**results, **_numbers_of_process_0(results)}
        return results

    def _report(self, step: int, results: Mapping[str, Any]) -> None:
        if self._restored_step != step:
            # From here on, `results` has only results of this start.
            self.results.pop(self._restored_step, None)
        self.results[step] = results
        named = {f"{self.prefix}/{name}": value for name, value in results.items()}
        self._newest = numbers_in(named)
        if processes.is_process_0():
            logger.info("step %d  %s", step, format_numbers(named), extra=IN_BAR)
        writer = writer_of(self._run)
        if writer is None:
            return
        try:
            with internal_transfers():
                for name, value in named.items():
                    writer.add_summary(summary.scalar(name, value, collections=()), step)
        except Exception as error:
            self._run.log_failed(self, error)  # callbacks may save

    def _run_callbacks(
        self, step: int, state: TrainState, results: Mapping[str, Any], is_scheduled: bool
    ) -> Any:
        if not is_scheduled:
            self._run.components.freeze_batch_position()
        new_state = state
        stopped_by: str | None = None
        for function in self._callbacks:
            if not is_scheduled and getattr(function, "on_cadence_only", False):
                continue
            result = function(step, new_state, results)
            stop, new_state = as_hook_result(
                result, new_state, step, f"callbacks: {hook_name(function)}"
            )
            if stop and stopped_by is None:
                stopped_by = hook_key(function)
        if self._run.saver is not None and len(self.results) == 1:
            self.get_state()  # raises now, not at the first save, if a state cannot be saved
        self._stopping_key = self._stopping_key or stopped_by
        if new_state is state:
            return None if stopped_by is None else True
        return new_state if stopped_by is None else StopWith(new_state)

    def _call_each(self, method: str, *args: Any) -> list[bool]:
        return [
            bool(getattr(callback, method)(*args))
            for callback in self._callbacks
            if hasattr(callback, method)
        ]


register_format(
    EvaluationHook, StateFormat(1, {"results": None, "interrupted_step": None, "callbacks": None})
)


# What observers call beside the methods of `Hook`.


def newest_results(hook: EvaluationHook) -> dict[str, Any] | None:
    """Return the results of this start's last evaluation by logged name; None before it."""
    return hook._newest


def watched_metrics(hook: EvaluationHook) -> list[tuple[str, Any]]:
    """Return the logged names of the metrics that callbacks watch, each with its callback."""
    prefix = f"{hook.prefix}/"
    watched = []
    for callback in hook.callbacks:
        name = getattr(callback, "metric", None)
        if isinstance(name, str):
            watched.append((f"{prefix}{name.removeprefix(prefix)}", callback))
    return watched


def best_checkpoints(hook: EvaluationHook) -> dict[str, Best]:
    """Return the best checkpoints that callbacks keep, by the logged name of their metric."""
    found = {}
    for name, callback in watched_metrics(hook):
        if not isinstance(callback, KeepBest):
            continue
        best = best_on_disk(callback)
        if best is not None:
            found[name] = best
    return found


def _numbers_of_process_0(values: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: repr(float(value)) for name, value in read_values(numbers_in(values)).items()}
    shared = processes.broadcast_bytes(json.dumps(numbers).encode())
    return {name: float(value) for name, value in json.loads(shared).items()}
