"""`plan`: a preview of a run, as figures and as a table."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jstep.core.checks import as_int, as_number, describe_type, format_count, format_value, hook_name, truncate_path
from jstep.core.meshes import internal_transfers
from jstep.core.tables import WIDTH, Tabular, columns, wrap_words
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import OptimizerLike, Schedule, Tree
from jstep.data.batches import Batches
from jstep.data.loaders import check_batches
from jstep.data.sequence import BatchSequence
from jstep.hooks.at_steps import StopAtStepHook, stop_steps
from jstep.hooks.hook import Hook, list_of_hooks
from jstep.hooks.run_hook import RunHook, hook_cadence
from jstep.hooks.schedule import next_call
from jstep.loop.stages import as_stages, name_of_step
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
        stages: First step of each stage → the name of its train step; empty if `train_step` was not given.
        batch_size: First step of each batch size → rows of a batch; empty if unknown.
        rows: Source → rows read from it by the last step, `"rows"` for plain batches; empty if unknown.
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
        changing, last = self._changing(), len(self.steps) - 1
        rows = np.unique(np.linspace(0, last, min(_ROWS, last + 1)).round().astype(int)) if changing else ()
        return [
            [format_count(self.steps[row]), *(_number(column[row]) for column in changing.values())] for row in rows
        ]

    def _notes(self) -> list[str]:
        return [f"{name}: {', '.join(words)}" for name, words in self._words()]

    def _steps_text(self) -> str:
        return f"steps {format_count(self.steps[0])} to {format_count(self.last_step - 1)}"

    def _changing(self) -> dict[str, np.ndarray[Any, Any]]:
        named = self.hyperparameters.items()
        return {name: column for name, column in named if column.ndim == 1 and len(np.unique(column)) > 1}

    def _words(self) -> list[tuple[str, list[str]]]:
        """Return the lines below the table: the name of each, and its words."""
        changing = self._changing()
        constant = [
            f"{name} {_constant(value)}" for name, value in self.hyperparameters.items() if name not in changing
        ]
        stages = [f"{format_count(first)}: {name}" for first, name in self.stages.items()]
        sizes = [f"{format_count(first)}: {size}" for first, size in self.batch_size.items()]
        rows = []
        for name, number in self.rows.items():
            text = f"{name} {format_count(number)} ({self.passes[name]:.3g} passes)"
            rows.append(text.removeprefix("rows "))  # the name of the only source
        weights = []
        for first, weight_of_source in self._weights.items():
            named = " ".join(f"{name} {weight:.3g}" for name, weight in weight_of_source.items())
            weights.append(f"{format_count(first)}: {named}")
        lines = [
            ("constant", constant),
            ("stages", stages),
            ("batch size", sizes),
            ("rows", rows),
            ("weights", weights),
        ]
        lines = [(name, words) for name, words in lines if words]
        for hook, steps in self.due.items():
            lines.append((hook if isinstance(hook, str) else hook_name(hook), [_due_text(steps)]))
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
    """Preview a run: hyperparameters at the steps from start to last_step − 1, and the steps at which hooks are due.

    Args:
        optimizer: An optimizer, a schedule, or a dict of schedules and numbers.
        last_step: As for `train`.
        start: The step of the initial state.
        hooks: As for `train`. Hooks that are due only by time are left out.
        points: Number of steps to evaluate, evenly spaced, including the first and the last.
        train_step: As for `train`; adds the stages to the plan.
        batches: As for `train`; adds batch sizes, weights, rows and passes, if made by `jstep.batches` or
            `jstep.mixture`.

    Returns:
        A `Plan`, whose `str()` is a table.

    Raises:
        ValueError: `start` is not before last_step, or a number is out of range.

    Example:
        >>> import jstep
        >>> schedule = jstep.linear_warmup(jstep.cosine_decay(0.1, 1000), 100)
        >>> plan = jstep.plan(jstep.adam(schedule), 1000, hooks=[jstep.LoggingHook(every_n_steps=250)], points=5)
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
    start, points = as_int(start, "start", 0), as_int(points, "points", 1)
    if start >= last_step:
        raise ValueError(f"start={start}: must be before last_step={last_step}, or there is no step to run")
    if is_transformation(optimizer):
        optimizer = as_optimizer("optimizer", optimizer)
    functions = _functions(optimizer)
    dtype = jax.dtypes.canonicalize_dtype(np.int64)
    if last_step > np.iinfo(dtype).max:
        raise ValueError(f"last_step={last_step}: must be at most {np.iinfo(dtype).max}, the last step of {dtype}")
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
                value = as_number(value, f"optimizer[{name!r}]", expected="a schedule or a number", finite=False)
            values[str(name)] = value

        def values_at(step: Any) -> dict[str, Any]:
            return {name: value(step) if callable(value) else value for name, value in values.items()}

        return values_at
    if callable(optimizer) and not isinstance(optimizer, type):
        return lambda step: {"schedule": optimizer(step)}
    raise TypeError(
        f"optimizer={format_value(optimizer)}: must be an optimizer, a schedule or a dict of schedules, got "
        f"{describe_type(optimizer)}"
    )


