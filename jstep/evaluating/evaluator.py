"""The evaluator, and the hook that calls it."""

import contextlib
import contextvars
import dataclasses
import functools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep import summary
from jstep.core import trees
from jstep.core.checks import as_bool, as_function, as_functions, as_text, kind, shown
from jstep.core.exceptions import explain_jax, note, setting
from jstep.core.meshes import Attempts, internal_transfers, mesh_of, using_mesh
from jstep.core.placement import refuse_shapes
from jstep.core.stopwatch import EVALUATING, STEPPING
from jstep.core.tracebacks import shortens_tracebacks
from jstep.data.sequence import BatchSequence
from jstep.differentiate.lanes import Lanes, as_lanes, of_each_lane, on_lanes, sum_over_lanes
from jstep.distributed import processes
from jstep.evaluating import evaluation_batches
from jstep.evaluating.callbacks import EvaluationCallback, call_each, called
from jstep.evaluating.evaluation_batches import OBJECT, EvaluationBatches, Metric, Totals
from jstep.hooks.cadence import cadence
from jstep.hooks.hook import Clock, Metrics, StopWith
from jstep.hooks.numbers import numbers_of, read, start_transfer, text
from jstep.hooks.run_hook import OwnRun, RunHook, check_writer
from jstep.hooks.run_info import RunInfo
from jstep.hooks.states import check_owners, get_states, key_of, set_states
from jstep.optimizers.averages import NAME, as_average_names, averaged_params
from jstep.optimizers.parameter_free import schedule_free_params
from jstep.state.global_step import require_alive
from jstep.state.train_state import MODEL_STATE, TrainState, require_state
from jstep.training.explain import explain_one_argument

# Periodic evaluation with callbacks.

_logger = logging.getLogger("jstep")


