"""Send metrics to an external logger."""

import logging
from collections.abc import Callable, Collection
from typing import Any

import jax

from jstep.core.checks import as_function, as_int, note
from jstep.hooks.async_transfer import PendingValues
from jstep.hooks.cadence import Cadence
from jstep.hooks.hook import Metrics
from jstep.hooks.reporting_hook import ReportingHook
from jstep.hooks.values import names_of_arrays
from jstep.state.train_state import TrainState

_logger = logging.getLogger("jstep")


class MetricsHook(ReportingHook):
    """A hook that passes scalar metrics to a function, such as a logger of W&B or MLflow, or a writer of JSON lines.

    Rows are passed in the order of steps when their values have arrived from the device, so that the loop never waits.
    Rows of earlier steps are passed before the results of an evaluation and before a checkpoint is saved, and all rows
    before `train` returns or raises. The last step is always passed. On several processes, only the first one writes.
    Metrics that are arrays are omitted, and named once in the log.

    Args:
        write: `write(step, values)`, where values is a dict of floats. If it raises, the run stops with that exception
            and a note that names the step.
        every_n_steps: Interval in steps; due at its multiples.
        mean: Whether to pass means over the steps since the last row, in place of the values of the step. They are
            accumulated on the device. A value that is not finite is ignored if the update of its step was skipped. The
            last row of an interrupted run and the first one after the restart cover the two parts of the interval.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> rows = []
        >>> hook = jstep.MetricsHook(lambda step, values: rows.append((step, values["loss"])), every_n_steps=2)
        >>> state = jstep.train(train_step, state, lambda n: jnp.float32(n), 3, hooks=[hook])
        >>> rows
        [(2, 1.0), (3, 1.0)]

        To Weights & Biases, MLflow, a CSV file, JSON lines:

        >>> import csv, io, json
        >>> to_wandb = lambda step, values: wandb.log(values, step=step)
        >>> to_mlflow = lambda step, values: mlflow.log_metrics(values, step=step)
        >>> file = io.StringIO()
        >>> table = csv.writer(file)
        >>> to_csv = lambda step, values: table.writerow([step, values["loss"]])
        >>> to_json = lambda step, values: print(json.dumps({"step": step, **values}), file=file, flush=True)
        >>> hooks = [jstep.MetricsHook(to_csv), jstep.MetricsHook(to_json, every_n_steps=10, mean=True)]

        Results of evaluations can be sent in the same way, with `EvaluationHook(evaluate, callbacks=[…])`:

        >>> then = [lambda step, state, results: wandb.log(results, step=step)]
    """

    def __init__(
        self, write: Callable[[int, dict[str, float]], object], *, every_n_steps: int = 100, mean: bool = False
    ) -> None:
        self._write = as_function(write, "write", "(step, values)")
        self._named: set[str] = set()
        super().__init__(
            Cadence(as_int(every_n_steps, "every_n_steps", 1, "a number of steps"), at_last=True), mean, self._give
        )

    def begin(self, state: TrainState) -> bool | None:
        """Reset the hook for a new run."""
        self._named = set()
        return super().begin(state)

    def _numbers(self, metrics: Metrics, leave_out: Collection[str] = ()) -> PendingValues:
        """The numbers to pass on; metrics that are arrays are logged once per run."""
        names = sorted({*names_of_arrays(metrics)} - self._named)
        self._named.update(names)
        if names and jax.process_index() == 0:
            _logger.info(
                "MetricsHook leaves out the metrics %s: they are arrays, not numbers. Also return their means or "
                "norms, or handle them in a custom hook (jstep.every).",
                ", ".join(map(repr, names)),
            )
        return super()._numbers(metrics, leave_out)

    def _give(self, step: int, values: dict[str, Any]) -> None:
        if jax.process_index() != 0:
            return
        try:
            self._write(step, {name: float(value) for name, value in values.items()})
        except Exception as error:
            note(error, f"raised by the `write` of a MetricsHook, given the metrics of step {step}")
            raise
