"""Plots of plans with matplotlib; no display is needed."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jstep.core.checks import count, figure
from jstep.tools.table import due_text, named_due, number

_INK, _MARK, _FAINT = "#1b4f72", "#7b241c", "#b3b6b7"
_MARKS = 400
"""More marks than this are drawn as a bar."""


def draw_plan(plan: Any, file: Any, **options: Any) -> None:
    """Draw a `Plan`: panels of changing values, bars for stages, a line of marks for each hook, a line of constants."""
    columns = {name: column for name, column in plan.hyperparameters.items() if column.ndim == 1}
    changing = {name: column for name, column in columns.items() if len(np.unique(column)) > 1}
    constant = {name: column[0] for name, column in columns.items() if name not in changing}
    due = named_due(plan)
    panels: list[Callable[..., None]] = [
        functools.partial(_panel, name=name, column=column) for name, column in changing.items()
    ]
    panels += [_sizes] if len(plan.batch_size) > 1 else []
    panels += [_rows] if plan._rows_at and len(plan.steps) > 1 else []
    across = 1 if len(panels) <= 2 else 2
    down = math.ceil(len(panels) / across)
    fig = figure()
    heights = [1.0] * down
    heights += [0.3 + 0.17 * len(plan.stages)] if len(plan.stages) > 1 else []
    heights += [0.25 + 0.17 * len(due)] if due else []
    fig.set_size_inches(6.5, max(1.2, 1.9 * sum(heights) + 0.3))
    if heights:
        grid = fig.add_gridspec(len(heights), across, height_ratios=heights)
        for i, panel in enumerate(panels):
            panel(_axes(fig, grid[i // across, i % across], plan), plan)
        if len(plan.stages) > 1:
            _stages(_axes(fig, grid[down, :], plan), plan)
        if due:
            _marks(_axes(fig, grid[len(heights) - 1, :], plan), due)
    if constant:
        words = ",  ".join(f"{name} = {number(value)}" for name, value in constant.items())
        fig.supxlabel(f"constant:  {words}", fontsize=7.5, x=0.02, ha="left", color="#424949", wrap=True)
    fig.savefig(file, dpi=200, **options)


def _panel(axes: Any, plan: Any, name: str, column: Any) -> None:
    axes.plot(plan.steps, column, color=_INK, linewidth=1.4, marker="o" if len(plan.steps) == 1 else None)
    low, high = float(np.min(column)), float(np.max(column))
    if low >= 0 and low < 0.5 * high:
        axes.set_ylim(0, high * 1.06)  # the height of a rate is meaningful only from zero
    _titled(axes, name)
    # No common factor above the axis: it would misalign the panel's title with its neighbours.
    axes.yaxis.set_major_formatter(lambda value, _: number(value))


def _sizes(axes: Any, plan: Any) -> None:
    firsts = [max(first, int(plan.steps[0])) for first in plan.batch_size]
    values = list(plan.batch_size.values())
    axes.step([*firsts, plan.last_step], [*values, values[-1]], where="post", color=_INK, linewidth=1.4)
    axes.set_ylim(0, max(values) * 1.06)
    _titled(axes, "batch size")


def _rows(axes: Any, plan: Any) -> None:
    from matplotlib.ticker import EngFormatter

    for name, column in plan._rows_at.items():
        axes.plot(plan.steps, column, linewidth=1.4, label=name)
    axes.set_ylim(0, None)
    if len(plan._rows_at) > 1:
        axes.legend(fontsize=6.5, frameon=False)
    _titled(axes, "rows so far")
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _titled(axes: Any, name: str) -> None:
    axes.set_title(name, fontsize=9, loc="left")
    axes.grid(color=_FAINT, alpha=0.4, linewidth=0.5)


def _stages(axes: Any, plan: Any) -> None:
    firsts = [max(first, int(plan.steps[0])) for first in plan.stages]
    stops = [*firsts[1:], plan.last_step]
    for row, (first, stop, name) in enumerate(zip(firsts, stops, plan.stages.values(), strict=True)):
        axes.plot([first, stop], [row, row], color=_INK, linewidth=4.5, alpha=0.6, solid_capstyle="butt")
        _labelled(axes, row, f"{name}:  from {count(first)}")
    axes.set_title("stages", fontsize=9, loc="left")
    _as_lines(axes, len(plan.stages))


def _marks(axes: Any, due: Sequence[tuple[str, Any]]) -> None:
    for row, (name, when) in enumerate(due):
        if len(when) > _MARKS:
            axes.plot([when[0], when[-1]], [row, row], color=_MARK, linewidth=4.5, alpha=0.45, solid_capstyle="butt")
        elif len(when):
            axes.plot(list(when), [row] * len(when), linestyle="none", marker="|", markersize=6.5, color=_MARK)
        _labelled(axes, row, f"{name}:  {due_text(when)}")
    _as_lines(axes, len(due))


def _labelled(axes: Any, row: int, text: str) -> None:
    """Label a line inside the axes, so that they align with the panels."""
    axes.text(0.012, row - 0.27, text, fontsize=6.5, va="bottom", transform=axes.get_yaxis_transform())


def _as_lines(axes: Any, count: int) -> None:
    axes.set_yticks([])
    axes.set_ylim(count - 0.55, -1)
    axes.spines["left"].set_visible(False)


def _axes(fig: Any, place: Any, plan: Any) -> Any:
    """Add axes with the steps of a plan below."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes, first = fig.add_subplot(place), int(plan.steps[0])
    margin = max(1, plan.last_step - first) * 0.015
    axes.set_xlim(first - margin, plan.last_step + margin)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    if plan.last_step >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("global step", fontsize=8)
    axes.tick_params(labelsize=7.5)
    axes.spines[["top", "right"]].set_visible(False)
    return axes