class EvaluationHook(RunHook):
    """A hook that evaluates the state periodically and at the end, logs and writes the results, and runs callbacks.

    The states of callbacks (`get_state`, `set_state`) are saved with each checkpoint, under the key of this hook: after
    a restart, the patience of `EarlyStopping` continues to count, and a run that stopped early stays stopped.

    At the end of a run, the state is evaluated even if no evaluation is due at that step. Such an evaluation is logged
    and passed to `KeepBest` and to custom callbacks, but not to callbacks with a true attribute `on_cadence_only`, such
    as `EarlyStopping` and `ReduceOnPlateau`. A run in two parts thus makes the same decisions as a single run.

    What a `jstep.evaluator` cannot evaluate is an error before the first step: its metric function is evaluated for the
    shapes of the first batch, and its averages and model state are looked up.

    If a signal arrives during an evaluation by `jstep.evaluator`, the evaluation is abandoned between two batches, the
    run saves and exits, and the evaluation is repeated when the run is restarted.

    Args:
        evaluate: `evaluate(state) -> {name: number}`, such as a `jstep.evaluator`. It must not donate the state.
        every_n_steps: Interval in steps; due at its multiples.
        every_n_secs: Interval in seconds. If both are given, whichever comes first.
        callbacks: Functions `(step, state, results)`, called in order after each evaluation: `EarlyStopping`,
            `KeepBest`, `ReduceOnPlateau`, or your own. Each returns None, True (stop after this step) or a `TrainState`
            to continue with, which later callbacks see. All of them are called.
        then: An alias of `callbacks`; give only one of the two.
        summary_writer: Any object with `add_summary(summary, global_step)`; receives each number as `prefix/name`.
            None for the one that `train` opens in its `logdir`, if any.
        prefix: Prefix of the names in the log and in the summaries; must be different for each hook of a run.
        key: The name under which checkpoints store the state of the hook; None for its class and prefix.
        clock: Returns seconds; replaced in tests.
        at_start: Whether to evaluate the state before the first step of a fresh run, too, like at its end: not after a
            restart.

    Attributes:
        key: The argument `key`.
        results: Step → result of `evaluate`, for this run.

    Raises:
        TypeError: Both `callbacks` and `then` are given.
        ValueError: An argument is not positive, or neither interval is given. Before the first step: two hooks have the
            same prefix, or two callbacks the same `key`.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> def evaluate(state):
        ...     return {"w": float(state.params["w"])}
        >>> stop = jstep.EarlyStopping("w", patience=2, mode="max", min_delta=0.2)
        >>> hook = jstep.EvaluationHook(evaluate, every_n_steps=1, callbacks=[stop])
        >>> state = jstep.train(train_step, state, lambda n: jnp.ones(()), 10, hooks=[hook])
        >>> hook.results
        {1: {'w': 0.5}, 2: {'w': 0.75}, 3: {'w': 0.875}, 4: {'w': 0.9375}}

    Source: `ValidationMonitor` of `tf.contrib.learn`.
    """

    key: str | None = None

    part = EVALUATING

    def __init__(
        self,
        evaluate: Callable[[TrainState], Mapping[str, Any]],
        *,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        then: Sequence[EvaluationCallback] = (),
        callbacks: Sequence[EvaluationCallback] | None = None,
        summary_writer: Any = None,
        prefix: str = "eval",
        key: str | None = None,
        clock: Clock = time.monotonic,
        at_start: bool = False,
    ) -> None:
        self._at_start = as_bool(at_start, "at_start")
        self._evaluate = as_function(evaluate, "evaluate", "of the state")
        self._given_writer, self.prefix = check_writer(summary_writer), as_text(prefix, "prefix")
        self.watches = self.prefix  # identifies the hook among others of its class
        self.key = None if key is None else as_text(key, "key", "the name under which checkpoints store its state")
        if callbacks is not None and then != ():
            raise TypeError("then and callbacks are two names of one argument: give one of them")
        self._argument, given = ("then", then) if callbacks is None else ("callbacks", callbacks)
        self._callbacks = as_functions(given, self._argument, "(step, state, results)")
        self._where = f"EvaluationHook({self._argument}=…)"  # in errors and logs
        self.stopped_by: str | None = None  # the key of the callback that stopped the run
        # The state is sharded over all processes, so all of them evaluate it.
        steps, secs = ("every_n_steps", every_n_steps), ("every_n_secs", every_n_secs)
        self.cadence = cadence(steps=steps, secs=secs, clock=clock, together=True)
        self.results: dict[int, Mapping[str, Any]] = {}
        self.newest: tuple[int, dict[str, Any]] | None = None  # the last step and its results, by their logged names
        self._reported_step: int | None = None
        self._owed: int | None = None
        self._left: int | None = None  # the last step, if a signal interrupted its evaluation off the cadence

    @property
    def why(self) -> str | None:
        """The `why` of the callback that ends the run before any step, or None."""
        return next((one.why for one in self._callbacks if isinstance(getattr(one, "why", None), str)), None)

    def use_run(self, run: RunInfo) -> None:
        """Pass the run to callbacks; refuse two hooks with one prefix."""
        if sum(other.prefix == self.prefix for other in run.evaluations) > 1:
            raise ValueError(
                f"hooks: EvaluationHook(prefix={self.prefix!r}): must be the prefix of one hook, got it twice: their "
                "results would be logged and written under the same names; give each hook a different prefix"
            )
        super().use_run(run)
        if not isinstance(run, OwnRun):
            call_each(self._callbacks, "use_run", run)

    @shortens_tracebacks
    def begin(self, state: TrainState) -> bool:
        """Reset the clock and begin the callbacks; if one of them returns True, no step is run.

        Raises:
            Exception: A `jstep.evaluator` cannot evaluate this state: what its metric function raises, for example.
            RuntimeError: The state was donated.
        """
        require_alive(state)
        self.results, self.newest, self._reported_step, self._owed, self._left = {}, None, None, None, None
        super().begin(state)
        if isinstance(self._evaluate, CheckedEvaluation):
            self._evaluate.check(state)
        check_owners(self._callbacks, self._where)
        self.stopped_by = None
        return any(call_each(self._callbacks, "begin", state))

    def get_state(self) -> Any:
        """Return the states of callbacks, the last step they have seen, and the step of an interrupted evaluation."""
        left = {} if self._left is None else {"left": self._left}
        then = get_states(self._callbacks, self._where)
        return {"step": self._reported_step, "owed": self._owed, "then": then, **left}

    def set_state(self, value: Any) -> bool:
        """Restore the states; return True if a callback had stopped the run. A value of unknown format is logged."""
        fields = value if isinstance(value, dict) else {}
        steps = [fields.get("step", ""), fields.get("owed", ""), fields.get("left")]
        if not all(step is None or type(step) is int for step in steps):
            _logger.warning("hooks: %s cannot read its state in the checkpoint: it starts fresh", key_of(self))
            return False
        self._reported_step, self._owed, self._left = steps
        return set_states(self._callbacks, fields.get("then"), self._where)

    def evaluate_first(self, step: int, state: TrainState) -> Any:
        """Called once before the first step of a fresh run."""
        return self._evaluate_at(step, state, on_cadence=False) if self._at_start else None

    def evaluate_owed(self, step: int, state: TrainState) -> Any:
        """Called once after a restore: repeats the evaluation that a signal interrupted at this step."""
        if self._owed != step:
            return None
        result = self._evaluate_at(step, state, self._is_on_cadence(step))
        return True if self._owed == step else result  # interrupted again

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> Any:
        """Evaluate; return the combined result of the callbacks."""
        return self._evaluate_at(step, state, on_cadence=True)

    @shortens_tracebacks
    def end(self, step: int, state: TrainState) -> "TrainState | None":
        """Evaluate the last state, unless it was evaluated already."""
        if step in self.results:
            return None
        result = self._evaluate_at(step, state, self._is_on_cadence(step))
        result = result.state if isinstance(result, StopWith) else result
        return result if isinstance(result, TrainState) else None

    def owes_end(self, step: int) -> bool:
        """Whether a signal interrupted the evaluation of this last step, so that callbacks have not seen it."""
        return self._left == step

    def repeat(self, step: int, state: TrainState) -> None:
        """Evaluate the state of a finished run that is started again, without callbacks."""
        self._reported_step = step
        if step not in self.results:
            self._evaluate_at(step, state, self._is_on_cadence(step))

    def before_save(self, step: int) -> bool | None:
        """Call `before_save` of the callbacks; return whether one of them prevents the save."""
        return any(call_each(self._callbacks, "before_save", step))

    def close(self) -> None:
        """Close the callbacks."""
        super().close()
        call_each(self._callbacks, "close")

    def _is_on_cadence(self, step: int) -> bool:
        """Whether an evaluation is due at this step, or was due when it was interrupted."""
        return self._owed == step or (self.cadence is not None and self.cadence.has_multiple(step))

    def _evaluate_at(self, step: int, state: TrainState, on_cadence: bool) -> Any:
        require_alive(state)  # another hook may have donated it; on a mesh, JAX would crash
        # If this evaluation is interrupted, the checkpoint of this step records that it is owed.
        self._owed, self._left = (step, None) if on_cadence else (None, step)
        with self.run.watch.part(STEPPING), contextlib.suppress(Exception):  # a failed step raises below
            jax.block_until_ready(state)
        self.run.reports.transfers.deliver_all()  # rows of earlier steps precede these results
        try:
            with setting(_STOP_REQUESTED, self.run.stop_requested):
                values = self._evaluate(state)
        except EvaluationAbandoned:
            if jax.process_index() == 0:
                _logger.info("step %d: stopping; %s is interrupted and runs after the restart", step, key_of(self))
            return None
        if not isinstance(values, Mapping):
            raise TypeError(f"evaluate returned {type(values).__name__}; it must return a mapping of names to numbers")
        _refuse_text(values)
        if (path := trees.donated_leaf(state)) is not None:
            raise RuntimeError(
                f"evaluate must not donate the state: its {path!r} was donated, and the run cannot continue. Evaluate "
                "without donation, or evaluate a copy: jax.tree.map(jnp.copy, state)"
            )
        self._owed = self._left = None
        if self._callbacks and not processes.is_single_process():
            values = {**values, **_of_process_0(values)}
        self.results[step] = values
        named = {f"{self.prefix}/{name}": value for name, value in values.items()}
        self.newest = (step, numbers_of(named))
        if jax.process_index() == 0:
            _logger.info("step %d  %s", step, text(named))
        if self._writer is not None:
            with internal_transfers():
                for name, value in named.items():
                    self._writer.add_summary(summary.scalar(name, value, collections=()), step)
        # Started again before its hooks had ended, a finished run repeats an evaluation that callbacks have seen.
        if self._reported_step == step:
            return None
        self._reported_step = step
        if not on_cadence:
            self.run.before_off_cadence()
        result, stopped_by = called(self._callbacks, self._argument, step, state, values, on_cadence=on_cadence)
        self.stopped_by = self.stopped_by or stopped_by
        if self.run.saver is not None and len(self.results) == 1:
            self.get_state()  # raises now, not at the first save, if a state cannot be saved
        return result


