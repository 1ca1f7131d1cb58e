"""The evaluator: exact metrics of a state over all batches of a data set."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import processes, trees
from jstep.core.checks import as_bool, as_function
from jstep.core.exceptions import note
from jstep.core.logs import logger
from jstep.core.meshes import AxesFallback, internal_transfers, mesh_of, using_mesh
from jstep.core.placement import check_no_shapes
from jstep.core.recorded_calls import RecordedCall, record_calls
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import Tree
from jstep.data.sequence import BatchSequence
from jstep.differentiate.lanes import (
    Lanes,
    as_lanes,
    call_on_lanes,
    stack_over_lanes,
    sum_over_lanes,
)
from jstep.evaluating.evaluation_batches import (
    EvaluationBatches,
    batch_shardings,
    check_sharding,
    num_examples,
    place_batches,
)
from jstep.evaluating.evaluation_metrics import (
    OBJECT,
    Metric,
    MetricTotals,
    classify_metrics,
    merge_objects,
)
from jstep.metering.numbers import start_copies
from jstep.optimizers.averages import averaged_model_state, averaged_params
from jstep.optimizers.parameter_free import schedule_free_params
from jstep.state.global_step import check_alive
from jstep.state.slots import AVERAGE_SLOT, as_average_names, averages_in
from jstep.state.train_state import MODEL_STATE, TrainState, as_state
from jstep.training.explain import explain_arguments

STOP_REQUESTED: ContextVar[Callable[[], bool]] = ContextVar("stop_requested", default=lambda: False)
"""Returns whether the run is stopping; must be called equally often on all processes."""


class EvaluationAbandoned(BaseException):
    """Raised between two batches of an evaluation when the run stops.

    It is not an Exception, so that no retry catches it.
    """


Evaluate: TypeAlias = Callable[[TrainState], dict[str, float]]


def _remember(evaluate: Evaluate, call: RecordedCall) -> Evaluate:
    if not isinstance(evaluate, Evaluator):
        return evaluate
    return dataclasses.replace(evaluate, made_by=call)


@record_calls(_remember, 2)
def evaluator(
    metric_fn: Callable[..., Mapping[str, Any]],
    batches: Tree,
    *,
    use_averages: bool | str | Sequence[str] = False,
    has_model_state: bool = False,
    batch_sharding: object = None,
    lanes: int | None = None,
) -> Callable[[TrainState], dict[str, float]]:
    """Return a function `evaluate(state) -> {name: float}` that computes metrics exactly.

    It computes them over all given batches. Every example has the same weight, whatever the size of
    the last batch and the number of devices and processes.

    Args:
        metric_fn: `metric_fn(params, [model_state,] *args) -> {name: metric}`. A batch that is a
            tuple is passed as `*args`, any other, also a NamedTuple, as one argument. A metric is a
            vector with a value for each example; a scalar, the mean over the batch, weighted by its
            rows; a pair of scalars `(sum, count)`, or `mean_of(sum, count)`; or a pytree object
            with `merge(other)` and `compute()`, as in `jstep.metrics`, where `compute()` returns a
            number, or a dict of numbers named `name/key`.
        batches: The finite batches to evaluate on: a list, `jstep.batches(…, num_epochs=1,
            shuffle=False, drop_remainder=False)`, or a loader. An iterator that cannot be reset can
            be used only once.
        use_averages: Whether to evaluate `averaged_params(state)`, or `schedule_free_params(state)`
            if the state has these; or the name of the slot of averages, or several names. "both"
            evaluates the parameters and their averages in one pass: `loss` and `averaged/loss`.
        has_model_state: Whether metric_fn accepts the model state; with averages
            `averaged_model_state(state)` if there is one, else the raw one with a warning.
        batch_sharding: Placement of the batches, as in `train`; names of mesh axes mean the mesh of
            the state.
        lanes: Number of lanes, a power of two, as in `minimize`. Every device computes the whole of
            a batch that `lanes` does not divide.

    Returns:
        `evaluate(state) -> {name: float}`, which does not donate the state. A mean over no examples
        is NaN.

    Raises:
        TypeError: From `evaluate`: a metric object lacks `merge` or `compute`, is not a pytree,
            merges to another structure, or computes something other than numbers.
        ValueError: The batches have no end. From `evaluate`: there are no batches, an iterator was
            used before, a metric is of another kind, the state has no averages or model state, or
            it has averages of some parameters and schedule-free parameters of others.

    Example:
        >>> import numpy as np, jstep
        >>> def metrics(params, x, y):
        ...     error = params["w"] * x - y
        ...     return {"loss": error**2, "auc": jstep.metrics.auc(params["w"] * x, y > 5)}
        >>> x = np.arange(5, dtype=np.float32)
        >>> batches = jstep.batches(
        ...     (x, 2 * x), 2, shuffle=False, num_epochs=1, drop_remainder=False
        ... )
        >>> evaluate = jstep.evaluator(metrics, batches)
        >>> evaluate(jstep.TrainState.create({"w": 1.5}, jstep.adam()))
        {'loss': 1.5, 'auc': 1.0}

    Source: Keras' `Model.evaluate`.
    """
    as_function(metric_fn, "metric_fn", "(params, *args) -> {name: metric}")
    _settings_by_prefix(use_averages)
    has_model_state = as_bool(has_model_state, "has_model_state")
    evaluation_batches = EvaluationBatches(batches)
    check_sharding(batch_sharding)
    return Evaluator(
        compute=_replicated(_computing(metric_fn, as_lanes(lanes))),
        merge=_replicated(merge_objects),
        batches=evaluation_batches,
        use_averages=use_averages,
        has_model_state=has_model_state,
        batch_sharding=batch_sharding,
    )


# Not frozen: a user may name it, as by functools.update_wrapper.
@dataclasses.dataclass(eq=False, repr=False)
class Evaluator:
    """An `evaluate(state)` that can report its errors before the first step."""

    compute: Callable[..., list[list[Metric]]]
    merge: Callable[..., dict[str, Any]]
    batches: EvaluationBatches
    use_averages: bool | str | Sequence[str]
    has_model_state: bool
    batch_sharding: Any
    made_by: RecordedCall | None = None
    warn_once: Callable[[str], None] = dataclasses.field(
        default_factory=lambda: functools.cache(logger.warning), init=False
    )

    def __repr__(self) -> str:
        return "evaluator(…)" if self.made_by is None else repr(self.made_by)

    def __reduce__(self) -> tuple[Any, ...]:
        assert self.made_by is not None
        return self.made_by.__reduce__()

    @shortens_tracebacks
    def __call__(self, state: TrainState) -> dict[str, float]:
        self._check_state(state)
        params = self._evaluated(state)
        totals = MetricTotals(self.merge)
        stop_requested = STOP_REQUESTED.get()
        shardings = batch_shardings(self.batch_sharding, state)
        for args in place_batches(self.batches, shardings):
            is_global = _mesh_of_processes((params, args)) is not None
            # Otherwise the processes may have different numbers of batches.
            if (is_global or processes.is_single_process()) and stop_requested():
                raise EvaluationAbandoned
            with using_mesh(mesh_of((params, args))), self._explained(state, args):
                # NumPy arrays, which are identical on all of several processes, become global
                # arrays here.
                with internal_transfers() if is_global else contextlib.nullcontext():
                    metrics = self.compute(params, args)
                with internal_transfers():  # begin to read the metrics that are summed on the host
                    summed = [
                        metric
                        for lane_metrics in metrics
                        for metric in lane_metrics
                        if metric.kind != OBJECT
                    ]
                    start_copies(jax.tree.leaves(summed))
                for lane_metrics in metrics:
                    totals.add(lane_metrics)
        return totals.results()

    def check(self, state: TrainState) -> list[str] | None:
        self._check_state(state)
        params: Any
        if as_average_names(self.use_averages) is None:
            params = self._evaluated(state)
        else:
            params = jax.eval_shape(self._evaluated, state)
        if not processes.is_single_process():
            return None
        args = self.batches.first_shapes(batch_shardings(self.batch_sharding, state))
        if args is None:
            return None
        with using_mesh(mesh_of((state, args))), self._explained(state, args):
            return [metric.name for metric in jax.eval_shape(self.compute, params, args)[0]]

    def _evaluated(self, state: TrainState) -> "Evaluated":
        arguments = {}
        for prefix, averages in _settings_by_prefix(self.use_averages).items():
            model_state: tuple[Any, ...] = ()
            if self.has_model_state:
                model_state = (_model_state_of(state, averages, self.warn_once),)
            arguments[prefix] = (_params_of(state, averages), *model_state)
        return arguments

    def _check_state(self, state: TrainState) -> None:
        check_alive(as_state(state))
        check_no_shapes(state, "state")
        own_rows = (
            isinstance(self.batches.source, BatchSequence) and not processes.is_single_process()
        )
        if self.batch_sharding is None and own_rows:
            raise ValueError(
                "batch_sharding=None: jstep.batches gives each process its own rows; give a "
                "sharding, as in train"
            )

    @contextlib.contextmanager
    def _explained(self, state: TrainState, args: tuple[Any, ...]) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            explain_arguments(error, args, state, has_model_state=self.has_model_state)
            if (
                isinstance(error, TypeError)
                and len(args) == 1
                and trees.is_plain_tuple(self.batches.source)
            ):
                note(
                    error,
                    "jstep: each item of the tuple batches is a batch; for one batch "
                    "(x, y) give [(x, y)]",
                )
            raise


def _computing(
    metric_fn: Callable[..., Any], number: int | None
) -> Callable[..., list[list[Metric]]]:
    """Return `compute(params, args) -> [metrics]`, for tracing; with lanes, the metrics of each."""
    name = getattr(metric_fn, "__name__", "metric_fn")
    fallback = AxesFallback(name)

    def metrics(params: Evaluated, args: tuple[Any, ...]) -> list[Metric]:
        rows = num_examples(args)
        found: list[Metric] = []
        for prefix, values in params.items():
            for metric in classify_metrics(metric_fn(*values, *args), rows):
                found.append(dataclasses.replace(metric, name=f"{prefix}{metric.name}"))
        return found

    def compute(params: Evaluated, args: tuple[Any, ...]) -> list[list[Metric]]:
        if number is None:
            return [fallback(metrics, params, args)]
        return list(
            call_on_lanes(number, functools.partial(_metrics_of_lanes, metrics), params, args)
        )

    compute.__name__ = name
    return compute


def _metrics_of_lanes(
    metrics: Callable[..., list[Metric]], lanes: Lanes, params: Tree, args: Any
) -> list[list[Metric]]:
    size = num_examples(args)
    if isinstance(size, str) or size == 0 or size % lanes.number:
        lanes = lanes._replace(number=1, axes=())  # each device computes the whole batch
    leaves, treedef = trees.flatten(args)
    indices = [i for i, leaf in enumerate(leaves) if np.ndim(leaf)]
    whole, filled = trees.partition_arrays((params, leaves))

    def part(i: Any, whole: Any, rows: Tree) -> Any:
        params, leaves = filled(whole)
        args_of_lane = treedef.unflatten(trees.replace_leaves(leaves, indices, rows))
        return stack_over_lanes(lanes, i, metrics(params, args_of_lane))

    stacked = sum_over_lanes(lanes, part, whole, [leaves[i] for i in indices], [0] * len(indices))
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(lanes.number)]


def _replicated(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any) -> Any:
        # There is one for each evaluator: JAX confuses classes with the same fields.
        return fn(*args)

    @functools.cache
    def compiled(mesh: Any) -> Any:
        # On all devices, so that each process can read the results.
        replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        return jax.jit(wrapper, out_shardings=replicated)

    return lambda *args: compiled(_mesh_of_processes(args))(*args)


def _mesh_of_processes(tree: Tree) -> Any:
    """Return the mesh of a tree if it has devices of other processes, too; else None."""
    mesh = None if processes.is_single_process() else mesh_of(tree)
    if mesh is None or NamedSharding(mesh, PartitionSpec()).is_fully_addressable:
        return None
    return mesh


Evaluated: TypeAlias = dict[str, tuple[Any, ...]]
"""The prefix of the names of metrics → the parameters, and the model state, that metric_fn gets."""
BOTH = "both"


def _settings_by_prefix(
    use_averages: bool | str | Sequence[str],
) -> dict[str, bool | str | Sequence[str]]:
    if isinstance(use_averages, str) and use_averages == BOTH:
        return {"": False, "averaged/": True}
    as_average_names(use_averages)
    return {"": use_averages}


def _params_of(state: TrainState, use_averages: bool | str | Sequence[str]) -> Any:
    names = as_average_names(use_averages)
    if names is None:
        return state.params
    with internal_transfers():
        if isinstance(use_averages, bool | np.bool_):
            free = _schedule_free(state)
            if free is not None:
                return free
        try:
            return averaged_params(state, names)
        except ValueError as error:
            raise ValueError(f"use_averages={use_averages!r}: {error}") from None


def _schedule_free(state: TrainState) -> Any:
    """Return what `use_averages=True` means if no average has the usual name; None without."""
    averages = averages_in(state, AVERAGE_SLOT)
    if AVERAGE_SLOT in averages:
        return None
    try:
        free = schedule_free_params(state)
    except ValueError:
        return None
    if averages:
        raise ValueError(
            f"use_averages=True: must name one of {averages}, as the "
            "state also has schedule-free parameters"
        )
    return free


def _model_state_of(
    state: TrainState, use_averages: bool | str | Sequence[str], warn: Callable[[str], None]
) -> Any:
    if MODEL_STATE not in state.slots:
        raise ValueError(
            "has_model_state=True: the state has no model state; create it with "
            "TrainState.create(…, model_state=…)"
        )
    names = as_average_names(use_averages)
    if names is not None:
        with contextlib.suppress(ValueError), internal_transfers():
            return averaged_model_state(state, names)
        if any(map(trees.is_trainable, jax.tree.leaves(state.model_state))):
            warn(_RAW)
    return state.model_state


_RAW = (
    "use_averages: averages of the parameters are evaluated with the model "
    "state of the raw parameters, such as statistics of BatchNorm. Average "
    "both by jstep.ExponentialMovingAverage(…, model_state=True), or "
    "recompute the model state with the averages"
)
