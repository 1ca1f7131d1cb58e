"""`plan`: a preview of a run, as figures and as a table."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jstep.compiling.stages import as_stages, name_of_step
from jstep.core.checks import (
    as_int,
    as_number,
    describe_type,
    format_count,
    format_value,
    hook_name,
    truncate_path,
)
from jstep.core.meshes import internal_transfers
from jstep.core.tables import WIDTH, Tabular, columns, wrap_words
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import OptimizerLike, Schedule, Tree
from jstep.data.batches import Batches
from jstep.data.loaders import check_batches
from jstep.data.sequence import BatchSequence
from jstep.hooks.at_steps import StopAtStepHook, stop_steps
from jstep.hooks.cadence import hook_cadence
from jstep.hooks.hook import Hook, list_of_hooks
from jstep.hooks.run_hook import RunHook
from jstep.hooks.timetable import next_call
from jstep.slots.optax_transformations import as_optimizer, is_transformation

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Plan(Tabular):
    """Preview of a run, returned by `plan`.

    Attributes:
        steps: The steps N of the updates N → N + 1 that were evaluated, int64 `[points]`.
        hyperparameters: Name → values at these steps, `[points]`.
        due: Hook, or the name of its class if it has no hash → the steps after which it is called.
        last_step: The step at which the run ends.
        stages: First step of each stage → the name of its train step; empty if `train_step` was not
            given.
        batch_size: First step of each batch size → rows of a batch; empty if unknown.
        rows: Source → rows read from it by the last step, `"rows"` for plain batches; empty if
            unknown.
        passes: Source → number of passes over it by the last step.
    """

    steps: np.ndarray[Any, Any]
    hyperparameters: Mapping[str, np.ndarray[Any, Any]]
    due: Mapping[Any, Any]
    last_step: int
    stages: Mapping[int, str] = dataclasses.field(default_factory=dict)
    batch_size: Mapping[int, int] = dataclasses.field(default_factory=dict)
    rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    passes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    _weights: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """Columns of changing values, then everything else by name: at most 100 columns wide."""
        lines = [self._steps_text()]
        if self._changing():
            lines += ["", *columns([self._head(), *self._rows()], left=0, max_width=WIDTH)]
        named = [(truncate_path(name), words) for name, words in self._words()]
        width = max((len(name) for name, _ in named), default=0)
        wrapped = [line for name, words in named for line in wrap_words(name.ljust(width), words)]
        return "\n".join([*lines, "", *wrapped] if wrapped else lines)

    def _title(self) -> str:
        return f"Plan of the {self._steps_text()}"

    def _head(self) -> Sequence[str]:
        names = [truncate_path(name) for name in self._changing()]
        return ["step", *names] if names else []

    def _rows(self) -> list[list[str]]:
        changing = self._changing()
        if not changing:
            return []
        last = len(self.steps) - 1
        shown = np.unique(np.linspace(0, last, min(_ROWS, last + 1)).round().astype(int))
        rows: list[list[str]] = []
        for i in shown:
            values = [_number(column[i]) for column in changing.values()]
            rows.append([format_count(self.steps[i]), *values])
        return rows

    def _notes(self) -> list[str]:
        return [f"{name}: {', '.join(words)}" for name, words in self._words()]

    def _steps_text(self) -> str:
        return f"steps {format_count(self.steps[0])} to {format_count(self.last_step - 1)}"

    def _changing(self) -> dict[str, np.ndarray[Any, Any]]:
        changing: dict[str, np.ndarray[Any, Any]] = {}
        for name, column in self.hyperparameters.items():
            if column.ndim == 1 and len(np.unique(column)) > 1:
                changing[name] = column
        return changing

    def _words(self) -> list[tuple[str, list[str]]]:
        """Return the lines below the table: the name of each, and its words."""
        changing = self._changing()
        words: dict[str, list[str]] = {
            "constant": [],
            "stages": [],
            "batch size": [],
            "rows": [],
            "weights": [],
        }
        for name, column in self.hyperparameters.items():
            if name not in changing:
                words["constant"].append(f"{name} {_constant(column)}")
        for first, name in self.stages.items():
            words["stages"].append(f"{format_count(first)}: {name}")
        for first, size in self.batch_size.items():
            words["batch size"].append(f"{format_count(first)}: {size}")
        for name, count in self.rows.items():
            text = f"{name} {format_count(count)} ({self.passes[name]:.3g} passes)"
            # Plain batches have one source, which is called "rows" as the line is.
            words["rows"].append(text.removeprefix("rows "))
        for first, weights in self._weights.items():
            named = " ".join(f"{name} {weight:.3g}" for name, weight in weights.items())
            words["weights"].append(f"{format_count(first)}: {named}")
        lines = [(name, line) for name, line in words.items() if line]
        # A list, as two hooks may have the same name.
        for hook, steps in self.due.items():
            name = hook if isinstance(hook, str) else hook_name(hook)
            lines.append((name, [_due_text(steps)]))
        return lines


@shortens_tracebacks
def plan(
    optimizer: OptimizerLike | Schedule | Mapping[str, Schedule | float],
    last_step: int,
    *,
    start: int = 0,
    hooks: Sequence[Any] = (),
    points: int = 200,
    train_step: Callable[..., Any] | Mapping[int, Callable[..., Any]] | None = None,
    batches: Tree = None,
) -> Plan:
    """Preview a run: hyperparameters at steps start to last_step − 1, and when hooks are due.

    Args:
        optimizer: An optimizer, a schedule, or a dict of schedules and numbers.
        last_step: As for `train`.
        start: The step of the initial state.
        hooks: As for `train`. Hooks that are due only by time are left out.
        points: Number of steps to evaluate, evenly spaced, including the first and the last.
        train_step: As for `train`; adds the stages to the plan.
        batches: As for `train`; adds batch sizes, weights, rows and passes, if made by
            `jstep.batches` or `jstep.mixture`.

    Returns:
        A `Plan`, whose `str()` is a table.

    Raises:
        ValueError: `start` is not before last_step, or a number is out of range.

    Example:
        >>> import jstep
        >>> schedule = jstep.linear_warmup(jstep.cosine_decay(0.1, 1000), 100)
        >>> hook = jstep.LoggingHook(every_n_steps=250)
        >>> plan = jstep.plan(jstep.adam(schedule), 1000, hooks=[hook], points=5)
        >>> print(plan)
        steps 0 to 999
        <BLANKLINE>
        step  learning_rate
           0          0.001
         250      0.0853553
         500           0.05
         749      0.0147559
         999     2.4674e-07
        <BLANKLINE>
        constant     beta1 0.9, beta2 0.999, epsilon 1e-08
        LoggingHook  every 250 steps, 4 times: 250, 500, 750, 1 000
    """
    last_step = as_int(last_step, "last_step", 1)
    start = as_int(start, "start", 0)
    points = as_int(points, "points", 1)
    if start >= last_step:
        raise ValueError(
            f"start={start}: must be before last_step={last_step}, or there is no step to run"
        )
    if is_transformation(optimizer):
        optimizer = as_optimizer("optimizer", optimizer)
    functions = _functions(optimizer)
    dtype = jax.dtypes.canonicalize_dtype(np.int64)
    if last_step > np.iinfo(dtype).max:
        raise ValueError(
            f"last_step={last_step}: must be at most {np.iinfo(dtype).max}, the last step of "
            f"{dtype}"
        )
    steps = np.unique(np.linspace(start, last_step - 1, points).round().astype(np.int64))
    due: dict[Any, Any] = {}
    for hook in list_of_hooks(hooks):
        steps_of_hook = call_steps(hook, start, last_step)
        if steps_of_hook is not None:
            due[hook if isinstance(hook, Hashable) else hook_name(hook)] = steps_of_hook
    return Plan(
        steps=steps,
        hyperparameters=_values(functions, steps, dtype),
        due=due,
        last_step=last_step,
        stages={} if train_step is None else _stages(train_step, start, last_step),
        **_data(batches, start, last_step),
    )


def _functions(optimizer: Any) -> Any:
    if callable(getattr(optimizer, "hyperparameters", None)):
        return optimizer.hyperparameters
    if isinstance(optimizer, Mapping):
        values: dict[str, Any] = {}
        for name, value in optimizer.items():
            if not callable(value):
                value = as_number(
                    value, f"optimizer[{name!r}]", expected="a schedule or a number", finite=False
                )
            values[str(name)] = value

        def values_at(step: Any) -> dict[str, Any]:
            return {
                name: value(step) if callable(value) else value for name, value in values.items()
            }

        return values_at
    if callable(optimizer) and not isinstance(optimizer, type):
        return lambda step: {"schedule": optimizer(step)}
    raise TypeError(
        f"optimizer={format_value(optimizer)}: must be an optimizer, a schedule or a dict of "
        f"schedules, got {describe_type(optimizer)}"
    )


def _values(function: Any, steps: Any, dtype: DTypeLike) -> dict[str, np.ndarray[Any, Any]]:
    """The values of a function at each step, compiled as in a train step if it can be."""
    compiled = jax.jit(
        lambda step: {name: jnp.asarray(value) for name, value in function(step).items()}
    )
    try:
        with internal_transfers():
            rows = jax.device_get([compiled(np.asarray(step, dtype)) for step in steps])
    except jax.errors.ConcretizationTypeError:
        # It needs the value of the step, so only a step that is not compiled can use it.
        rows = [function(int(step)) for step in steps]
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}


def _stages(train_step: object, start: int, last_step: int) -> dict[int, str]:
    names: dict[int, str] = {}
    for stage in as_stages(train_step).stages():
        if stage.first < last_step and (stage.stop is None or stage.stop > start):
            names[stage.first] = name_of_step(stage.value)
    return names


def _data(batches: Tree, start: int, last_step: int) -> dict[str, Any]:
    if batches is not None:
        check_batches(batches)
    if not isinstance(batches, BatchSequence):
        return {}
    stop = last_step if batches.is_endless else min(last_step, len(batches))
    if start >= stop:
        raise ValueError(
            f"batches={format_value(batches)}: they end at step {stop}, before start={start}"
        )
    size = batches.batch_size
    rows = batches.rows_before(stop)
    total = batches.num_rows
    if isinstance(batches, Batches):
        rows = {"rows": rows}
        total = {"rows": total}
    return {
        "batch_size": _restrict(size if isinstance(size, dict) else {0: size}, start, stop),
        "rows": rows,
        "passes": {name: count / total[name] for name, count in rows.items()},
        "_weights": _restrict(batches.weights(), start, stop),
    }


def _restrict(stages: Mapping[int, T], start: int, stop: int) -> dict[int, T]:
    """Return what applies from start to stop, of first step → what applies from there on."""
    current = max((first for first in stages if first <= start), default=0)
    return {first: value for first, value in stages.items() if current <= first < stop}


# The steps at which hooks are due, derived from their cadence.

_MAX_LISTED = 64
"""The most due steps that are listed, or inspected for even spacing."""


def call_steps(hook: Any, start: int, last_step: int) -> Any:
    """Return the steps after which a hook is called: a range or a tuple, or None.

    None means never, or only by time. Of many steps, only the first are asked for: a tuple has at
    most `_MAX_LISTED`.
    """
    if isinstance(hook, StopAtStepHook):
        # Those at which it stops, not those at which it is called.
        return stop_steps(hook, start, last_step)
    cadence = hook_cadence(hook)
    if cadence is None:
        method = getattr(type(hook), "after_step", None)
        has_method = method not in (None, Hook.after_step, RunHook.after_step)
        if not has_method:
            return None
    elif cadence.steps is None:
        return None

    def next_due(step: int) -> int:
        return next_call(hook, step)[0]

    steps: list[int] = []
    due = next_due(start)
    while due <= last_step and len(steps) < _MAX_LISTED:
        steps.append(due)
        due = next_due(due)
    if not steps:
        return range(start + 1, start + 1)
    if len(steps) == 1:
        return range(steps[0], steps[0] + 1)
    evenly = range(steps[0], last_step + 1, steps[1] - steps[0])
    # Checked at both ends only, the first steps and the last interval, as a run may have millions
    # of them.
    has_steps = list(evenly[: len(steps)]) == steps
    if has_steps and (len(evenly) < 2 or next_due(evenly[-2]) == evenly[-1]):
        return evenly
    return tuple(steps)


# The words of a plan.

_ROWS = 11


def _due_text(due: Any) -> str:
    if not len(due):
        return "not due"
    if len(due) <= 4:
        listed = ", ".join(map(format_count, due))
    else:
        listed = f"{format_count(due[0])}, {format_count(due[1])}, …, {format_count(due[-1])}"
    if len(due) == 1:
        return f"once: {listed}"
    if not isinstance(due, range):
        return f"{len(due)} times: {listed}"
    times = f"{format_count(len(due))} times"
    if due.step == 1:
        return f"every step, {times}"
    return f"every {format_count(due.step)} steps, {times}: {listed}"


def _constant(column: np.ndarray[Any, Any]) -> str:
    return _number(column[0]) if column.ndim == 1 else f"of shape {list(column.shape[1:])}"


def _number(value: object) -> str:
    return f"{np.asarray(value).item():.6g}"
