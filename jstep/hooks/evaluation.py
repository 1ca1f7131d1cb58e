"""Evaluating on the way, and what follows from it."""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jstep.core import trees
from jstep.core.checks import as_function, as_text
from jstep.core.contexts import own_transfers
from jstep.distributed import agreement
from jstep.hooks.answers import StopWith
from jstep.hooks.cadence import CadencedHook, cadence
from jstep.hooks.callbacks import Callbacks, Then
from jstep.hooks.hook import Clock, Metrics, RunInfo
from jstep.hooks.interruption import EvaluationAbandoned, interruptible
from jstep.hooks.memory import key_of
from jstep.hooks.results import numbers_of
from jstep.hooks.summaries import scalar
from jstep.hooks.values import read, text
from jstep.hooks.writers import check_writer
from jstep.state import TrainState
from jstep.timeline.stopwatch import STEPPING

_logger = logging.getLogger("jstep")


class EvaluationHook(CadencedHook):
    """Calls a function of the state every so often, and at the end; logs and writes its results, and acts on them.

    What the functions in `then` remember (`get_state`, `set_state`) is kept with each checkpoint, under the key of this
    hook: patience goes on counting after a restart, and a run that stopped early stays stopped.

    The evaluation at the end of a run that is not due by itself ("off the cadence") is logged and shown to `KeepBest`
    and to functions of your own, but not to those that have a true attribute `on_cadence_only`, such as `EarlyStopping`
    and `ReduceOnPlateau`: a run in two parts decides as one run does.

    If a signal arrives during an evaluation by `jstep.evaluator`, the evaluation is abandoned between two batches, the
    run saves and leaves, and the evaluation is due again when the run is restarted.

    Args:
        evaluate: `evaluate(state) -> {name: number}`, such as `jstep.evaluator` makes. It must not donate the state.
        every_n_steps: How often, in steps: at their multiples.
        every_n_secs: How often, in seconds, instead; or as well, whichever comes first.
        callbacks: Functions `(step, state, results)`, called in order after each evaluation: `EarlyStopping`,
            `KeepBest`, `ReduceOnPlateau`, or your own. Each returns None, True (stop after this step) or a `TrainState`
            to continue with, which the next ones see; all are called.
        then: Another name of `callbacks`; give one of the two.
        summary_writer: Any object with `add_summary(summary, global_step)`; gets each number as `prefix/name`.
            None for the one that `train` opens in its `logdir`, if any.
        prefix: Before the names, in the log and in the summaries; each hook of a run needs its own.
        key: Under which name checkpoints keep what the hook remembers; None for its class and prefix.
        clock: Seconds; for tests.

    Attributes:
        key: The name that was given.
        results: Step → what evaluate returned, of this run.
        newest: The last step evaluated and its results, by the names they are logged under; or None.

    Raises:
        TypeError: Both `callbacks` and `then` are given.
        ValueError: An argument is not positive, neither cadence is given; before the first step: two hooks have the
            same prefix, or two functions the same `key`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> def evaluate(state):
        ...     return {"w": float(state.params["w"])}
        >>> stop = jstep.EarlyStopping("w", patience=2, mode="max", min_delta=0.2)
        >>> hook = jstep.EvaluationHook(evaluate, every_n_steps=1, callbacks=[stop])
        >>> state = jstep.train(train_step, state, lambda n: jnp.ones(()), 10, hooks=[hook], progress=False)
        >>> hook.results
        {1: {'w': 0.5}, 2: {'w': 0.75}, 3: {'w': 0.875}, 4: {'w': 0.9375}}

    Source: `tf.contrib.learn` monitors; the ValidationMonitor of old.
    """

    key: str | None = None

    def __init__(
        self,
        evaluate: Callable[[TrainState], Mapping[str, Any]],
        *,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        then: Sequence[Then] = (),
        callbacks: Sequence[Then] | None = None,
        summary_writer: Any = None,
        prefix: str = "eval",
        key: str | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._evaluate = as_function(evaluate, "evaluate", "of the state")
        self._writer, self.prefix = check_writer(summary_writer), as_text(prefix, "prefix")
        self._takes_writer = summary_writer is None
        self.key = None if key is None else as_text(key, "key", "the name that checkpoints keep its memory under")
        if callbacks is None:
            self._then = Callbacks(then, "then")
        elif isinstance(then, tuple) and not then:
            self._then = Callbacks(callbacks, "callbacks")
        else:
            raise TypeError("then and callbacks are two names of one argument: give one of them")
        super().__init__(
            cadence(steps=("every_n_steps", every_n_steps), secs=("every_n_secs", every_n_secs), clock=clock),
            together=True,  # the state lies over all processes, so all of them evaluate it
        )
        self.results: dict[int, Mapping[str, Any]] = {}
        self.newest: tuple[int, dict[str, Any]] | None = None
        self._told: int | None = None
        self._owed: int | None = None
        self._stop_wished: Callable[[], bool] = lambda: False
        self._is_kept = False

    @property
    def watches(self) -> str:
        """The prefix: what tells it from other hooks of its class."""
        return self.prefix

    @property
    def why(self) -> str | None:
        """Why no step is to be made, as the function that wants none says it; None if none does."""
        return self._then.why

    @property
    def stopped_by(self) -> str | None:
        """The function in `then` that stopped the run, or None."""
        return self._then.stopped_by

    def use_run(self, run: RunInfo) -> None:
        """Takes the writer of `train`, if the hook was made without one, and hands the run on; refuses a twin."""
        if sum(other.prefix == self.prefix for other in run.evaluations) > 1:
            raise ValueError(
                f"hooks: EvaluationHook(prefix={self.prefix!r}): must be the prefix of one hook, got it twice: their "
                "results would be logged and written under the same names; give each a prefix of its own"
            )
        super().use_run(run)
        if self._takes_writer:
            self._writer = run.writer
        self._is_kept, self._stop_wished = run.saver is not None, run.stop_wished
        self._then.each("use_run", run)

    def begin(self, state: TrainState) -> bool:
        """Seconds count from here; a true result of one of `then`'s: no step is made."""
        self.results, self.newest, self._told, self._owed = {}, None, None, None
        super().begin(state)
        return self._then.begin(state)

    def get_state(self) -> Any:
        """What those in `then` remember, the step they were told of last, and that of an evaluation cut short."""
        return {"step": self._told, "owed": self._owed, "then": self._then.get_state()}

    def set_state(self, value: Any) -> bool:
        """Gives it back; true if the run had stopped. What is not its own is a log line."""
        fields = value if isinstance(value, dict) else {}
        steps = [fields.get("step", ""), fields.get("owed", "")]
        if not all(step is None or type(step) is int for step in steps):
            _logger.warning("hooks: %s cannot read what the checkpoint remembers of it: it starts fresh", key_of(self))
            return False
        self._told, self._owed = steps
        return self._then.set_state(fields.get("then"))

    def evaluate_owed(self, step: int, state: TrainState) -> Any:
        """Called once after a restore: the evaluation that a signal cut short at this step."""
        if self._owed != step:
            self._owed = None
            return None
        answer = self._run(step, state, self._is_on_cadence(step))
        return True if self._owed == step else answer  # cut short again

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Evaluates when due; what those in `then` made of it is the answer."""
        if not self.is_due(step):
            return None
        try:
            return self._run(step, state, on_cadence=True)
        finally:
            self.has_happened()

    def end(self, step: int, state: TrainState) -> "TrainState | None":
        """Evaluates the last state, unless that is done."""
        if step in self.results:
            return None
        answer = self._run(step, state, self._is_on_cadence(step))
        answer = answer.state if isinstance(answer, StopWith) else answer
        return answer if isinstance(answer, TrainState) else None

    def before_save(self, step: int) -> bool | None:
        """Asks those in `then` that have something to say."""
        return any(self._then.each("before_save", step))

    def close(self) -> None:
        """Closes those in `then`."""
        super().close()
        self._then.each("close")

    def _is_on_cadence(self, step: int) -> bool:
        """Whether an evaluation is due at this step by itself, or was when it was cut short."""
        return self._owed == step or self.is_multiple(step)

    def _run(self, step: int, state: TrainState, on_cadence: bool) -> Any:
        # If this evaluation does not come to its end, whatever stops it, the checkpoint of this step says so.
        self._owed = step if on_cadence else None
        if self.run is not None:
            with self.run.watch.part(STEPPING), contextlib.suppress(Exception):  # a step that failed says so below
                jax.block_until_ready(state)
            self.run.pending.hand_over_all()  # rows of earlier steps come before the results of this one
        try:
            with interruptible(self._stop_wished):
                values = self._evaluate(state)
        except EvaluationAbandoned:
            if jax.process_index() == 0:
                _logger.info(
                    "step %d: the run is to stop; %s is abandoned, and due after a restart", step, key_of(self)
                )
            return None
        if not isinstance(values, Mapping):
            raise TypeError(f"evaluate returned {type(values).__name__}; it must return a mapping of names to numbers")
        if (path := trees.donated_leaf(state)) is not None:
            raise RuntimeError(
                f"evaluate used the state up: its {path!r} was donated, and the run cannot go on with it. Evaluate "
                "without donation, or a copy: jax.tree.map(jnp.copy, state)"
            )
        self._owed = None
        if self._then and not agreement.is_alone():
            values = {**values, **_of_process_0(values)}
        self.results[step] = values
        named = {f"{self.prefix}/{name}": value for name, value in values.items()}
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
        answer = self._then(step, state, values, on_cadence=on_cadence)
        if self._is_kept and len(self.results) == 1:
            self.get_state()  # what no checkpoint can hold is said now, not at the first save, perhaps in an hour
        return answer


def _of_process_0(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of the first process, for all to decide alike by."""
    numbers = {name: repr(float(value)) for name, value in read(numbers_of(values)).items()}
    told = agreement.told_to_all(json.dumps(numbers).encode())
    return {name: float(value) for name, value in json.loads(told).items()}
