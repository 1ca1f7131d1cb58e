"""Evaluation, exact."""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core.checks import as_bool, as_function
from jstep.core.compile_only import refuse_shapes
from jstep.core.contexts import internal_transfers
from jstep.core.meshes import Attempts, mesh_of, using_mesh
from jstep.data import BatchSequence
from jstep.distributed import agreement
from jstep.evaluating.batch_placement import make_placer
from jstep.evaluating.evaluation_loop import EvaluationBatches
from jstep.evaluating.metric_objects import Merger, numbers_of_objects
from jstep.evaluating.num_examples import num_examples
from jstep.evaluating.totals import OBJECT, Totals, kinds_of
from jstep.hooks.interruption import raise_if_stop_requested
from jstep.optimizers import averaged_params, schedule_free_params
from jstep.optimizers.wrappers.exponential_moving_average import NAME
from jstep.state import MODEL_STATE, TrainState, require_alive, require_state

_AHEAD = 2
"""Batches that are handed to the device before the metrics of the first of them are read."""


def evaluator(
    metric_fn: Callable[..., Mapping[str, Any]],
    batches: Any,
    *,
    use_averages: bool | str = False,
    has_model_state: bool = False,
    batch_sharding: Any = None,
) -> Callable[[TrainState], dict[str, float]]:
    """Makes a function of the state that evaluates it over all of some batches, exactly.

    Every example counts the same, whatever the size of the last batch, also where it does not divide over a mesh, and
    on any number of processes. Totals are kept on the host, in float64 and integers. What is computed is compiled once
    for each shape of a batch.

    Args:
        metric_fn: `metric_fn(params, [model_state,] *args) -> {name: metric}`; a batch that is a tuple is `*args`,
            anything else one argument. A metric is a vector with a value for each example; or a scalar, the mean over
            the batch, which counts by its number of examples, the leading axis of the args' arrays; or a pair of
            scalars `(sum, count)`; or an object with `merge(other)` and `compute()` that is a pytree, such as those of
            `jstep.metrics`, of CLU, or your own: the objects of all batches are merged on the device, in the order of
            the batches, and `compute()` at the end gives a number, or a dict of numbers named `name/key`.
        batches: What to evaluate on; has to end: a list, `jstep.batches(…, num_epochs=1, shuffle=False,
            drop_remainder=False)`, a loader. It is gone through once for each evaluation. An iterator that cannot be
            set back can be used once. Rows that `jstep.batches` drops are logged as a warning.
        use_averages: Whether to evaluate `averaged_params(state)`, or `schedule_free_params(state)` where the state
            has those; a string names the slot of averages.
        has_model_state: Whether metric_fn takes the model state.
        batch_sharding: Where batches go, as in `train`: each process's rows become its part of one global array.

    Returns:
        `evaluate(state) -> {name: float}`, which does not donate the state. A mean over nothing is NaN.

    Raises:
        TypeError: From `evaluate`: an object among the metrics lacks `merge` or `compute`, is not a pytree, merges to
            another structure, or computes something else than numbers (names the metric).
        ValueError: The batches have no end. From `evaluate`: there is no batch, an iterator was used before, a metric
            is not one of the four (names it), or the state has no averages or model state, or averages of one part
            and schedule-free parameters of another.

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

        Metrics that are not means, by `jstep.metrics`:

        >>> def metrics(params, x, y):
        ...     return {"auc": jstep.metrics.auc(params["w"] * x, y > 5)}
        >>> evaluate = jstep.evaluator(metrics, batches)
        >>> evaluate(jstep.TrainState.create({"w": 1.5}, jstep.adam()))
        {'auc': 1.0}

    Source: Keras' `Model.evaluate`, which weights batches in float32.
    """
    as_function(metric_fn, "metric_fn", "(params, *args) -> {name: metric}")
    if not isinstance(use_averages, str):
        use_averages = as_bool(use_averages, "use_averages")
    has_model_state = as_bool(has_model_state, "has_model_state")
    passes, placed = EvaluationBatches(batches), make_placer(batch_sharding)
    compute, merge = _Compute(metric_fn), Merger()

    def evaluate(state: TrainState) -> dict[str, float]:
        require_alive(require_state(state))
        refuse_shapes(state, "state")
        if batch_sharding is None and isinstance(batches, BatchSequence) and not agreement.is_single_process():
            raise ValueError(
                "batch_sharding=None: jstep.batches gives each process its own rows; give the sharding that makes one "
                "global batch of them, as in train"
            )
        params = (_params_of(state, use_averages), *_model_state_of(state, has_model_state))
        totals, objects = Totals(), dict[str, Any]()
        pending: deque[tuple[Any, Any, int | str]] = deque()
        for args, rows in placed(passes):
            mesh = None if agreement.is_single_process() else _mesh_of((params, args))
            # Else the processes may have different numbers of batches.
            if mesh is not None or agreement.is_single_process():
                raise_if_stop_requested()
            with using_mesh(mesh_of((params, args))):
                values, kinds = compute(params, args, rows, mesh)
                found = {name: value for name, value in values.items() if kinds[name] == OBJECT}
                objects = merge(objects, found, mesh)
            pending.append((values, kinds, rows))
            if len(pending) > _AHEAD:
                totals.add(*pending.popleft())
        while pending:
            totals.add(*pending.popleft())
        with using_mesh(mesh_of(objects)):
            computed = numbers_of_objects(objects)
        return _in_order(totals.means(), computed, compute.names)

    return evaluate