def _refuse_text(values: Mapping[str, Any]) -> None:
    """Refuse results that are strings, or arrays of them."""
    for name, value in values.items():
        if isinstance(value, str | bytes) or getattr(getattr(value, "dtype", None), "kind", "") in ("U", "S"):
            raise TypeError(
                f"evaluate: results[{name!r}]={shown(value)}: must be a number, got {kind(value)}; leave it out, or "
                "log it in evaluate"
            )


def _of_process_0(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of process 0, so that all processes make the same decisions."""
    numbers = {name: repr(float(value)) for name, value in read(numbers_of(values)).items()}
    shared = processes.broadcast_bytes(json.dumps(numbers).encode())
    return {name: float(value) for name, value in json.loads(shared).items()}


# Interrupt an evaluation between two batches when a signal stops the run.

_STOP_REQUESTED: contextvars.ContextVar[Callable[[], bool]] = contextvars.ContextVar(
    "stop_requested", default=lambda: False
)
"""What says whether the run is stopping, while a hook evaluates; must be called equally often on all processes."""


class EvaluationAbandoned(BaseException):
    """Raised between two batches of an evaluation when the run stops; the evaluation hook catches it.

    It is not an Exception, so that user code around the evaluator, such as a retry, does not catch it.
    """


# Exact evaluation of metrics over a data set.


def evaluator(
    metric_fn: Callable[..., Mapping[str, Any]],
    batches: Any,
    *,
    use_averages: bool | str | Sequence[str] = False,
    has_model_state: bool = False,
    batch_sharding: Any = None,
    lanes: int | None = None,
) -> Callable[[TrainState], dict[str, float]]:
    """Return a function `evaluate(state) -> {name: float}` that computes metrics over all given batches, exactly.

    Every example has the same weight, whatever the size of the last batch, even if it does not divide over a mesh, and
    on any number of processes. Totals are kept on the host, in float64 and integers. The computation is compiled once
    per batch shape.

    Args:
        metric_fn: `metric_fn(params, [model_state,] *args) -> {name: metric}`. A batch that is a tuple is passed as
            `*args`, any other batch, a NamedTuple, too, as one argument. A metric is one of: a vector with a value for
            each example; a scalar, the mean over the batch, which is weighted by the number of examples (the leading
            axis of the arrays in args; a loss that compares rows with each other depends on the batch size); a pair of
            scalars `(sum, count)`; a pytree object with `merge(other)` and `compute()`, such as those of
            `jstep.metrics`, of CLU, or a custom one. The objects of all batches are
            merged on the device in the order of the batches; `compute()` then returns a number, or a dict of numbers,
            which are named `name/key`.
        batches: The finite batches to evaluate on: a list, `jstep.batches(…, num_epochs=1, shuffle=False,
            drop_remainder=False)`, or a loader. Each evaluation iterates over all of them. An iterator that cannot be
            reset can be used only once. If `jstep.batches` drops rows, a warning is logged.
        use_averages: Whether to evaluate `averaged_params(state)`, or `schedule_free_params(state)` if the state has
            those; a string is the name of the slot of averages, a list names several, of different leaves.
        has_model_state: Whether metric_fn takes the model state.
        batch_sharding: Placement of the batches, as in `train`: the rows of each process become its part of one global
            array. The name of a mesh axis, or a tuple of names, means the mesh of the state that is evaluated.
        lanes: Number of lanes, a power of two, as in `minimize`: each batch is evaluated as if its lanes were batches,
            so that the results have the same bits on any number of devices, and callbacks that steer by them (early
            stopping, plateaus) decide alike. A batch that `lanes` does not divide is computed whole by every device.

    Returns:
        `evaluate(state) -> {name: float}`, which does not donate the state. A mean over no examples is NaN.
        `EvaluationHook` checks it before the first step: metric_fn is traced with the shapes of the first batch, of
        which nothing is computed. The batches are left alone if they are an iterator, which may be used only once, or
        a loader that keeps a position, and on several processes.

    Raises:
        TypeError: From `evaluate`: a metric object lacks `merge` or `compute`, is not a pytree, merges to another
            structure, or computes something other than numbers. The message contains the name of the metric.
        ValueError: The batches have no end. From `evaluate`: there are no batches, an iterator was used before, a
            metric is not one of the four kinds (the message contains its name), the state has no averages or model
            state, or it has averages of some parameters and schedule-free parameters of others.

    Example:
        >>> import jax.numpy as jnp, numpy as np, jstep
        >>> def metrics(params, x, y):
        ...     error = params["w"] * x - y
        ...     return {"loss": error**2, "correct": jnp.abs(error) < 1.0}
        >>> x = np.arange(5, dtype=np.float32)
        >>> batches = jstep.batches((x, 2 * x), 2, shuffle=False, num_epochs=1, drop_remainder=False)
        >>> evaluate = jstep.evaluator(metrics, batches)
        >>> evaluate(jstep.TrainState.create({"w": 1.5}, jstep.adam()))
        {'loss': 1.5, 'correct': 0.4}

        Metrics that are not means, with `jstep.metrics`:

        >>> def metrics(params, x, y):
        ...     return {"auc": jstep.metrics.auc(params["w"] * x, y > 5)}
        >>> evaluate = jstep.evaluator(metrics, batches)
        >>> evaluate(jstep.TrainState.create({"w": 1.5}, jstep.adam()))
        {'auc': 1.0}

        Their `weights` leave out padding, here the examples whose y is 0:

        >>> def metrics(params, x, y):
        ...     return {"auc": jstep.metrics.auc(params["w"] * x, y > 5, weights=y > 0)}
        >>> evaluate = jstep.evaluator(metrics, batches)
        >>> evaluate(jstep.TrainState.create({"w": -1.0}, jstep.adam()))
        {'auc': 0.0}

    Source: Keras' `Model.evaluate`, which weights batches in float32.
    """
    as_function(metric_fn, "metric_fn", "(params, *args) -> {name: metric}")
    as_average_names(use_averages)
    has_model_state = as_bool(has_model_state, "has_model_state")
    passes = EvaluationBatches(batches)
    evaluation_batches.check_sharding(batch_sharding)
    compute, merge = _replicated(_computing(metric_fn, as_lanes(lanes))), _replicated(evaluation_batches.merge_objects)
    return CheckedEvaluation(compute, merge, passes, use_averages, has_model_state, batch_sharding)


@dataclasses.dataclass(eq=False, repr=False)  # not frozen: a user may name it, as by functools.update_wrapper
class CheckedEvaluation:
    """An `evaluate(state)` that finds before the first step what cannot work.

    Attributes:
        compute: `compute(params, args) -> [metrics]`, compiled.
        merge: `merge(totals, objects)`, compiled.
        passes: The batches.
        use_averages: As for `evaluator`, and so are the others.
    """

    compute: Callable[..., list[list[Metric]]]
    merge: Callable[..., dict[str, Any]]
    passes: EvaluationBatches
    use_averages: bool | str | Sequence[str]
    has_model_state: bool
    batch_sharding: Any

    @shortens_tracebacks
    def __call__(self, state: TrainState) -> dict[str, float]:
        """Evaluate the state."""
        self._check_state(state)
        params = (_params_of(state, self.use_averages), *_model_state_of(state, self.has_model_state))
        totals, stop_requested = Totals(self.merge), _STOP_REQUESTED.get()
        shardings = evaluation_batches.shardings_of(self.batch_sharding, state)
        for args in evaluation_batches.placed(self.passes, shardings):
            is_global = _mesh_of_processes((params, args)) is not None
            # Otherwise the processes may have different numbers of batches.
            if (is_global or processes.is_single_process()) and stop_requested():
                raise EvaluationAbandoned
            with using_mesh(mesh_of((params, args))), _explained(state, self.has_model_state, args):
                # NumPy arrays, which are identical on all of several processes, become global arrays here.
                with internal_transfers() if is_global else contextlib.nullcontext():
                    metrics = self.compute(params, args)
                with internal_transfers():  # begin to read what is summed on the host
                    start_transfer(jax.tree.leaves([one for each in metrics for one in each if one.kind != OBJECT]))
                for each in metrics:
                    totals.add(each)
        return totals.results()

    def check(self, state: TrainState) -> None:
        """Raise the error that a call would raise, without computing anything."""
        self._check_state(state)
        params: Any = state.params
        if as_average_names(self.use_averages):
            params = jax.eval_shape(functools.partial(_params_of, use_averages=self.use_averages), state)
        params = (params, *_model_state_of(state, self.has_model_state))
        if not processes.is_single_process():
            return
        args = self.passes.first_shapes(evaluation_batches.shardings_of(self.batch_sharding, state))
        if args is not None:
            with using_mesh(mesh_of((state, args))), _explained(state, self.has_model_state, args):
                jax.eval_shape(self.compute, params, args)

    def _check_state(self, state: TrainState) -> None:
        require_alive(require_state(state))
        refuse_shapes(state, "state")
        own_rows = isinstance(self.passes.batches, BatchSequence) and not processes.is_single_process()
        if self.batch_sharding is None and own_rows:
            raise ValueError(
                "batch_sharding=None: jstep.batches gives each process its own rows; give the sharding that makes them "
                "one global batch, as in train"
            )


@contextlib.contextmanager
def _explained(state: TrainState, has_model_state: bool, args: tuple[Any, ...]) -> Iterator[None]:
    """Add a note to an error of the metric function that says what it may lack."""
    try:
        yield
    except Exception as error:
        explain_one_argument(error, args)
        explain_jax(error)
        if not has_model_state and MODEL_STATE in state.slots:
            note(error, "jstep: the state has a model state; metric_fn takes it with evaluator(has_model_state=True)")
        raise


def _computing(metric_fn: Callable[..., Any], number: int | None) -> Callable[..., list[list[Metric]]]:
    """Return `compute(params, args) -> [metrics]`, which is traced; with lanes, the metrics of each."""
    name = getattr(metric_fn, "__name__", "metric_fn")
    attempts = Attempts(name)

    def metrics(params: tuple[Any, ...], args: tuple[Any, ...]) -> list[Metric]:
        return evaluation_batches.metrics_of(metric_fn(*params, *args), evaluation_batches.num_examples(args))

    def compute(params: tuple[Any, ...], args: tuple[Any, ...]) -> list[list[Metric]]:
        if number is None:
            return [attempts(metrics, params, args)]
        return list(on_lanes(number, functools.partial(_of_lanes, metrics), params, args))

    compute.__name__ = name
    return compute


def _of_lanes(metrics: Callable[..., list[Metric]], lanes: Lanes, params: Any, args: Any) -> list[list[Metric]]:
    """Return the metrics of each lane; of one with the whole batch if they do not divide it."""
    size = evaluation_batches.num_examples(args)
    if isinstance(size, str) or size == 0 or size % lanes.number:
        lanes = lanes._replace(number=1, axes=())
    leaves, treedef = trees.flatten(args)
    indices = [i for i, leaf in enumerate(leaves) if np.ndim(leaf)]
    whole, filled = trees.arrays_of((params, leaves))

    def part(i: Any, whole: Any, rows: Any) -> Any:
        params, leaves = filled(whole)
        return of_each_lane(lanes, i, metrics(params, treedef.unflatten(trees.with_leaves(leaves, indices, rows))))

    stacked = sum_over_lanes(lanes, part, whole, [leaves[i] for i in indices], [0] * len(indices))
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(lanes.number)]


def _replicated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` compiled; its results are available on every process."""

    @functools.wraps(fn)
    def own(*args: Any) -> Any:  # of each evaluator, because JAX confuses classes with the same fields
        return fn(*args)

    @functools.cache
    def compiled(mesh: Any) -> Any:
        return jax.jit(own, out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()))

    return lambda *args: compiled(_mesh_of_processes(args))(*args)


