"""Formatting of plans as text and HTML, at most 100 columns wide."""

from typing import Any

import numpy as np

from jstep.core.checks import WIDTH, columns, count, cut, cut_path, html_table, wrapped
from jstep.hooks.hook import name_of

_ROWS = 11


def plan_text(plan: Any) -> str:
    """Format a `Plan` as text: columns of changing values, then constants, hooks, and the schedule of the data."""
    changing, rows = _changing(plan), _rows_shown(plan.steps)
    lines = [f"steps {count(plan.steps[0])} to {count(plan.last_step - 1)}"]
    for names in _column_groups(list(changing), max(4, *(len(count(plan.steps[row])) for row in rows))):
        heads = [f"{'step':>4}", *(f"{cut_path(name):>12}" for name in names)]
        cells = [[count(plan.steps[row]), *(number(changing[name][row]) for name in names)] for row in rows]
        lines += ["", *columns([heads, *cells], left=0)]
    constant = _constants(plan, longest=36)
    if constant:
        lines += ["", *wrapped("constant", constant)]
    due = named_due(plan)
    if due:
        hooks = columns([(cut_path(name, 40), due_text(when)) for name, when in due], left=2)
        lines += ["", *(cut(line, WIDTH) for line in hooks)]
    schedule = _schedule(plan)
    return "\n".join([*lines, "", *schedule] if schedule else lines)


def plan_html(plan: Any) -> str:
    """Format a `Plan` as HTML for a notebook, followed by the schedule of the data."""
    changing, constant = _changing(plan), _constants(plan)
    notes = [
        *([f"constant: {', '.join(constant)}"] if constant else []),
        *_schedule(plan),
        *(f"{name}: {due_text(when)}" for name, when in named_due(plan)),
    ]
    cells = [
        (count(plan.steps[row]), *(number(column[row]) for column in changing.values()))
        for row in (_rows_shown(plan.steps) if changing else [])
    ]
    title = f"Plan of the steps {count(plan.steps[0])} to {count(plan.last_step - 1)}"
    return html_table(title, cells, ("step", *changing) if changing else (), notes)


def _changing(plan: Any) -> dict[str, np.ndarray[Any, Any]]:
    named = plan.hyperparameters.items()
    return {name: column for name, column in named if column.ndim == 1 and len(np.unique(column)) > 1}


def _constants(plan: Any, longest: int | None = None) -> list[str]:
    changing = _changing(plan)
    same = {name: column for name, column in plan.hyperparameters.items() if name not in changing}
    return [f"{cut_path(name, longest) if longest else name} {_constant(column)}" for name, column in same.items()]


def _rows_shown(steps: np.ndarray[Any, Any]) -> Any:
    return np.unique(np.linspace(0, len(steps) - 1, min(_ROWS, len(steps))).round().astype(int))


def _schedule(plan: Any) -> list[str]:
    """Format stages, batch sizes, rows of each source and weights; empty if none is known."""
    each = [f"{count(total)} ({plan.passes[name]:.3g} passes)" for name, total in plan.rows.items()]
    is_one = list(plan.rows) == ["rows"]
    words = {
        "stages    ": [f"{count(first)}: {name}" for first, name in plan.stages.items()],
        "batch size": [f"{count(first)}: {size}" for first, size in plan.batch_size.items()],
        "rows      ": each if is_one else [f"{n} {w}" for n, w in zip(plan.rows, each, strict=True)],
        "weights   ": [
            (f"{count(first)}: " if i == 0 else "") + f"{name} {weight:.3g}"
            for first, of in plan._weights.items()
            for i, (name, weight) in enumerate(of.items())
        ],
    }
    return [line for title, some in words.items() if some for line in wrapped(title, some)]


def named_due(plan: Any) -> list[tuple[str, Any]]:
    """Return the display name of each hook of a `Plan`, and its steps."""
    return [(name_of(hook), steps) for hook, steps in plan.due.items()]


def due_text(due: Any) -> str:
    """Describe the steps at which a hook is due."""
    if not len(due):
        return "not due"
    if isinstance(due, range) and len(due) > 1:
        if due.step == 1:
            return f"every step, {count(len(due))} times"
        return f"every {count(due.step)} steps, {count(len(due))} times: {_listed(due)}"
    return f"{'once' if len(due) == 1 else f'{len(due)} times'}: {_listed(due)}"


def number(value: Any) -> str:
    """Format a number with at most six digits."""
    value = np.asarray(value)
    return f"{value.item():.6g}" if value.ndim == 0 else f"{value.dtype}{list(value.shape)}"


def _constant(column: np.ndarray[Any, Any]) -> str:
    return number(column[0]) if column.ndim == 1 else f"of shape {list(column.shape[1:])}"


def _listed(due: Any) -> str:
    if len(due) <= 4:
        return ", ".join(map(count, due))
    return f"{count(due[0])}, {count(due[1])}, …, {count(due[-1])}"


def _column_groups(names: list[str], step_width: int) -> list[list[str]]:
    """Group names so that the columns of each group fit the width."""
    groups: list[list[str]] = []
    left = 0
    for name in names:
        width = max(12, len(cut_path(name))) + 2
        if not groups or width > left:
            groups.append([])
            left = WIDTH - step_width
        groups[-1].append(name)
        left -= width
    return groups
