"""`plan`: a preview of a run, as figures and as a table."""

import dataclasses
import functools
import io
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jstep.core.annotations import Tree
from jstep.core.checks import as_int, describe_type, format_count, format_value, truncate, truncate_path
from jstep.core.curves import label_axis
from jstep.core.meshes import internal_transfers
from jstep.core.tables import WIDTH, Tabular, columns, html_picture, wrap_words
from jstep.core.tracebacks import shortens_tracebacks
from jstep.core.trees import OptimizerLike, Schedule
from jstep.data.batches import Batches
from jstep.data.loaders import check_batches
from jstep.data.sequence import BatchSequence
from jstep.hooks.cadence import hook_cadence, next_call
from jstep.hooks.hook import Hook, hook_name, list_of_hooks
from jstep.hooks.run_hook import RunHook
from jstep.loop.stages import as_stages, name_of_step
from jstep.slots.optax_transformations import is_transformation, require_optimizer
from jstep.tools.figures import figure, save_figure

T = TypeVar("T")


class Due(Mapping[Any, Any]):
    """Hooks → the steps at which they are due; keys are hooks or names of their classes."""

    def __init__(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._pairs = tuple(pairs)

    def __getitem__(self, hook: object) -> Any:
        matching = [steps for key, steps in self._pairs if key is hook]
        matching = matching or [steps for key, steps in self._pairs if hook_name(key) == hook]
        if len(matching) != 1:
            names = ", ".join(hook_name(key) for key, _ in self._pairs)
            raise KeyError(f"{len(matching)} hooks match {format_value(hook)}; the hooks are: {names or 'none'}")
        return matching[0]

    def __iter__(self) -> Iterator[Any]:
        return (hook for hook, _ in self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{hook_name(hook)}: {steps!r}' for hook, steps in self._pairs)}}}"


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Tabular):
    """Preview of a run, returned by `plan`.

    Attributes:
        steps: The steps N of the updates N → N + 1 that were evaluated, int64 `[points]`.
        hyperparameters: Name → values at these steps, `[points]`.
        due: Hook → the steps after which it is called. Hooks that are due only by time are left out.
        last_step: The step at which the run ends.
        stages: First step of each stage → the name of its training step; empty if `train_step` was not given.
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
    _rows_at: Mapping[str, np.ndarray[Any, Any]] = dataclasses.field(default_factory=dict)
    _weights: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def _changing(self) -> dict[str, np.ndarray[Any, Any]]:
        named = self.hyperparameters.items()
        return {name: column for name, column in named if column.ndim == 1 and len(np.unique(column)) > 1}

    def __str__(self) -> str:
        """Columns of changing values, then constants, hooks, and the schedule of the data: at most 100 columns wide."""
        lines = [self._steps_text()]
        for names in _column_groups(self._changing, max(4, len(format_count(self.steps[-1])))):
            heads = [f"{'step':>4}", *(f"{truncate_path(name):>12}" for name in names)]
            lines += ["", *columns([heads, *self._rows_of(names)], left=0)]
        constant, due = self._constants(longest=36), self._due_texts()
        lines += ["", *wrap_words("constant", constant)] if constant else []
        if due:
            hooks = columns([(truncate_path(name, 40), when) for name, when in due], left=2)
            lines += ["", *(truncate(line, WIDTH) for line in hooks)]
        schedule = self._schedule()
        return "\n".join([*lines, "", *schedule] if schedule else lines)

    def _title(self) -> str:
        return f"Plan of the {self._steps_text()}"

    def _head(self) -> Sequence[str]:
        return ("step", *self._changing) if self._changing else ()

    def _rows(self) -> list[list[str]]:
        return self._rows_of(self._changing) if self._changing else []

    def _notes(self) -> list[str]:
        constant, due = self._constants(), [f"{name}: {when}" for name, when in self._due_texts()]
        constants = [f"constant: {', '.join(constant)}"] if constant else []
        return [*constants, *self._schedule(), *due]

    def _repr_html_(self) -> str:
        picture, table = io.BytesIO(), super()._repr_html_()
        try:
            self._draw().savefig(picture, dpi=200, format="png")
        except ImportError:  # without matplotlib there is no picture
            return table
        return table + html_picture(picture.getvalue(), "the plan, drawn")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the plan.

        The plot has a panel for each hyperparameter that changes, for the batch size and for the rows of each source, a
        bar for each stage, and a line of marks for each hook.

        Args:
            path: The file; its suffix (`.png`, `.svg`, `.pdf`) selects the format.

        Raises:
            ImportError: matplotlib is not installed: `pip install 'jstep[plot]'`.
        """
        save_figure(self._draw(), os.fspath(path), dpi=200)

    def _steps_text(self) -> str:
        return f"steps {format_count(self.steps[0])} to {format_count(self.last_step - 1)}"

    def _rows_of(self, names: Iterable[str]) -> list[list[str]]:
        last = len(self.steps) - 1
        rows = np.unique(np.linspace(0, last, min(_ROWS, last + 1)).round().astype(int))
        return [
            [format_count(self.steps[row]), *(_number(self.hyperparameters[n][row]) for n in names)] for row in rows
        ]

    def _constants(self, longest: int | None = None) -> list[str]:
        texts = []
        for name, column in self.hyperparameters.items():
            if name not in self._changing:
                value = _number(column[0]) if column.ndim == 1 else f"of shape {list(column.shape[1:])}"
                texts.append(f"{truncate_path(name, longest) if longest else name} {value}")
        return texts

    def _due_texts(self) -> list[tuple[str, str]]:
        return [(hook_name(hook), _due_text(steps)) for hook, steps in self.due.items()]

    def _schedule(self) -> list[str]:
        """Format stages, batch sizes, rows of each source and weights; empty if none is known."""
        each = [f"{format_count(total)} ({self.passes[name]:.3g} passes)" for name, total in self.rows.items()]
        is_one = list(self.rows) == ["rows"]
        words = {
            "stages    ": [f"{format_count(first)}: {name}" for first, name in self.stages.items()],
            "batch size": [f"{format_count(first)}: {size}" for first, size in self.batch_size.items()],
            "rows      ": each if is_one else [f"{n} {w}" for n, w in zip(self.rows, each, strict=True)],
            "weights   ": [
                (f"{format_count(first)}: " if i == 0 else "") + f"{name} {weight:.3g}"
                for first, of in self._weights.items()
                for i, (name, weight) in enumerate(of.items())
            ],
        }
        return [line for title, some in words.items() if some for line in wrap_words(title, some)]

    def _draw(self) -> Any:
        """Draw panels of changing values, bars for stages, marks for hooks, and a line of constants."""
        panels: list[Callable[[Any], None]] = [functools.partial(self._draw_values, name) for name in self._changing]
        panels += [self._draw_sizes] if len(self.batch_size) > 1 else []
        panels += [self._draw_rows] if self._rows_at and len(self.steps) > 1 else []
        across = 1 if len(panels) <= 2 else 2
        down = math.ceil(len(panels) / across)
        # Below the panels, over the whole width.
        lines = [(0.3 + 0.17 * len(self.stages), self._draw_stages)] if len(self.stages) > 1 else []
        lines += [(0.25 + 0.17 * len(self.due), self._draw_due)] if self.due else []
        fig, heights = figure(), [1.0] * down + [height for height, _ in lines]
        fig.set_size_inches(6.5, max(1.2, 1.9 * sum(heights) + 0.3))
        if heights:
            grid = fig.add_gridspec(len(heights), across, height_ratios=heights)
            for i, panel in enumerate(panels):
                panel(self._axes(fig, grid[i // across, i % across]))
            for row, (_, draw) in enumerate(lines, down):
                draw(self._axes(fig, grid[row, :]))
        others = {name: column for name, column in self.hyperparameters.items() if name not in self._changing}
        constant = [f"{name} = {_number(column[0])}" for name, column in others.items() if column.ndim == 1]
        if constant:
            words = f"constant:  {',  '.join(constant)}"
            fig.supxlabel(words, fontsize=7.5, x=0.02, ha="left", color="#424949", wrap=True)
        return fig

    def _axes(self, fig: Any, place: Any) -> Any:
        from matplotlib.ticker import MaxNLocator

        axes, first = fig.add_subplot(place), int(self.steps[0])
        margin = max(1, self.last_step - first) * 0.015
        axes.set_xlim(first - margin, self.last_step + margin)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
        label_axis(axes.xaxis)
        axes.set_xlabel("global step", fontsize=8)
        axes.tick_params(labelsize=7.5)
        axes.spines[["top", "right"]].set_visible(False)
        return axes

    def _draw_values(self, name: str, axes: Any) -> None:
        column = self._changing[name]
        axes.plot(self.steps, column, color=_INK, linewidth=1.4, marker="o" if len(self.steps) == 1 else None)
        low, high = float(np.min(column)), float(np.max(column))
        if low >= 0 and low < 0.5 * high:
            axes.set_ylim(0, high * 1.06)  # the height of a rate is meaningful only from zero
        _titled(axes, name)
        # No common factor above the axis: it would misalign the panel's title with its neighbours.
        label_axis(axes.yaxis)

    def _draw_sizes(self, axes: Any) -> None:
        firsts = [max(first, int(self.steps[0])) for first in self.batch_size]
        values = list(self.batch_size.values())
        axes.step([*firsts, self.last_step], [*values, values[-1]], where="post", color=_INK, linewidth=1.4)
        axes.set_ylim(0, max(values) * 1.06)
        _titled(axes, "batch size")

    def _draw_rows(self, axes: Any) -> None:
        for name, column in self._rows_at.items():
            axes.plot(self.steps, column, linewidth=1.4, label=name)
        axes.set_ylim(0, None)
        if len(self._rows_at) > 1:
            axes.legend(fontsize=6.5, frameon=False)
        _titled(axes, "rows so far")
        label_axis(axes.yaxis)

    def _draw_stages(self, axes: Any) -> None:
        firsts = [max(first, int(self.steps[0])) for first in self.stages]
        for row, (first, stop) in enumerate(itertools.pairwise([*firsts, self.last_step])):
            axes.plot([first, stop], [row, row], color=_INK, linewidth=4.5, alpha=0.6, solid_capstyle="butt")
        axes.set_title("stages", fontsize=9, loc="left")
        names = zip(firsts, self.stages.values(), strict=True)
        _label_lines(axes, [f"{name}:  from {format_count(first)}" for first, name in names])

    def _draw_due(self, axes: Any) -> None:
        for row, when in enumerate(self.due.values()):
            if len(when) > _MARKS:
                bar = [when[0], when[-1]]
                axes.plot(bar, [row, row], color=_MARK, linewidth=4.5, alpha=0.45, solid_capstyle="butt")
            elif len(when):
                axes.plot(list(when), [row] * len(when), linestyle="none", marker="|", markersize=6.5, color=_MARK)
        _label_lines(axes, [f"{name}:  {when}" for name, when in self._due_texts()])


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

    It shows mistakes before the run: a learning rate that decays to zero after a tenth of the run, a warm-up in the
    wrong unit, a checkpoint at every step.

    Args:
        optimizer: An optimizer, a schedule, or a dict of schedules and numbers.
        last_step: As for `train`.
        start: The step of the initial state.
        hooks: As for `train`. Hooks that are due only by time are left out.
        points: Number of steps to evaluate, evenly spaced, including the first and the last.
        train_step: As for `train`; adds the stages to the plan.
        batches: As for `train`; adds batch sizes, weights, and the rows and passes from step 0 to last_step, if made by
            `jstep.batches` or `jstep.mixture`.

    Returns:
        A `Plan`: `str()` is a table, `plot(path)` draws it.

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
        constant  beta1 0.9, beta2 0.999, epsilon 1e-08
        <BLANKLINE>
        LoggingHook  every 250 steps, 4 times: 250, 500, 750, 1 000
    """
    if last_step is None:
        raise TypeError("last_step=None: must be an integer; a plan has an end, also that of a run without a last_step")
    last_step = as_int(last_step, "last_step", 1)
    start, points = as_int(start, "start", 0), as_int(points, "points", 1)
    if start >= last_step:
        raise ValueError(f"start={start}: must be before last_step={last_step}, or there is no step to run")
    if is_transformation(optimizer):
        optimizer = require_optimizer("optimizer", optimizer)
    functions = _functions(optimizer)
    dtype = jax.dtypes.canonicalize_dtype(np.int64)
    if last_step > np.iinfo(dtype).max:
        raise ValueError(
            f"last_step={last_step}: must be at most {np.iinfo(dtype).max}, the last step that {dtype} counts; under "
            "jax_enable_x64 steps are int64"
        )
    steps = np.unique(np.linspace(start, last_step - 1, points).round().astype(np.int64))
    pairs = [(hook, call_steps(hook, start, last_step)) for hook in list_of_hooks(hooks)]
    return Plan(
        steps,
        _values(functions, steps, dtype),
        Due([(hook, due) for hook, due in pairs if due is not None]),
        last_step,
        {} if train_step is None else _stages(train_step, start, last_step),
        **_data(batches, start, last_step, steps),
    )


def _functions(optimizer: Any) -> Any:
    if callable(getattr(optimizer, "hyperparameters", None)):
        return optimizer.hyperparameters
    if isinstance(optimizer, Mapping):
        for name, value in optimizer.items():
            is_array = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.number)
            is_number = isinstance(value, int | float) or (is_array and not np.ndim(value))
            if isinstance(value, bool | type) or not (callable(value) or is_number):
                raise TypeError(
                    f"optimizer[{name!r}]={format_value(value)}: must be a schedule or a number, "
                    f"got {describe_type(value)}"
                )
        return lambda step: {str(name): value(step) if callable(value) else value for name, value in optimizer.items()}
    if callable(optimizer) and not isinstance(optimizer, type):
        return lambda step: {"schedule": optimizer(step)}
    raise TypeError(
        f"optimizer={format_value(optimizer)}: must be an optimizer, a schedule or a dict of schedules, got "
        f"{describe_type(optimizer)}"
    )


def _values(function: Any, steps: Any, dtype: DTypeLike) -> dict[str, np.ndarray[Any, Any]]:
    """Evaluate a function at each step, compiled as in a train step, or else on the host."""
    compiled = jax.jit(lambda step: {name: jnp.asarray(value) for name, value in function(step).items()})
    try:
        with internal_transfers():
            rows = jax.device_get([compiled(np.asarray(step, dtype)) for step in steps])
    except jax.errors.ConcretizationTypeError:
        rows = [{name: np.asarray(value) for name, value in function(int(step)).items()} for step in steps]
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}


def _stages(train_step: object, start: int, last_step: int) -> dict[int, str]:
    """First step → name of the training step, between `start` and `last_step`."""
    return {
        stage.first: name_of_step(stage.value)
        for stage in as_stages(train_step).stages()
        if stage.first < last_step and (stage.stop is None or stage.stop > start)
    }


def _data(batches: Tree, start: int, last_step: int, steps: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The fields of a `Plan` about the batches; empty if they are not made by jstep."""
    if batches is not None:
        check_batches(batches)
    if not isinstance(batches, BatchSequence):
        return {}
    stop = last_step if batches.is_endless else min(last_step, len(batches))
    if start >= stop:
        raise ValueError(f"batches={format_value(batches)}: they end at step {stop}, before start={start}")
    size, rows = batches.batch_size, _by_source(batches, stop)
    total = {"rows": batches.num_rows} if isinstance(batches, Batches) else batches.num_rows
    at = [_by_source(batches, min(int(step), stop)) for step in steps]
    return {
        "batch_size": _between(size if isinstance(size, dict) else {0: size}, start, stop),
        "rows": rows,
        "passes": {name: count / total[name] for name, count in rows.items()},
        "_rows_at": {name: np.array([read[name] for read in at]) for name in rows},
        "_weights": _between(batches.weights(), start, stop),
    }


def _between(stages: Mapping[int, T], start: int, stop: int) -> dict[int, T]:
    """The stages of some steps; the first may begin earlier."""
    in_force = max((first for first in stages if first <= start), default=0)
    return {first: value for first, value in stages.items() if in_force <= first < stop}


def _by_source(batches: Tree, step: int) -> dict[str, int]:
    rows = batches.rows_before(step)
    return rows if isinstance(rows, dict) else {"rows": rows}


# The steps at which hooks are due, derived from their cadence.

_MAX_LISTED = 64
"""Number of due steps to inspect for even spacing; also the most that are listed if they are not evenly spaced."""


def call_steps(hook: Any, start: int, last_step: int) -> Any:
    """Return the steps after which a hook is called; None if it is due only by time, or never.

    For an `AuditHook`, these are the steps that it repeats.
    """
    if hasattr(type(hook), "steps_between"):  # its steps differ from the steps of its calls
        return hook.steps_between(start, last_step)
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


# The words of a plan: the steps of a hook, numbers, columns.

_ROWS = 11


def _due_text(due: Any) -> str:
    if not len(due):
        return "not due"
    if isinstance(due, range) and len(due) > 1:
        if due.step == 1:
            return f"every step, {format_count(len(due))} times"
        return f"every {format_count(due.step)} steps, {format_count(len(due))} times: {_listed(due)}"
    return f"{'once' if len(due) == 1 else f'{len(due)} times'}: {_listed(due)}"


def _number(value: object) -> str:
    return f"{np.asarray(value).item():.6g}"


def _listed(due: Any) -> str:
    if len(due) <= 4:
        return ", ".join(map(format_count, due))
    return f"{format_count(due[0])}, {format_count(due[1])}, …, {format_count(due[-1])}"


def _column_groups(names: Iterable[str], step_width: int) -> list[list[str]]:
    """Group names so that their columns fit the width."""
    groups: list[list[str]] = []
    left = 0
    for name in names:
        width = max(12, len(truncate_path(name))) + 2
        if not groups or width > left:
            groups.append([])
            left = WIDTH - step_width
        groups[-1].append(name)
        left -= width
    return groups


# The look of plots.

_INK, _MARK, _FAINT = "#1b4f72", "#7b241c", "#b3b6b7"
_MARKS = 400
"""More marks than this are drawn as a bar."""


def _titled(axes: Any, name: str) -> None:
    axes.set_title(name, fontsize=9, loc="left")
    axes.grid(color=_FAINT, alpha=0.4, linewidth=0.5)


def _label_lines(axes: Any, labels: Sequence[str]) -> None:
    """Label lines inside the axes, so that they align with the panels."""
    for row, label in enumerate(labels):
        axes.text(0.012, row - 0.27, label, fontsize=6.5, va="bottom", transform=axes.get_yaxis_transform())
    axes.set_yticks([])
    axes.set_ylim(len(labels) - 0.55, -1)
    axes.spines["left"].set_visible(False)