def _mesh_of_processes(tree: Any) -> Any:
    """Return the mesh of arrays that are on several processes; None for any others."""
    mesh = None if processes.is_single_process() else mesh_of(tree)
    return None if mesh is None or NamedSharding(mesh, PartitionSpec()).is_fully_addressable else mesh


def _params_of(state: TrainState, use_averages: bool | str | Sequence[str]) -> Any:
    names = as_average_names(use_averages)
    if names is None:
        return state.params
    with internal_transfers():
        if isinstance(use_averages, bool | np.bool_) and NAME not in state.slots:
            free = None
            with contextlib.suppress(ValueError):
                free = schedule_free_params(state)
            kept = [slot for slot in state.slots if slot.endswith(f"/{NAME}")]
            if free is not None and kept:
                others = [slot for slot in state.slots if slot == "z" or slot.endswith("/z")]
                raise ValueError(
                    f"use_averages=True: the state has averages ({', '.join(kept)}) and schedule-free parameters "
                    f"({', '.join(others)}), each for some of the parameters; give the name of the averages, or "
                    "evaluate state.replace(params=jstep.schedule_free_params(state)) with use_averages=False"
                )
            if free is not None:
                return free
        try:
            return averaged_params(state, names)
        except ValueError as error:
            raise ValueError(f"use_averages={use_averages!r}: {error}") from None


def _model_state_of(state: TrainState, has_model_state: bool) -> tuple[Any, ...]:
    if not has_model_state:
        return ()
    if MODEL_STATE not in state.slots:
        raise ValueError(
            "has_model_state=True: the state has no model state; create it with TrainState.create(…, model_state=…)"
        )
    return (state.slots[MODEL_STATE],)
