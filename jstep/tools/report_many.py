"""The page of many runs: what is odd, one row a run, options against the metric, curves, differences, times."""

import decimal
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jstep.core.checks import truncate
from jstep.core.curves import NEUTRAL, Band, Curve, Dot, Mark, Numbers, dots, legend_key, picture
from jstep.core.tables import html_text
from jstep.tools.goodput import Goodput
from jstep.tools.runs import duration_text, main_metrics
from jstep.tools.sweep import Line, Option, Sweep, value_text

_MAX_CELL, _MAX_NAME, _MAX_TITLE = 24, 40, 2000
"""The maximum number of characters of a cell, of a name, and of the tooltip that has the whole text."""
_BOX_ROWS = 20
"""The maximum number of rows of a table that does not scroll in a box of its own."""
_SHOWN_OPTIONS, _MAX_OPTIONS = 8, 24
"""The number of pictures of options that are shown, and that there are; others are in the table only."""
_MAX_PICTURES = 100
"""The maximum number of pictures of curves."""
_MAX_ODD = 5
"""The maximum number of oddities of one run."""
_COLORED, _NEUTRAL = 40_000, 150_000
"""How many columns all colored curves of a page have together, and all others."""


def sections(sweep: Sweep) -> dict[str, list[str]]:
    """Return the parts of the page by their headings."""
    return {
        "What is odd": _odd(sweep),
        "The runs": _runs(sweep),
        f"Options against the {sweep.metric}": _options(sweep),
        "How they went": _curves(sweep),
        "What differs": _differences(sweep),
        "Where their time went": _times(sweep),
    }


# Cells and tables.


def _cell(text: str, most: int = _MAX_CELL, *, number: float | None = None, after: str = "", padding: str = "") -> str:
    """A cell; a long text is cut, and the whole is its tooltip. `number` is what it is sorted by."""
    cut = truncate(text, most)
    title = f' title="{html_text(truncate(text, _MAX_TITLE))}"' if cut != text else ""
    of = "" if number is None else ' class="n"' if cut == f"{number:g}" else f' class="n" data-v="{_sorted_by(number)}"'
    style = f' style="padding-left:{padding}"' if padding else ""
    return f"<td{of}{title}{style}>{html_text(cut)}{after}</td>"


def _sorted_by(number: float) -> str:
    """A number as the script reads it; NaN is behind all others, as empty cells are."""
    return "" if math.isnan(number) else f"{number:.9g}".replace("inf", "Infinity")


