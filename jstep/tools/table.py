"""Formatting of plans as text and HTML, at most 100 columns wide."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jstep.core.text import html_table

WIDTH = 100
_ROWS = 11


def plan_text(
    steps: np.ndarray[Any, Any], values: Mapping[str, np.ndarray[Any, Any]], due: Sequence[tuple[str, Any]], last: int
) -> str:
    """Format a plan as text: columns of changing values, then constants, then hooks."""
    changing, rows = _changing(values), _rows_shown(steps)
    lines = [f"steps {_count(steps[0])} to {_count(last - 1)}"]
    step_width = max(4, *(len(_count(step)) for step in steps[rows]))
    for names in _column_groups(list(changing), step_width):
        widths = [max(12, len(_cut(name))) for name in names]
        heads = [f"{_cut(name):>{w}}" for name, w in zip(names, widths, strict=True)]
        lines += ["", "  ".join([f"{'step':>{step_width}}", *heads])]
        for row in rows:
            cells = [f"{number(changing[name][row]):>{w}}" for name, w in zip(names, widths, strict=True)]
            lines.append("  ".join([f"{_count(steps[row]):>{step_width}}", *cells]))
    same = [name for name in values if name not in changing]
    if same:
        lines += ["", *wrapped("constant", [f"{_cut(name)} {_constant(values[name])}" for name in same])]
    if due:
        width = min(40, max(len(name) for name, _ in due))
        lines += ["", *(_cut(f"{_cut(name, 40):<{width}}  {due_text(when)}", WIDTH) for name, when in due)]
    return "\n".join(lines)


def plan_html(
    steps: np.ndarray[Any, Any],
    values: Mapping[str, np.ndarray[Any, Any]],
    due: Sequence[tuple[str, Any]],
    last: int,
    schedule: str,
) -> str:
    """Format a plan as HTML for a notebook, followed by its schedule."""
    changing = _changing(values)
    same = ", ".join(f"{name} {_constant(values[name])}" for name in values if name not in changing)
    notes = [
        *([f"constant: {same}"] if same else []),
        *schedule.splitlines(),
        *(f"{name}: {due_text(when)}" for name, when in due),
    ]
    cells = [
        (_count(steps[row]), *(number(column[row]) for column in changing.values()))
        for row in (_rows_shown(steps) if changing else [])
    ]
    title = f"Plan of the steps {_count(steps[0])} to {_count(last - 1)}"
    return html_table(title, cells, ("step", *changing) if changing else (), notes)


def _changing(values: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: column for name, column in values.items() if column.ndim == 1 and len(np.unique(column)) > 1}


def _rows_shown(steps: np.ndarray[Any, Any]) -> Any:
    return np.unique(np.linspace(0, len(steps) - 1, min(_ROWS, len(steps))).round().astype(int))


def schedule_text(
    stages: Mapping[int, str],
    sizes: Mapping[int, int],
    rows: Mapping[str, int],
    passes: Mapping[str, float],
    weights: Mapping[int, Mapping[str, float]],
) -> str:
    """Format stages, batch sizes, rows of each source and weights; empty if none is known."""
    lines = []
    if stages:
        lines += wrapped("stages    ", [f"{_count(first)}: {name}" for first, name in stages.items()])
    if sizes:
        lines += wrapped("batch size", [f"{_count(first)}: {size}" for first, size in sizes.items()])
    if rows:
        is_one = list(rows) == ["rows"]
        words = [f"{_count(count)} ({passes[name]:.3g} passes)" for name, count in rows.items()]
        lines += wrapped("rows      ", words if is_one else [f"{n} {w}" for n, w in zip(rows, words, strict=True)])
    if weights:
        words = [
            (f"{_count(first)}: " if i == 0 else "") + f"{name} {weight:.3g}"
            for first, of in weights.items()
            for i, (name, weight) in enumerate(of.items())
        ]
        lines += wrapped("weights   ", words)
    return "\n".join(lines)


def due_text(due: Any) -> str:
    """Describe the steps at which a hook is due."""
    if not len(due):
        return "not due"
    if isinstance(due, range) and len(due) > 1:
        if due.step == 1:
            return f"every step, {_count(len(due))} times"
        return f"every {_count(due.step)} steps, {_count(len(due))} times: {_listed(due)}"
    return f"{'once' if len(due) == 1 else f'{len(due)} times'}: {_listed(due)}"


def wrapped(title: str, words: Sequence[str]) -> list[str]:
    """Wrap a list of words after a title."""
    lines = [f"{title}  "]
    for i, word in enumerate(words):
        more = word + ("" if i + 1 == len(words) else ", ")
        if len(lines[-1]) + len(more.rstrip()) > WIDTH:
            lines.append(" " * (len(title) + 2))
        lines[-1] += more
    return [line.rstrip() for line in lines]


def number(value: Any) -> str:
    """Format a number with at most six digits."""
    value = np.asarray(value)
    return f"{value.item():.6g}" if value.ndim == 0 else f"{value.dtype}{list(value.shape)}"


def listed(words: Sequence[str]) -> str:
    """Return the first word, and the number of the others."""
    return words[0] if len(words) == 1 else f"{words[0]} and {len(words) - 1} more"


def _constant(column: np.ndarray[Any, Any]) -> str:
    return number(column[0]) if column.ndim == 1 else f"of shape {list(column.shape[1:])}"


def _listed(due: Any) -> str:
    if len(due) <= 4:
        return ", ".join(map(_count, due))
    return f"{_count(due[0])}, {_count(due[1])}, …, {_count(due[-1])}"


def _column_groups(names: list[str], step_width: int) -> list[list[str]]:
    """Group names so that the columns of each group fit the width."""
    groups: list[list[str]] = []
    left = 0
    for name in names:
        width = max(12, len(_cut(name))) + 2
        if not groups or width > left:
            groups.append([])
            left = WIDTH - step_width
        groups[-1].append(name)
        left -= width
    return groups


def _cut(text: str, longest: int = 36) -> str:
    return text if len(text) <= longest else "…" + text[1 - longest :] if longest < WIDTH else text[: longest - 1] + "…"


def _count(number: Any) -> str:
    return f"{int(number):,}".replace(",", " ")
