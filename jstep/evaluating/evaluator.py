"""Evaluation, exact."""

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core.checks import as_bool, as_function
from jstep.core.contexts import own_transfers
from jstep.core.meshes import Attempts, mesh_of, setting
from jstep.data import Batches
from jstep.distributed import agreement
from jstep.evaluating.counted import rows_of
from jstep.evaluating.passes import Passes
from jstep.evaluating.rows import placer
from jstep.evaluating.totals import Totals, kinds_of
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
            scalars `(sum, count)`.
        batches: What to evaluate on; has to end: a list, `jstep.batches(…, num_epochs=1, shuffle=False,
            drop_remainder=False)`, a loader. It is gone through once for each evaluation. An iterator that cannot be
            set back can be used once.
        use_averages: Whether to evaluate `averaged_params(state)`, or `schedule_free_params(state)` where the state
            has those; a string names the slot of averages.
        has_model_state: Whether metric_fn takes the model state.
        batch_sharding: Where batches go, as in `train`: each process's rows become its part of one global array.

    Returns:
        `evaluate(state) -> {name: float}`, which does not use the state up. A mean over nothing is NaN.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: The batches have no end. From `evaluate`: there is no batch, an iterator is used up, a metric is
            none of the three (names it), or the state has no averages or model state.

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

    Source: Keras' `Model.evaluate`, which weights batches in float32.
    """
    as_function(metric_fn, "metric_fn", "(params, *args) -> {name: metric}")
    if not isinstance(use_averages, str):
        use_averages = as_bool(use_averages, "use_averages")
    has_model_state = as_bool(has_model_state, "has_model_state")
    passes, placed = Passes(batches), placer(batch_sharding)
    compute = _Compute(metric_fn)

    def evaluate(state: TrainState) -> dict[str, float]:
        require_alive(require_state(state))
        if batch_sharding is None and isinstance(batches, Batches) and not agreement.is_alone():
            raise ValueError(
                "batch_sharding=None: jstep.batches gives each process its own rows; give the sharding that makes one "
                "global batch of them, as in train"
            )
        params = (_params_of(state, use_averages), *_model_state_of(state, has_model_state))
        totals = Totals()
        pending: deque[tuple[Any, Any, int | str]] = deque()
        for args, rows in placed(passes):
            with setting(mesh_of((params, args))):
                values, kinds = compute(params, args, rows)
            pending.append((values, kinds, rows))
            if len(pending) > _AHEAD:
                totals.add(*pending.popleft())
        while pending:
            totals.add(*pending.popleft())
        means = totals.means()
        return {name: means[name] for name in sorted(means, key=compute.names.index)}

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
                self.names = tuple(kinds_of(found, rows_of(args)))
                return dict(found)

            return attempts(checked, params, args)

        attempts = Attempts(getattr(metric_fn, "__name__", "metric_fn"))
        compute.__name__ = getattr(metric_fn, "__name__", "metric_fn")
        self._compute = compute
        self._jitted: dict[Any, Any] = {}

    def __call__(self, params: tuple[Any, ...], args: tuple[Any, ...], rows: int | str) -> tuple[Any, dict[str, str]]:
        mesh = None if agreement.is_alone() else _mesh_of((params, args))
        if mesh not in self._jitted:
            everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
            self._jitted[mesh] = jax.jit(self._compute, out_shardings=everywhere)
        # On several processes NumPy arrays, the same on all, become global ones here.
        with contextlib.nullcontext() if mesh is None else own_transfers():
            values = self._jitted[mesh](params, args)
        for leaf in jax.tree.leaves(values):
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
        return values, kinds_of(values, rows)


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
    with own_transfers():
        if use_averages is True and name not in state.slots:
            try:
                return schedule_free_params(state)
            except ValueError:
                pass
        try:
            return averaged_params(state, name)
        except ValueError as error:
            raise ValueError(f"use_averages={use_averages!r}: {error}") from None


def _model_state_of(state: TrainState, has_model_state: bool) -> tuple[Any, ...]:
    if not has_model_state:
        return ()
    if MODEL_STATE not in state.slots:
        raise ValueError(
            "has_model_state=True: the state has no model state; give TrainState.create(…, model_state=…) one"
        )
    return (state.slots[MODEL_STATE],)