def _values(function: Any, steps: Any, dtype: DTypeLike) -> dict[str, np.ndarray[Any, Any]]:
    """The values of a function at each step, compiled as in a train step if it can be."""
    compiled = jax.jit(lambda step: {name: jnp.asarray(value) for name, value in function(step).items()})
    try:
        with internal_transfers():
            rows = jax.device_get([compiled(np.asarray(step, dtype)) for step in steps])
    except jax.errors.ConcretizationTypeError:
        rows = [{name: np.asarray(value) for name, value in function(int(step)).items()} for step in steps]
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}


def _stages(train_step: object, start: int, last_step: int) -> dict[int, str]:
    return {
        stage.first: name_of_step(stage.value)
        for stage in as_stages(train_step).stages()
        if stage.first < last_step and (stage.stop is None or stage.stop > start)
    }


def _data(batches: Tree, start: int, last_step: int) -> dict[str, Any]:
    if batches is not None:
        check_batches(batches)
    if not isinstance(batches, BatchSequence):
        return {}
    stop = last_step if batches.is_endless else min(last_step, len(batches))
    if start >= stop:
        raise ValueError(f"batches={format_value(batches)}: they end at step {stop}, before start={start}")
    size = batches.batch_size
    rows = batches.rows_before(stop)
    total = batches.num_rows
    if isinstance(batches, Batches):
        rows, total = {"rows": rows}, {"rows": total}
    return {
        "batch_size": _between(size if isinstance(size, dict) else {0: size}, start, stop),
        "rows": rows,
        "passes": {name: count / total[name] for name, count in rows.items()},
        "_weights": _between(batches.weights(), start, stop),
    }


def _between(stages: Mapping[int, T], start: int, stop: int) -> dict[int, T]:
    in_force = max((first for first in stages if first <= start), default=0)
    return {first: value for first, value in stages.items() if in_force <= first < stop}


# The steps at which hooks are due, derived from their cadence.

_MAX_LISTED = 64
"""The most due steps that are listed, or inspected for even spacing."""


def call_steps(hook: Any, start: int, last_step: int) -> Any:
    if isinstance(hook, StopAtStepHook):  # its steps differ from the steps of its calls
        return stop_steps(hook, start, last_step)
    cadence = hook_cadence(hook)
    if cadence is None and getattr(type(hook), "after_step", None) in (None, Hook.after_step, RunHook.after_step):
        return None
    if cadence is not None and cadence.steps is None:
        return None

    def next_due(step: int) -> int:
        return next_call(hook, step)[0]

    steps: list[int] = []
    due = next_due(start)
    while due <= last_step and len(steps) < _MAX_LISTED:
        steps.append(due)
        due = next_due(due)
    if len(steps) < 2:
        return range(steps[0], steps[0] + 1) if steps else range(start + 1, start + 1)
    evenly = range(steps[0], last_step + 1, steps[1] - steps[0])
    # Checked at both ends only: the first steps and the last interval.
    if list(evenly[: len(steps)]) == steps and (len(evenly) < 2 or next_due(evenly[-2]) == evenly[-1]):
        return evenly
    return tuple(steps)


# The words of a plan.

_ROWS = 11


def _due_text(due: Any) -> str:
    if not len(due):
        return "not due"
    few = [*due] if len(due) <= 4 else [due[0], due[1], "…", due[-1]]
    listed = ", ".join(step if isinstance(step, str) else format_count(step) for step in few)
    if not isinstance(due, range) or len(due) == 1:
        return f"{'once' if len(due) == 1 else f'{len(due)} times'}: {listed}"
    times = f"{format_count(len(due))} times"
    return f"every step, {times}" if due.step == 1 else f"every {format_count(due.step)} steps, {times}: {listed}"


def _constant(column: np.ndarray[Any, Any]) -> str:
    return _number(column[0]) if column.ndim == 1 else f"of shape {list(column.shape[1:])}"


def _number(value: object) -> str:
    return f"{np.asarray(value).item():.6g}"