def _boxed(heads: Iterable[str], rows: Sequence[str], name: str = "") -> str:
    kind = "wide scrolls" if len(rows) > _BOX_ROWS else "wide"
    of = f' id="{name}"' if name else ""
    return (
        f'<div class="{kind}" tabindex="0"><table{of}><thead><tr>{"".join(heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _head(text: str) -> str:
    cut = truncate(text, _MAX_CELL)
    title = f' title="{html_text(text)}"' if cut != text else ""
    return f"<th{title}>{html_text(cut)}</th>"


def _numbers(values: Sequence[float | None], precise: int = 4, most: int = 7) -> list[str]:
    """Format a column of numbers, all with as many decimals, so that their points align.

    Args:
        values: Numbers, and None for empty cells.
        precise: The number of digits that the shortest form has at most.
        most: The number of decimals from which on powers of ten are shown instead.
    """
    known = [value for value in values if value is not None]
    shortest = [decimal.Decimal(f"{value:.{precise}g}") for value in known if math.isfinite(value)]
    digits = max((-int(value.as_tuple().exponent) for value in shortest if value), default=0)
    if all(value == int(value) for value in known if math.isfinite(value)) and all(abs(x) < 1e15 for x in known):
        digits = 0
    elif any(abs(value) >= 1e7 for value in known) or digits > most:
        return ["" if value is None else f"{value:.{precise - 1}e}" for value in values]
    return ["" if value is None else f"{value:.{max(0, digits)}f}" for value in values]


# The sections.


def _odd(sweep: Sweep) -> list[str]:
    items = []
    for row in sweep.rows:
        if row.odd:
            more = [f"and {len(row.odd) - _MAX_ODD} more"] * (len(row.odd) > _MAX_ODD)
            lines = "; ".join([*(truncate(line, 300) for line in row.odd[:_MAX_ODD]), *more])
            items.append(f"<li><b>{html_text(truncate(row.name, _MAX_NAME))}</b>: {html_text(lines)}</li>")
    count = f"<p>{len(items)} of {len(sweep.rows)} runs</p>"
    return [count, f'<ul class="scrolls odd" tabindex="0">{"".join(items)}</ul>'] if items else []


def _runs(sweep: Sweep) -> list[str]:
    """The table: a row a run, and one above the runs of each group."""
    rows, lines = sweep.rows, sweep.lines()

    def own(value: Callable[[int], float | None]) -> list[list[float | None]]:
        return [[value(i) for i in line.members] for line in lines]

    values = [None if of is None else of[0] for of in sweep.best]
    columns: list[tuple[str, list[str]]] = [
        ("name", [_name_cell(sweep, line) for line in lines]),
        ("status", [_status_cell(sweep, line) for line in lines]),
        ("step", [_step_cell(sweep, line) for line in lines]),
        (f"best {sweep.metric.name}", _mean_cells(own(values.__getitem__))),
        ("at step", [_at_cell(sweep, line) for line in lines]),
    ]
    if sweep.groups:
        columns.append(("range", [_range_cell(sweep, line) for line in lines]))
    for name in main_metrics([row.run for row in rows], None):
        last = [row.run.metrics.get(name) for row in rows]
        columns.append((f"last {name}", _mean_cells(own(last.__getitem__))))
    for option in sweep.options:
        columns.append((option.short, _option_cells(option, lines)))
    walls = own(lambda i: None if rows[i].run.error else rows[i].run.wall_seconds)
    columns.append(("wall time", [_mean_cell(some, duration_text) for some in walls]))
    columns.append(("goodput", [_mean_cell(some, "{:.1%}".format) for some in own(lambda i: rows[i].goodput)]))
    drawn = [
        f"<tr{_row_data(sweep, line)}>{''.join(cells)}</tr>"
        for line, *cells in zip(lines, *(cells for _, cells in columns), strict=True)
    ]
    words = f"{_best_words(sweep)}The best is the {sweep.metric}"
    words += "; runs that differ in nothing but a seed are below their mean and range." if sweep.groups else "."
    return [
        f'<p>{html_text(words)}</p><div id="controls"></div>',
        _boxed([_head(name) for name, _ in columns], drawn, "runs"),
    ]


def _best_words(sweep: Sweep) -> str:
    """A sentence that names the best run, its value and the options that vary."""
    i = next(iter(sweep.ranked()), None)
    if i is None or (best := sweep.best[i]) is None:
        return ""
    varied = [(option.short, option.values[i]) for option in sweep.options if option.values[i] is not None]
    options = ", ".join(f"{name} {truncate(value_text(value), _MAX_NAME)}" for name, value in varied[:_MAX_WORDS])
    name = truncate(sweep.rows[i].name, _MAX_NAME)
    return f"Best: {name}, {best[0]:.6g} at step {best[1]}{' with ' * bool(options)}{options}. "


_MAX_WORDS = 8
"""The maximum number of options in a sentence."""


def _row_data(sweep: Sweep, line: Line) -> str:
    """What the script needs to know of a row."""
    of = f' data-b="{line.block}"' if line.block >= 0 else ""
    if line.is_group:
        return f'{of} class="group" data-g="{" ".join(map(str, line.members))}"'
    clock = " ".join(f"{step},{seconds:.5g}" for step, seconds in sweep.rows[line.members[0]].clock)
    return f'{of} data-r="{line.members[0]}" data-t="{clock}"'


def _name_cell(sweep: Sweep, line: Line) -> str:
    padding = f"{min(line.depth, 12) * 1.1:.1f}em" if line.depth else ""
    if line.is_group:
        names = [sweep.rows[i].name for i in line.members]
        return _cell(f"{len(names)} seeds of {names[0]}", _MAX_NAME, padding=padding)
    (i,) = line.members
    row, color = sweep.rows[i], sweep.colors[i]
    swatch = f" {legend_key('', color, color)}" if color != NEUTRAL else ""
    text = row.name + (f" @{row.run.parent[1]}" if row.run.parent is not None else "")
    return _cell(text, _MAX_NAME, after=swatch, padding=padding)


def _status_cell(sweep: Sweep, line: Line) -> str:
    runs = [sweep.rows[i].run for i in line.members]
    if line.is_group:
        return _cell(", ".join(f"{count} {status}" for status, count in Counter(run.status for run in runs).items()))
    return _cell(f"{runs[0].status}: {runs[0].reason or runs[0].error or ''}".rstrip(": "))


def _step_cell(sweep: Sweep, line: Line) -> str:
    run = sweep.rows[line.members[0]].run
    if line.is_group or run.error:
        return "<td></td>"
    return _cell(f"{run.step}" if run.last_step is None else f"{run.step}/{run.last_step}", number=float(run.step))


def _mean_cells(columns: Sequence[Sequence[float | None]]) -> list[str]:
    means = [_mean(some) for some in columns]
    return [
        _cell(text, number=mean) if mean is not None else "<td></td>"
        for text, mean in zip(_numbers(means), means, strict=True)
    ]


def _mean_cell(some: Sequence[float | None], text: Any) -> str:
    mean = _mean(some)
    return "<td></td>" if mean is None else _cell(text(mean), number=mean)


def _mean(some: Iterable[float | None]) -> float | None:
    known = [value for value in some if value is not None]
    return sum(value / len(known) for value in known) if known else None


def _at_cell(sweep: Sweep, line: Line) -> str:
    best = None if line.is_group else sweep.best[line.members[0]]
    return "<td></td>" if best is None else _cell(f"{best[1]}", number=best[1])


def _range_cell(sweep: Sweep, line: Line) -> str:
    known = [of[0] for i in line.members if (of := sweep.best[i]) is not None]
    if not line.is_group or not known:
        return "<td></td>"
    low, high = _numbers([min(known), max(known)])
    return _cell(f"{low} to {high}")


def _option_cells(option: Option, lines: Sequence[Line]) -> list[str]:
    each = [_distinct(option.values[i] for i in line.members) for line in lines]
    if not option.is_number:
        return [_cell(", ".join(map(value_text, values))) for values in each]
    texts = _numbers([values[0] if len(values) == 1 else None for values in each], 6, 10)
    return [
        _cell(text or ", ".join(map(value_text, values)), number=_mean(values)) if values else "<td></td>"
        for text, values in zip(texts, each, strict=True)
    ]


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({value_text(value): value for value in values if value is not None}.values())


def _options(sweep: Sweep) -> list[str]:
    """A picture for each option, a point a run."""
    pictures = [drawn for option in sweep.options[:_MAX_OPTIONS] if (drawn := _option(sweep, option))]
    parts = [f'<div class="small">{"".join(pictures[:_SHOWN_OPTIONS])}</div>'] if pictures else []
    if more := pictures[_SHOWN_OPTIONS:]:
        parts.append(
            f'<details><summary>{len(more)} more options</summary><div class="small">{"".join(more)}</div></details>'
        )
    if len(sweep.options) > _MAX_OPTIONS:
        parts.append(f"<p>{len(sweep.options) - _MAX_OPTIONS} further options are in the table only.</p>")
    return parts


def _option(sweep: Sweep, option: Option) -> str:
    points = []
    first = min((color for color, best in zip(sweep.colors, sweep.best, strict=True) if best), default=0)
    varies = len(_distinct(option.values)) > 1  # otherwise some runs have its only value, and others have none
    for i, (value, best) in enumerate(zip(option.values, sweep.best, strict=True)):
        if best is not None and not (varies and value is None):
            name = "none" if value is None else value_text(value)
            place = float(value) if varies and option.is_number else name
            text = f"{truncate(sweep.rows[i].name, _MAX_NAME)}: {best[0]:.6g} at {truncate(name, _MAX_CELL)}"
            points.append(Dot(place, best[0], text, sweep.colors[i], i, sweep.colors[i] == first))
    points.sort(key=lambda point: str(point.place))
    return f"<div>{dots(truncate(option.short, _MAX_NAME), points, sweep.metric.name)}</div>" if points else ""


def _curves(sweep: Sweep) -> list[str]:
    """A picture for each scalar, and one legend for all."""
    tags = dict.fromkeys(tag for row in sweep.rows for tag in row.series)
    order = sorted(tags, key=lambda tag: (tag != sweep.metric.name, tag.rpartition("/")[2] != "loss", "/" in tag))
    shown, ranked = order[:_MAX_PICTURES], sweep.ranked()
    if not shown:
        return []
    have = {tag: [i for i, row in enumerate(sweep.rows) if tag in row.series] for tag in shown}
    colored = sum(sweep.colors[i] != NEUTRAL for some in have.values() for i in some)
    others = sum(map(len, have.values())) - colored
    columns = min(140, max(12, _COLORED // max(1, colored))), min(70, max(4, _NEUTRAL // max(1, others)))
    keys = [legend_key(truncate(sweep.rows[i].name, _MAX_NAME), sweep.colors[i], sweep.colors[i], i) for i in ranked]
    keys += [legend_key("all others", NEUTRAL, 0)] * (len(sweep.rows) > len(ranked))
    words = f"The best {len(ranked)} are in color, from the first on; dots are their best values." if keys else ""
    words += " Bands are the ranges of runs that differ in nothing but a seed." * bool(sweep.groups)
    if len(order) > len(shown):
        words += f" {len(order) - len(shown)} further scalars are not shown: make a page of fewer runs."
    figures = [f"<div>{_curve(sweep, tag, have[tag], columns)}</div>" for tag in shown]
    legend = f'<div id="drawing"></div><p id="legend">{"".join(keys)}</p><p>{html_text(words)}</p>'
    return [legend, f'<div class="pictures">{"".join(figures)}</div>']


def _curve(sweep: Sweep, tag: str, have: Sequence[int], columns: tuple[int, int]) -> str:
    curves, marks = [], []
    for i in have:
        row, color = sweep.rows[i], sweep.colors[i]
        curves.append(Curve(row.name, *row.series[tag], color, color, key=i))
        if tag == sweep.metric.name and color != NEUTRAL and (best := sweep.best[i]) is not None:
            text = f"{truncate(row.name, _MAX_NAME)}: best {best[0]:.6g} at step {best[1]}"
            marks.append(Mark("best", best[1], text, color, best[0], i))
    present = set(have)
    bands = [
        _band(sweep, tag, some, columns[1])
        for group in sweep.groups
        if len(some := [i for i in group if i in present]) > 1
    ]
    return picture(
        tag, curves, marks, bands=[band for band in bands if band], columns=columns, legend=False, style=False
    )


def _band(sweep: Sweep, tag: str, members: Sequence[int], columns: int) -> Band | None:
    """The range of a group, at the steps that at least two of its runs have."""
    each = [sweep.rows[i].series[tag] for i in members]
    each = [(steps[fine], values[fine]) for steps, values in each if (fine := np.isfinite(values)).sum() > 1]
    if len(each) < 2:
        return None
    begin, end = sorted(steps[0] for steps, _ in each)[1], sorted(steps[-1] for steps, _ in each)[-2]
    if begin >= end:
        return None
    grid = np.unique(np.linspace(begin, end, 2 * columns).astype(np.int64))
    values: Numbers = np.array([np.interp(grid, *one, left=np.nan, right=np.nan) for one in each])
    color = min(sweep.colors[i] for i in members)
    text = f"{len(members)} seeds of {truncate(sweep.rows[members[0]].name, _MAX_NAME)}"
    return Band(text, grid, np.nanmin(values, 0), np.nanmax(values, 0), color, members)


def _differences(sweep: Sweep) -> list[str]:
    """A row for each difference: how many runs have which value."""
    rows = []
    for name, values in sweep.differ.items():
        count = Counter("none" if value is None else value_text(value) for value in values)
        texts = [f"{value} ({often})" if often > 1 else value for value, often in count.most_common()]
        each = truncate(", ".join(texts), 1000)
        rows.append(f"<tr>{_cell(name, 60)}{_cell(f'{len(count)}', number=len(count))}{_cell(each, 100)}</tr>")
    heads = [_head(name) for name in ("option", "values", "values (and their runs)")]
    return [_boxed(heads, rows)] if rows else []


def _times(sweep: Sweep) -> list[str]:
    """A line a run: how its time is divided."""
    names = list(Goodput().parts)
    used = [name for name in names if any(name in row.shares for row in sweep.rows)]
    keys = " ".join(f'<span class="key"><span class="box b{names.index(name)}"></span> {name}</span>' for name in used)
    rows = []
    for row in sweep.rows:
        if total := sum(row.shares.values()):
            bar = "".join(
                f'<i class="b{names.index(name)}" style="flex:{secs / total:.4f}"></i>'
                for name, secs in row.shares.items()
            )
            shares = ", ".join(f"{name} {secs / total:.1%}" for name, secs in row.shares.items())
            cells = _cell(row.name, _MAX_NAME) + _cell(f"{row.goodput or 0:.1%}", number=row.goodput or 0.0)
            cells += _cell(duration_text(total), number=total)
            rows.append(f'<tr>{cells}<td><div class="bar" title="{shares}">{bar}</div></td></tr>')
    heads = [_head(name) for name in ("name", "goodput", "time", "parts")]
    return [f"<p>{keys}</p>", _boxed(heads, rows)] if rows else []
