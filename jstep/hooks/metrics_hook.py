"""Metrics to wherever one likes."""

from collections.abc import Callable
from typing import Any

import jax

from jstep.core.checks import as_function, as_int
from jstep.hooks.cadence import Every
from jstep.hooks.numbers_hook import NumbersHook


class MetricsHook(NumbersHook):
    """Hands the numbers among the metrics to a function: of W&B, MLflow, a CSV file, JSON lines, a list.

    Values are handed over when the device has them, a little after their step, so that the loop never waits; those of
    steps before a checkpoint before it is saved, and all of them before `train` leaves, also by a signal or an error.
    The last step is handed over whether it is due or not. On several processes the first one writes.

    Args:
        write: `write(step, values)`, values a dict of names and floats. What it raises stops the run, with the step
            named.
        every_n_steps: How often, in steps: at their multiples.
        mean: Whether to hand over means over the steps since the last time, in place of the step's own values.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: `every_n_steps` is not positive.

    Example:
        >>> import jax.numpy as jnp, jstep
        >>> optimizer = jstep.gradient_descent(0.5)
        >>> state = jstep.TrainState.create({"w": 1.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> rows = []
        >>> hook = jstep.MetricsHook(lambda step, values: rows.append((step, values["loss"])), every_n_steps=2)
        >>> state = jstep.train(train_step, state, lambda n: jnp.float32(n), 3, hooks=[hook], progress=False)
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

        Results of evaluations go the same way from `EvaluationHook(evaluate, then=[…])`:

        >>> then = [lambda step, state, results: wandb.log(results, step=step)]
    """

    def __init__(
        self, write: Callable[[int, dict[str, float]], object], every_n_steps: int = 100, mean: bool = False
    ) -> None:
        self._write = as_function(write, "write", "(step, values)")
        super().__init__(
            Every(as_int(every_n_steps, "every_n_steps", 1, "a number of steps"), None), mean, self._hand_over
        )

    def before_save(self, step: int) -> None:
        """What belongs to steps before a checkpoint is handed over before it: a run that goes on will not do it."""
        self._held.hand_over_all()

    def _hand_over(self, step: int, values: dict[str, Any]) -> None:
        if jax.process_index() != 0:
            return
        try:
            self._write(step, {name: float(value) for name, value in values.items()})
        except Exception as error:
            error.add_note(f"raised by the `write` of a MetricsHook, given the metrics of step {step}")
            raise
