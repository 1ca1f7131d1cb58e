"""Plots of plans with matplotlib; no display is needed."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jstep.tools.table import due_text, number

_INK, _MARK, _FAINT = "#1b4f72", "#7b241c", "#b3b6b7"
_MARKS = 400
"""More marks than this are drawn as a bar."""


def figure() -> Any:
    """Return an empty figure, created without pyplot, which has global state and may need a display.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install jstep[plot]") from error
    return Figure(layout="constrained")


def draw_plan(
    path: str,
    steps: np.ndarray[Any, Any],
    values: Mapping[str, np.ndarray[Any, Any]],
    due: Sequence[tuple[str, Any]],
    last_step: int,
    stages: Mapping[int, str],
    sizes: Mapping[int, int],
    rows: Mapping[str, np.ndarray[Any, Any]],
) -> None:
    """Draw a plan: panels for changing values, bars for stages, a line of marks for each hook, a line of constants."""
    columns = {name: column for name, column in values.items() if column.ndim == 1}
    changing = {name: column for name, column in columns.items() if len(np.unique(column)) > 1}
    constant = {name: column[0] for name, column in columns.items() if name not in changing}
    panels = [
        functools.partial(_panel, steps=steps, name=n, column=c, last_step=last_step) for n, c in changing.items()
    ]
    if len(sizes) > 1:
        panels.append(functools.partial(_sizes, steps=steps, sizes=sizes, last_step=last_step))
    if rows and len(steps) > 1:
        panels.append(functools.partial(_rows, steps=steps, rows=rows, last_step=last_step))
    across = 1 if len(panels) <= 2 else 2
    down = math.ceil(len(panels) / across)
    fig = figure()
    heights = [1.0] * down
    heights += [0.3 + 0.17 * len(stages)] if len(stages) > 1 else []
    heights += [0.25 + 0.17 * len(due)] if due else []
    fig.set_size_inches(6.5, max(1.2, 1.9 * sum(heights) + 0.3))
    if heights:
        grid = fig.add_gridspec(len(heights), across, height_ratios=heights)
        for i, panel in enumerate(panels):
            panel(fig.add_subplot(grid[i // across, i % across]))
        if len(stages) > 1:
            _stages(fig.add_subplot(grid[down, :]), steps, stages, last_step)
        if due:
            _marks(fig.add_subplot(grid[len(heights) - 1, :]), steps, due, last_step)
    if constant:
        words = ",  ".join(f"{name} = {number(value)}" for name, value in constant.items())
        fig.supxlabel(f"constant:  {words}", fontsize=7.5, x=0.02, ha="left", color="#424949", wrap=True)
    fig.savefig(path, dpi=200)


def _panel(axes: Any, steps: Any, name: str, column: Any, last_step: int) -> None:
    axes.plot(steps, column, color=_INK, linewidth=1.4, marker="o" if len(steps) == 1 else None)
    axes.set_title(name, fontsize=9, loc="left")
    low, high = float(np.min(column)), float(np.max(column))
    if low >= 0 and low < 0.5 * high:
        axes.set_ylim(0, high * 1.06)  # the height of a rate is meaningful only from zero
    _steps_below(axes, steps, last_step)
    axes.grid(color=_FAINT, alpha=0.4, linewidth=0.5)
    # No common factor above the axis: it would misalign the panel's title with its neighbours.
    axes.yaxis.set_major_formatter(lambda value, _: number(value))


def _sizes(axes: Any, steps: Any, sizes: Mapping[int, int], last_step: int) -> None:
    firsts = [max(first, int(steps[0])) for first in sizes]
    values = list(sizes.values())
    axes.step([*firsts, last_step], [*values, values[-1]], where="post", color=_INK, linewidth=1.4)
    axes.set_title("batch size", fontsize=9, loc="left")
    axes.set_ylim(0, max(values) * 1.06)
    _steps_below(axes, steps, last_step)
    axes.grid(color=_FAINT, alpha=0.4, linewidth=0.5)


def _rows(axes: Any, steps: Any, rows: Mapping[str, np.ndarray[Any, Any]], last_step: int) -> None:
    from matplotlib.ticker import EngFormatter

    for name, column in rows.items():
        axes.plot(steps, column, linewidth=1.4, label=name)
    axes.set_title("rows so far", fontsize=9, loc="left")
    axes.set_ylim(0, None)
    if len(rows) > 1:
        axes.legend(fontsize=6.5, frameon=False)
    _steps_below(axes, steps, last_step)
    axes.grid(color=_FAINT, alpha=0.4, linewidth=0.5)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _stages(axes: Any, steps: Any, stages: Mapping[int, str], last_step: int) -> None:
    firsts = [max(first, int(steps[0])) for first in stages]
    for row, (first, stop, name) in enumerate(zip(firsts, [*firsts[1:], last_step], stages.values(), strict=True)):
        axes.plot([first, stop], [row, row], color=_INK, linewidth=4.5, alpha=0.6, solid_capstyle="butt")
        where = {"va": "bottom", "transform": axes.get_yaxis_transform()}
        axes.text(0.012, row - 0.27, f"{name}:  from {first:,}".replace(",", " "), fontsize=6.5, **where)
    axes.set_title("stages", fontsize=9, loc="left")
    axes.set_yticks([])
    axes.set_ylim(len(stages) - 0.55, -1)
    _steps_below(axes, steps, last_step)
    axes.spines["left"].set_visible(False)


def _marks(axes: Any, steps: Any, due: Sequence[tuple[str, Any]], last_step: int) -> None:
    for row, (name, when) in enumerate(due):
        if len(when) > _MARKS:
            axes.plot([when[0], when[-1]], [row, row], color=_MARK, linewidth=4.5, alpha=0.45, solid_capstyle="butt")
        elif len(when):
            axes.plot(list(when), [row] * len(when), linestyle="none", marker="|", markersize=6.5, color=_MARK)
        # The label is inside the axes, so that they align with the panels.
        where = {"va": "bottom", "transform": axes.get_yaxis_transform()}
        axes.text(0.012, row - 0.27, f"{name}:  {due_text(when)}", fontsize=6.5, **where)
    axes.set_yticks([])
    axes.set_ylim(len(due) - 0.55, -1)
    _steps_below(axes, steps, last_step)
    axes.spines["left"].set_visible(False)


def _steps_below(axes: Any, steps: Any, last_step: int) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    margin = max(1, last_step - int(steps[0])) * 0.015
    axes.set_xlim(int(steps[0]) - margin, last_step + margin)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    if last_step >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("global step", fontsize=8)
    axes.tick_params(labelsize=7.5)
    axes.spines[["top", "right"]].set_visible(False)