class _Compute:
    """The user's function, compiled; its values on every process.

    Attributes:
        names: Those of its metrics, in its order; JAX returns them sorted.
    """

    def __init__(self, metric_fn: Callable[..., Any]) -> None:
        self.names: tuple[str, ...] = ()

        def compute(params: tuple[Any, ...], args: tuple[Any, ...]) -> dict[str, Any]:
            def checked(params: tuple[Any, ...], args: tuple[Any, ...]) -> dict[str, Any]:
                found = metric_fn(*params, *args)
                self.names = tuple(kinds_of(found, num_examples(args)))
                return dict(found)

            return attempts(checked, params, args)

        attempts = Attempts(getattr(metric_fn, "__name__", "metric_fn"))
        compute.__name__ = getattr(metric_fn, "__name__", "metric_fn")
        self._compute = compute
        self._jitted: dict[Any, Any] = {}

    def __call__(
        self, params: tuple[Any, ...], args: tuple[Any, ...], rows: int | str, mesh: Any
    ) -> tuple[Any, dict[str, str]]:
        if mesh not in self._jitted:
            everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
            self._jitted[mesh] = jax.jit(self._compute, out_shardings=everywhere)
        # On several processes NumPy arrays, the same on all, become global ones here.
        with contextlib.nullcontext() if mesh is None else internal_transfers():
            values = self._jitted[mesh](params, args)
        kinds = kinds_of(values, rows)
        with internal_transfers():
            for leaf in jax.tree.leaves({name: value for name, value in values.items() if kinds[name] != OBJECT}):
                if isinstance(leaf, jax.Array):
                    leaf.copy_to_host_async()
        return values, kinds


def _in_order(
    means: dict[str, float], computed: dict[str, dict[str, float]], names: tuple[str, ...]
) -> dict[str, float]:
    """All results in the order of the user's function.

    Raises:
        ValueError: A number that an object computed has the name of another metric.
    """
    results: dict[str, float] = {}
    for name in sorted({**means, **computed}, key=names.index):
        for full, number in computed.get(name, {name: means.get(name, math.nan)}).items():
            if full in results:
                raise ValueError(f"metric_fn: two metrics are called {full!r}; rename {name!r} or the other")
            results[full] = number
    return results


def _mesh_of(tree: Any) -> Any:
    """The mesh over several processes that an array lies on, if any."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and not sharding.is_fully_addressable:
            return sharding.mesh
    return None


def _params_of(state: TrainState, use_averages: bool | str) -> Any:
    if use_averages is False:
        return state.params
    name = NAME if use_averages is True else use_averages
    with internal_transfers():
        if use_averages is True and name not in state.slots:
            free = _schedule_free(state)
            if free is not None:
                _refuse_both(state)
                return free
        try:
            return averaged_params(state, name)
        except ValueError as error:
            raise ValueError(f"use_averages={use_averages!r}: {error}") from None


def _schedule_free(state: TrainState) -> Any:
    """The parameters of a schedule-free optimizer of the state, None where it has none."""
    try:
        return schedule_free_params(state)
    except ValueError:
        return None


def _refuse_both(state: TrainState) -> None:
    """Raises where a schedule-free state has averages of another part as well: each covers a part of the parameters."""
    averages = [slot for slot in state.slots if slot.endswith(f"/{NAME}")]
    if averages:
        free = [slot for slot in state.slots if slot == "z" or slot.endswith("/z")]
        raise ValueError(
            f"use_averages=True: the state has averages ({', '.join(averages)}) and schedule-free parameters "
            f"({', '.join(free)}), each of a part of the parameters; give the name of the averages, or evaluate "
            "state.replace(params=jstep.schedule_free_params(state)) with use_averages=False"
        )


def _model_state_of(state: TrainState, has_model_state: bool) -> tuple[Any, ...]:
    if not has_model_state:
        return ()
    if MODEL_STATE not in state.slots:
        raise ValueError(
            "has_model_state=True: the state has no model state; give TrainState.create(…, model_state=…) one"
        )
    return (state.slots[MODEL_STATE],)
