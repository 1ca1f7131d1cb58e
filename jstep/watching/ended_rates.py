"""The observer that warns of a learning rate that is 0 in the last steps of a run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import processes, trees
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.core.threads import Task, run_in_background
from jstep.hooks.origin import Kind
from jstep.loop.observer import Observer
from jstep.loop.run_context import RunContext
from jstep.optimizers.hyperparameters import LEARNING_RATE, is_learning_rate
from jstep.slots.roles import roles_in
from jstep.training.step import step_function

_ROUNDING = 2**-24
"""What rounding leaves of a rate where a schedule ends at 0, as a share of the largest."""


class EndedRates(Observer):
    """The observer that samples the last stage's learning rates, in a thread, when a run begins.

    Not in the loop's thread, as it compiles a program, and not at a restart, whose first start was
    warned.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._task: Task[None] | None = None

    def on_restored(self, start_number: int) -> None:
        run = self._run
        last_step = run.options.last_step
        is_restart = run.origin.kind is Kind.RESUMED
        if is_restart or last_step is None or not processes.is_process_0():
            return
        if LEARNING_RATE in roles_in(run.state).arguments.values():
            return  # a held rate is not a schedule
        # A later stage has other rates than the first one.
        stage = run.train_steps.index(last_step - 1)
        if last_step - run.train_steps.firsts[stage] < 4:
            # In a run of 3 steps, step 1 is one of the last two; a later stage as short is not
            # judged either.
            return
        train_step = step_function(run.train_steps.values[stage])
        if train_step is None:
            return
        optimizer = train_step.optimizer
        self._task = run_in_background(
            lambda: _warn_of_ended_rate(optimizer, last_step), name="jstep-rates"
        )

    def on_close(self) -> None:
        if self._task is not None:
            self._task.result()  # a short run has its warning, too


def _warn_of_ended_rate(optimizer: Any, last_step: int) -> None:
    """Warn if all learning rates are 0 in the last two steps."""
    # Steps 1 and `last_step // 2` may be before the stage: a schedule that ended before the stage
    # began is a mistake, too. A rate that is 0 everywhere is not: it is meant to train nothing.
    rates = _sample_rates(optimizer, [1, last_step // 2, last_step - 2, last_step - 1])
    if rates is None:
        return
    early, middle, last_but_one, last = rates
    largest = max(early, middle)
    if largest > 0 and last_but_one == last and last <= _ROUNDING * largest:
        logger.warning(
            "the learning rate is 0 in the last steps of the run, before step %d, so "
            "these do not train: its schedule ends before the run does; give it more "
            "steps, or end the run earlier (last_step)",
            last_step,
        )


def _sample_rates(optimizer: Any, steps: list[int]) -> list[float] | None:
    """Return the largest learning rate at each of these steps; None if none depends on the step."""
    are_scheduled: list[bool] = []  # filled while `largest_rate` is traced

    def largest_rate(step: Any) -> Any:
        rates = [
            value
            for name, value in optimizer.hyperparameters(step).items()
            if is_learning_rate(name)
        ]
        are_scheduled.extend(map(trees.is_traced, rates))
        return jnp.max(jnp.stack([jnp.max(jnp.abs(rate)) for rate in rates]))

    steps_array = np.asarray(steps, trees.default_int())
    try:
        traced = jax.jit(jax.vmap(largest_rate)).trace(steps_array)
        if not any(are_scheduled):
            return None
        with internal_transfers():
            rates: list[float] = traced.lower().compile()(steps_array).tolist()
    except Exception as error:
        # A schedule that needs a concrete step, or a hyperparameter that is not a number.
        logger.debug("whether the learning rate is 0 in the end is not known: %s", error)
        return None
    return rates
