"""Evaluating on the way, and what follows from it."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jstep.core import trees
from jstep.core.checks import as_function, as_text, kind, shown
from jstep.core.contexts import own_transfers
from jstep.distributed import agreement
from jstep.hooks import memory
from jstep.hooks.answers import StopWith, taken_answer
from jstep.hooks.cadence import CadencedHook, cadence
from jstep.hooks.hook import Clock, Metrics, RunInfo, name_of
from jstep.hooks.results import numbers_of
from jstep.hooks.summaries import scalar
from jstep.hooks.values import read, text
from jstep.hooks.writers import check_writer
from jstep.state import TrainState

_logger = logging.getLogger("jstep")

Then = Callable[[int, TrainState, Mapping[str, Any]], "bool | TrainState | None"]


class EvaluationHook(CadencedHook):
    """Calls a function of the state every so often, and at the end; logs and writes what it returns, and acts on it.

    What those in `then` remember (`get_state`, `set_state`) is kept with each checkpoint: patience goes on counting
    after a restart, and a run that stopped early stays stopped.

    Args:
        evaluate: `evaluate(state) -> {name: number}`, such as `jstep.evaluator` makes. It must not donate the state.
        every_n_steps: How often, in steps: at their multiples.
        every_n_secs: How often, in seconds, instead; or as well, whichever comes first.
        then: Functions `(step, state, results)`, called in order after each evaluation, the one at the end included:
            `EarlyStopping`, `KeepBest`, `ReduceOnPlateau`, or one's own. Each returns None, True (stop after this
            step) or a `TrainState` to go on with, which the next ones see; all are called.
        summary_writer: Any object with `add_summary(summary, global_step)`; gets each number as `prefix/name`.
            None for the one that `train` opens in its `logdir`, if any.
        prefix: Before the names, in the log and in the summaries.
        clock: Seconds; for tests.

    Attributes:
        results: Step → what evaluate returned, of this run.
        newest: The last step evaluated and its results, by the names they are logged under; or None.
        stopped_by: The function in `then` that stopped the run, or None.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is not positive, or none is given.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> def evaluate(state):
        ...     return {"w": float(state.params["w"])}
        >>> stop = jstep.EarlyStopping("w", patience=2, mode="max", min_delta=0.2)
        >>> hook = jstep.EvaluationHook(evaluate, every_n_steps=1, then=[stop])
        >>> state = jstep.train(train_step, state, lambda n: jnp.ones(()), 10, hooks=[hook], progress=False)
        >>> hook.results
        {1: {'w': 0.5}, 2: {'w': 0.75}, 3: {'w': 0.875}, 4: {'w': 0.9375}}

    Source: `tf.contrib.learn` monitors; the ValidationMonitor of old.
    """

    def __init__(
        self,
        evaluate: Callable[[TrainState], Mapping[str, Any]],
        *,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        then: Sequence[Then] = (),
        summary_writer: Any = None,
        prefix: str = "eval",
        clock: Clock = time.monotonic,
    ) -> None:
        self._evaluate = as_function(evaluate, "evaluate", "of the state")
        self._writer, self._prefix = check_writer(summary_writer), as_text(prefix, "prefix")
        self._takes_writer = summary_writer is None
        self._then = _functions(then)
        super().__init__(
            cadence(steps=("every_n_steps", every_n_steps), secs=("every_n_secs", every_n_secs), clock=clock),
            together=True,  # the state lies over all processes, so all of them evaluate it
        )
        self.results: dict[int, Mapping[str, Any]] = {}
        self.newest: tuple[int, dict[str, Any]] | None = None
        self._told: int | None = None
        self._is_kept = False
        self.stopped_by: str | None = None

    def use_run(self, run: RunInfo) -> None:
        """Takes the writer of `train`, where the hook was made without one, and hands the run on."""
        super().use_run(run)
        if self._takes_writer:
            self._writer = run.writer
        self._is_kept = run.saver is not None
        self._each("use_run", run)

    def begin(self, state: TrainState) -> bool:
        """Seconds count from here; a true result of one of `then`'s: no step is made."""
        self.results, self.newest, self._told, self.stopped_by = {}, None, None, None
        super().begin(state)
        return any(self._each("begin", state))

    def get_state(self) -> Any:
        """What those in `then` remember, and the step they were told of last."""
        return {"step": self._told, "then": memory.states_of(self._then, "EvaluationHook(then=…)")}

    def set_state(self, value: Any) -> bool:
        """Gives it back; true where the run had stopped."""
        self._told = value["step"]
        return memory.set_states(self._then, value["then"], "EvaluationHook(then=…)")

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Evaluates when due; what those in `then` made of it is the answer."""
        if not self.is_due(step):
            return None
        try:
            return self._run(step, state)
        finally:
            self.has_happened()

    def end(self, step: int, state: TrainState) -> "TrainState | None":
        """Evaluates the last state, unless that is done."""
        if step in self.results:
            return None
        answer = self._run(step, state)
        answer = answer.state if isinstance(answer, StopWith) else answer
        return answer if isinstance(answer, TrainState) else None

    def before_save(self, step: int) -> bool | None:
        """Asks those in `then` that have something to say."""
        return any(self._each("before_save", step))

    def close(self) -> None:
        """Closes those in `then`."""
        super().close()
        self._each("close")

    def _run(self, step: int, state: TrainState) -> Any:
        if self.run is not None:
            self.run.pending.hand_over_all()  # rows of earlier steps come before the results of this one
        values = self._evaluate(state)
        if not isinstance(values, Mapping):
            raise TypeError(f"evaluate returned {type(values).__name__}; it must return a mapping of names to numbers")
        if (path := trees.donated_leaf(state)) is not None:
            raise RuntimeError(
                f"evaluate used the state up: its {path!r} was donated, and the run cannot go on with it. Evaluate "
                "without donation, or a copy: jax.tree.map(jnp.copy, state)"
            )
        if self._then and not agreement.is_alone():
            values = {**values, **_of_process_0(values)}
        self.results[step] = values
        named = {f"{self._prefix}/{name}": value for name, value in values.items()}
        self.newest = (step, numbers_of(named))
        if jax.process_index() == 0:
            _logger.info("step %d  %s", step, text(named))
        if self._writer is not None:
            with own_transfers():
                for name, value in named.items():
                    self._writer.add_summary(scalar(name, value), step)
        # A finished run that is started again evaluates its last state once more; it is no second evaluation.
        if self._told == step:
            return None
        self._told = step
        answer = self._act(step, state, values)
        if self._is_kept and len(self.results) == 1:
            self.get_state()  # what no checkpoint can hold is said now, not at the first save, perhaps in an hour
        return answer

    def _act(self, step: int, state: TrainState, values: Mapping[str, Any]) -> Any:
        """What `then` makes of the results: both answers may come of one evaluation, and none is lost."""
        given, stop = state, False
        for function in self._then:
            answer = function(step, given, values)
            stop_now, given = taken_answer(answer, given, step, f"then: {name_of(function)}")
            if stop_now:
                self.stopped_by = name_of(function)
            stop = stop or stop_now
        if stop and given is not state:
            return StopWith(given)
        if given is not state:
            return given
        return True if stop else None

    def _each(self, method: str, *args: Any) -> list[bool]:
        return [bool(getattr(one, method)(*args)) for one in self._then if hasattr(one, method)]


def _of_process_0(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of the first process, for all to decide alike by."""
    numbers = {name: repr(float(value)) for name, value in read(numbers_of(values)).items()}
    told = agreement.told_to_all(json.dumps(numbers).encode())
    return {name: float(value) for name, value in json.loads(told).items()}


def _functions(then: Any) -> tuple[Any, ...]:
    """The functions.

    Raises:
        TypeError: They are no sequence of functions.
    """
    what = "then: must be a sequence of functions (step, state, results)"
    if callable(then):
        raise TypeError(f"{what}, got {kind(then)}; give a list: then=[…]")
    try:
        functions = tuple(then)
    except TypeError:
        raise TypeError(f"{what}, got {kind(then)}") from None
    for i, function in enumerate(functions):
        if isinstance(function, type) or not callable(function):
            raise TypeError(f"then[{i}]={shown(function)}: must be a function (step, state, results)")
    return functions
