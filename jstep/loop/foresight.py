"""Warnings about the updates of a run: zero learning rates, stale averages, and accumulated but unused gradients."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.checks import format_list
from jstep.core.jaxprs import body_of, depend_on_calls
from jstep.core.meshes import internal_transfers, mesh_of, using_mesh
from jstep.core.trees import Optimizer, Step
from jstep.loop.arguments import LARGEST_STEP
from jstep.loop.calls import Call
from jstep.loop.compiler import shapes_of
from jstep.loop.run import Run
from jstep.optimizers.averages import MOVED
from jstep.optimizers.hyperparameters import LEARNING_RATE, is_learning_rate
from jstep.optimizers.nested import is_rated
from jstep.slots.roles import ACCUMULATED, FOLLOWS_STEP, FOLLOWS_UPDATES, abstractly, roles_in, roles_of
from jstep.state.train_state import TrainState
from jstep.training.step import PureStep, as_pure_step, step_function

_logger = logging.getLogger("jstep")

_MAX_NAMES = 20


def warn_ahead(run: Run) -> None:
    try:  # on all processes, because a schedule may close over arrays of all of them
        with using_mesh(mesh_of(run.state)):
            zeros = _zero_rate_from(run)
    except Exception as error:  # the step raises it too, with a better message
        _logger.debug("whether learning rates are 0 is not known: %s", error)
        zeros = None
    if jax.process_index() != 0:
        return
    if zeros is not None:
        end = run.setup.options.last_step
        _logger.warning(
            "The learning rate is 0 from step %d %s, so that these steps do not train: its schedule ends before the "
            "run does. Give it more steps, or end the run earlier (last_step).",
            zeros,
            "on, for good" if end is None else f"to the end of the run at step {end}",
        )
    _warn_of_averages_left_behind(run)


# Learning rates that are 0 up to the end.

_RATES = "scheduled rates"
_POINTS = 2**16
"""The maximum number of steps at which rates are evaluated together."""


class ScheduledRates:
    def __init__(self, largest: Callable[[Step], Any]) -> None:
        self._largest = jax.jit(jax.vmap(largest))

    def at(self, steps: object) -> Any:
        """Return the largest absolute rate at each step."""
        with internal_transfers():
            return jax.device_get(self._largest(np.asarray(steps, trees.default_int())))

    def zero_from(self, first: int, stop: int) -> int | None:
        """Return the step ≥ `first` from which the rates are 0 up to `stop`; None if the last rate is not 0."""
        zero = self._zero(self.at(range(max(first, stop - 2), stop))[-1], stop)
        if zero is None:
            return None
        low, last = first, stop - 1
        # Of more than _POINTS steps, evenly spaced ones are checked first, then those between two of them.
        while low < last:
            points, values = self._sampled(low, last)
            others = np.flatnonzero(values != zero)
            if not others.size:
                break  # all from `low` on are 0
            if others[-1] == len(points) - 1:
                return None
            low, last = int(points[others[-1]]) + 1, int(points[others[-1] + 1])
        return low

    def are_zero_for_good(self, first: int) -> bool:
        """Return whether the rates are 0 at `first`, ever farther steps, and the largest one."""
        values = self.at([min(first + 2**i - 1, LARGEST_STEP - 1) for i in range(32)])
        return bool(np.all(values == values[-1]) and self._zero(values[0], first + 1) is not None)

    def _zero(self, value: Any, stop: int) -> Any:
        """Return the value if it is 0, or if it is the rest that rounding leaves of a schedule to 0; else None."""
        if not value <= 2**-20:  # NaN is not 0 either
            return None
        return value if value == 0 or value <= 2**-24 * np.max(self._sampled(0, stop - 1)[1]) else None

    def _sampled(self, low: int, last: int) -> tuple[Any, Any]:
        points = np.unique(np.linspace(low, last, min(_POINTS, last - low + 1)).round().astype(np.int64))
        # Padded to one length, so that a single program evaluates them all.
        return points, self.at(np.pad(points, (0, _POINTS - len(points)), mode="edge"))[: len(points)]


def find_scheduled_rates(hyperparameters: Callable[[Step], Mapping[str, Any]]) -> ScheduledRates | None:
    """Return the learning rates among hyperparameters; None if none is a schedule, or a fixed one is not 0."""
    scheduled: set[str] = set()
    fixed: list[float] = []

    def classify(step: Step) -> None:
        for name, value in hyperparameters(step).items():
            if is_learning_rate(name):
                if trees.is_traced(value):
                    scheduled.add(name)
                else:
                    fixed.append(float(np.max(np.abs(value))))

    try:
        abstractly(classify)
    except Exception:  # a schedule that needs a concrete step, which no compiled step gives it
        return None
    if not scheduled or any(fixed):
        return None

    def largest(step: Step) -> Any:
        values = hyperparameters(step)
        return jnp.max(jnp.stack([jnp.max(jnp.abs(values[name])) for name in sorted(scheduled)]))

    return ScheduledRates(largest)


def find_rates(optimizer: Optimizer) -> ScheduledRates | None:
    """Return the learning rates of an optimizer; None if some are held, unknown, or as in `find_scheduled_rates`."""
    if not is_rated(optimizer) or roles_of(optimizer, {}).with_detail(LEARNING_RATE):
        return None
    return find_scheduled_rates(optimizer.hyperparameters)


def _rates_in(step: PureStep, optimizer: Optimizer) -> ScheduledRates | None:
    """Return the rates of a step; their program is cached for later runs."""
    if _RATES not in step.kept:
        step.kept[_RATES] = find_rates(optimizer)
    rates: ScheduledRates | None = step.kept[_RATES]
    return rates


def _zero_rate_from(run: Run) -> int | None:
    """Return the step from which all learning rates are 0 until the end, for at least two steps; else None."""
    end = run.setup.options.last_step
    begin = run.setup.options.stop_step
    for stage in reversed(list(run.setup.train_steps.stages())):
        first = max(stage.first, run.setup.loop.first)
        step = step_function(stage.value)
        if first >= begin or (stage.stop is not None and stage.stop <= run.setup.loop.first):
            continue
        if step is None or step.optimizer is None:
            break
        rates = _rates_in(step, step.optimizer)
        if rates is None:
            break
        if end is None and stage.stop is None:
            zero = first if rates.are_zero_for_good(first) else None
        else:
            zero = rates.zero_from(first, begin)
        if zero is None:
            break
        begin = zero
        if begin > first:
            break
    if end is None:  # only the first step and some later ones were checked
        return begin if begin == run.setup.loop.first else None
    return begin if end - begin >= 2 else None


# Moving averages whose parameters move on without them.


def _warn_of_averages_left_behind(run: Run) -> None:
    """Warn of each stage that no longer trains leaves whose averages move only in their updates."""
    params, trained = run.state.params, [False] * len(jax.tree.leaves(run.state.params))
    for stage in run.setup.train_steps.stages():
        step = step_function(stage.value)
        if stage.first >= run.setup.options.stop_step or step is None or step.trains is None or step.optimizer is None:
            continue  # it is not reached, or its trained leaves are unknown
        try:
            trains = step.trains(params)
        except Exception:  # the step raises it too, with a better message
            return
        if stage.stop is None or stage.stop > run.setup.loop.first:
            slots = roles_of(step.optimizer, params).with_detail(FOLLOWS_UPDATES)
            averaged = _leaves_in(run.state, slots)
            left = [
                path
                for path, *of in zip(trees.leaf_paths(params), averaged, trained, trains, strict=False)
                if of == [True, True, False]
            ]
            if left:
                _logger.warning(
                    "train_step[%d] no longer trains %s. Their moving averages (%s) are updated only together with "
                    "them, so from step %d on they stay fixed at values that lag behind the parameters. "
                    'jstep.ExponentialMovingAverage(…, follows="step") moves all averages once per step.',
                    stage.first,
                    _named(left),
                    _named(slots),
                    max(stage.first, run.setup.loop.first),
                )
        trained = trains


def _leaves_in(state: TrainState, slots: list[str]) -> list[bool]:
    """Return, for each parameter, whether a slot has a value."""
    nothing = [None for _ in jax.tree.leaves(state.params)]
    of_slots = [trees.flatten_like(state.params, state.slots[name], name) for name in slots if name in state.slots]
    return [any(leaf is not None for leaf in leaves) for leaves in zip(nothing, *of_slots, strict=True)]


def warn_of_averages_at_rest(call: Call, state: Tree) -> None:
    """Warn if averages that follow the step move in no update of a stage, after its first call."""
    stage, roles = call.program.stage, roles_in(state)
    names = roles.with_detail(FOLLOWS_STEP)
    # Compact averages may move in loops over slices, which do not show calls.
    if not names or "compact" in roles.formats or jax.process_index() != 0:
        return
    shapes = shapes_of((state, *call.step_args))
    try:
        with using_mesh(mesh_of(shapes)):
            traced, out = jax.make_jaxpr(as_pure_step(stage.step), return_shape=True)(*shapes)
    except Exception as error:  # a function that cannot be traced
        _logger.debug("%s: whether averages move in it is not known: %s", stage.name, error)
        return
    depends = depend_on_calls(body_of(traced), MOVED, [False] * len(traced.in_avals))
    new, _ = jax.tree.unflatten(jax.tree.structure(out), depends)
    moves = {name: jax.tree.leaves(new.slots[name]) for name in names}
    rest = [name for name, leaves in moves.items() if leaves and not any(leaves)]
    if rest:
        _logger.warning(
            '%s: moving averages that follow the step (%s, follows="step") move in none of its updates: no update with '
            "increment_global_step=True is one of theirs. Let one of them advance the step, or average with "
            'follows="updates".',
            stage.name,
            _named(rest),
        )


# Gradients that no update has used.


def report_accumulated(run: Run) -> None:
    names = roles_in(run.state).with_detail(ACCUMULATED)
    if not run.feeder.has_begun or not names or jax.process_index() != 0:
        return
    counts = jax.device_get(jax.tree.leaves([run.state.slots[name] for name in names]))
    most = max((int(np.max(count)) for count in counts), default=0)
    if most:
        _logger.info(
            "the run ends with the gradients of %d step%s accumulated (%s), which no update has used; a run that "
            "resumes from its checkpoint uses them",
            most,
            "" if most == 1 else "s",
            _named(names),
        )


def _named(names: list[str]) -> str:
    return format_list([repr(name) for name in names], _MAX_NAMES)
