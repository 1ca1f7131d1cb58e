"""The sections of the page of runs: warnings, table or facts, curves, differences, times."""

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jstep.core.checks import format_list, truncate
from jstep.core.tables import html_text
from jstep.look.cli import utc_text
from jstep.look.diff import RecordedRuns, divergence
from jstep.look.goodput import Goodput, goodput_by_start, goodput_of_starts
from jstep.look.run_folder import RunFolder, span_and_end
from jstep.look.run_summary import RunSummary
from jstep.look.runs import duration_text, main_metrics, shared_ids, status_text
from jstep.look.sweep import RunFiles, Sweep, is_finite_number, value_text
from jstep.record.differences import values_of
from jstep.showing.drawing import NEUTRAL, Curve, Mark, legend_key, picture

# The maximum number of characters.
_MAX_CELL = 24
_MAX_NAME = 40
_MAX_TITLE = 2000  # of a tooltip
_BOX_ROWS = 20
"""The maximum number of rows of a table that does not scroll."""
_NAMED_OPTIONS = 8
"""The number of options of the best run that are named."""
_MAX_PICTURES = 100
"""The maximum number of pictures of curves."""
_MAX_WARNINGS = 20
"""The maximum number of warnings of one run, and of its notes."""
_MAX_WARNING = 1200
"""The maximum number of characters of a warning: the reason of an end, whole, and a few words."""
# How many columns all curves of a page have together, which bounds its size.
_COLORED_COLUMNS = 40_000
_NEUTRAL_COLUMNS = 75_000


def sections(sweep: Sweep) -> dict[str, list[str]]:
    """Return the parts of the page by their headings; one without parts is not shown."""
    if len(sweep.rows) > 1:
        runs = {"The runs": [*_table(sweep), *_seeds(sweep)]}
    else:
        runs = {"The run": _facts(sweep.rows[0])}
    return {
        "Warnings": _warnings(sweep),
        **runs,
        "How it went": _curves(sweep),
        "What differs": _differences(sweep),
        "Where the time went": _times(sweep),
    }


# Cells and tables.


def _cell(
    text: str,
    max_width: int = _MAX_CELL,
    *,
    number: float | None = None,
    swatch: str = "",
    padding: str = "",
    tag: str = "td",
) -> str:
    """A cell; a long text is cut, and the whole is its tooltip.

    Args:
        text: The text, which is escaped.
        max_width: The number of its characters that are shown.
        number: What it is sorted by.
        swatch: HTML after the text.
        padding: A length of CSS in front of it.
        tag: "th" for the head of a column.
    """
    cut = truncate(text, max_width)
    title = f' title="{html_text(truncate(text, _MAX_TITLE))}"' if cut != text else ""
    attributes = "" if number is None else f' class="n" data-v="{_sort_value(number)}"'
    style = f' style="padding-left:{padding}"' if padding else ""
    return f"<{tag}{attributes}{title}{style}>{html_text(cut)}{swatch}</{tag}>"


def _number(value: float | None, text: Callable[[float], str] = "{:.4g}".format) -> str:
    """A cell with a number, whose tooltip has all its digits."""
    if value is None:
        return "<td></td>"
    exact = f"{value!r}".removesuffix(".0")
    title = f' title="{exact}"' if exact != text(value) else ""
    return f'<td class="n" data-v="{_sort_value(value)}"{title}>{text(value)}</td>'


def _sort_value(number: float) -> str:
    """A number as the script reads it; NaN is sorted after all others, as empty cells are."""
    return "" if math.isnan(number) else f"{number:.9g}".replace("inf", "Infinity")


def _boxed(names: Iterable[str], rows: Sequence[str], key: str = "") -> str:
    kind = "wide scrolls" if len(rows) > _BOX_ROWS else "wide"
    attributes = f' id="{key}"' if key else ""
    heads = "".join(_cell(name, tag="th") for name in names)
    body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="{kind}" tabindex="0"><table{attributes}>{body}</table></div>'


# Warnings.


def _warnings(sweep: Sweep) -> list[str]:
    """What failed or is lost, as a list, and notes on what changed, folded for several runs."""
    several = len(sweep.rows) > 1
    warnings = [
        f"<li>{html_text(line)}</li>" for line in shared_ids([row.run for row in sweep.rows])
    ]
    notes: list[str] = []
    count = 0
    for row in sweep.rows:
        warnings += _warning_items(row, row.warnings, several=several)
        notes += _warning_items(row, row.notes, several=several)
        count += len(row.notes)
    parts: list[str] = []
    kind = "scrolls odd" if several else ""
    if warnings:
        parts.append(f'<ul class="{kind}" tabindex="0">{"".join(warnings)}</ul>')
    if notes:
        title = (
            f"{count} note{'' if count == 1 else 's'}: what became slower or faster, and what "
            "changed between starts"
        )
        listed = f'<ul class="{kind}" tabindex="0">{"".join(notes)}</ul>'
        parts.append(
            f"<details{'' if several else ' open'}><summary>{title}</summary>{listed}</details>"
        )
    return parts


def _warning_items(row: RunFiles, lines: Sequence[str], *, several: bool) -> list[str]:
    """Items of a list: one for each run, or if there is one run, for each line."""
    shown = [html_text(truncate(line, _MAX_WARNING)) for line in lines[:_MAX_WARNINGS]]
    if len(lines) > _MAX_WARNINGS:
        shown.append(f"and {len(lines) - _MAX_WARNINGS} more")
    if several and shown:
        shown = [f"<b>{html_text(truncate(row.name, _MAX_NAME))}</b>: {'; '.join(shown)}"]
    return [f"<li>{item}</li>" for item in shown]


# One run: its facts.


def _facts(row: RunFiles) -> list[str]:
    run = row.run
    facts: dict[str, Any] = {
        "status": status_text(run),
        "step": f"{run.step}" if run.last_step is None else f"{run.step} of {run.last_step}",
    }
    if run.examples:
        facts["examples"] = f"{run.examples:,}"
    if run.started:
        facts["started"] = f"{utc_text(run.started)} UTC"
    if run.ended:
        facts["ended"] = f"{utc_text(run.ended)} UTC"
    facts["wall time"] = duration_text(run.wall_seconds)
    facts["devices"] = run.devices
    if run.parameters:
        facts["parameters"] = f"{run.parameters:,}"
    if run.peak_bytes:
        facts["peak memory of a device"] = f"{run.peak_bytes / 2**30:.2f} GiB"
    if run.mfu:
        facts["mfu"] = f"{run.mfu:.3g}"
    if run.goodput is not None:
        facts["goodput"] = f"{run.goodput:.1%}"
    if run.commit:
        facts["commit"] = f"{run.commit}, with edits ({run.edits})" if run.edits else run.commit
    if run.parent:
        directory, step = run.parent
        facts["branch of"] = f"{directory} (step {step})"
    exact_numbers: dict[str, float] = {}
    for name, (value, step) in run.best.items():
        exact_numbers[f"best {name}"] = value
        facts[f"best {name}"] = f"{value:.4g} at step {step}"
        if name in run.best_notes:
            facts[f"best {name}"] += f"; {run.best_notes[name]}"
    for name, value in run.metrics.items():
        exact_numbers[f"last {name}"] = value
        facts[f"last {name}"] = f"{value:.4g}"
    facts["directory"] = run.path

    items: list[str] = []
    for name, text in facts.items():
        if not text:
            continue
        title = f' title="{exact_numbers[name]!r}"' if name in exact_numbers else ""
        items.append(f"<div><dt>{html_text(name)}</dt><dd{title}>{html_text(text)}</dd></div>")
    return [f"<dl>{''.join(items)}</dl>", _recorded(row)]


def _recorded(row: RunFiles) -> str:
    """A table of what the run was given: its options, its command, and the rest in groups."""
    texts: dict[str, str] = {}
    if row.run.config:
        texts["options"] = _assignments(row.run.config)
    argv = row.folder.start_with_setup.get("argv")
    if argv:
        texts["command"] = truncate(shlex.join(argv), _MAX_TITLE)
    groups: dict[str, dict[str, Any]] = {}
    for name, (section, value) in values_of(row.folder.start_with_setup).items():
        if section in ("config", "settings") or value is None:
            continue
        group = groups.setdefault("program" if section == "programs" else section, {})
        group[name.partition(": ")[2] or name] = value
    for title, values in groups.items():
        texts[title] = _assignments(values)
    if not texts:
        return ""
    rows = [
        f"<tr><td>{html_text(title)}</td><td>{html_text(text)}</td></tr>"
        for title, text in texts.items()
    ]
    table = f'<table class="facts"><tbody>{"".join(rows)}</tbody></table>'
    return f"<details open><summary>what it was given</summary>{table}</details>"


def _assignments(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} = {truncate(value_text(value), 300)}" for name, value in values.items()
    )


# Several runs: a row for each run, and a small table of those that differ by a seed.


def _table(sweep: Sweep) -> list[str]:
    runs = [row.run for row in sweep.rows]
    best_values = [None if best is None else best[0] for best in sweep.best]
    best_steps = [None if best is None else best[1] for best in sweep.best]
    columns = {
        "status": [_cell(status_text(run)) for run in runs],
        "step": [_step_cell(run) for run in runs],
        f"best {sweep.metric.name}": list(map(_number, best_values)),
        "at step": list(map(_number, best_steps)),
    }
    for name in main_metrics(runs, None):
        columns[f"last {name}"] = [_number(run.metrics.get(name)) for run in runs]
    for name, values in sweep.options.items():
        columns[name] = list(map(_option_cell, values))
    columns["wall time"] = [
        _number(None if run.error else run.wall_seconds, duration_text) for run in runs
    ]
    columns["goodput"] = [_number(run.goodput, "{:.1%}".format) for run in runs]
    rows: list[str] = []
    for i, depth in sweep.tree():
        cells = "".join(column[i] for column in columns.values())
        rows.append(f'<tr data-r="{i}">{_name_cell(sweep, i, depth)}{cells}</tr>')
    text = html_text(f"{_best_text(sweep)}The best is the {sweep.metric}.")
    return [f'<p>{text}</p><div id="controls"></div>', _boxed(["name", *columns], rows, "runs")]


def _seeds(sweep: Sweep) -> list[str]:
    """A row for each group of runs that differ only in a seed, and how many have a value."""
    rows: list[str] = []
    for group in sweep.groups:
        values: dict[int, float] = {}
        for i in group:
            best = sweep.best[i]
            if best is not None:
                values[i] = best[0]
        if not values:
            continue
        names = format_list([sweep.rows[i].name for i in values], 10)
        count = f"{len(group)}" if len(values) == len(group) else f"{len(values)} of {len(group)}"
        steps = sorted({sweep.rows[i].run.step for i in values})
        span = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        mean = sum(values.values()) / len(values)
        cells = _cell(f"{count} seeds: {names}", _MAX_NAME) + _cell(span)
        cells += _number(mean) + _number(min(values.values())) + _number(max(values.values()))
        rows.append(f"<tr>{cells}</tr>")
    heads = ("runs", "ended at step", f"mean {sweep.metric.name}", "least", "greatest")
    return [_boxed(heads, rows)] if rows else []


def _best_text(sweep: Sweep) -> str:
    """A sentence about the best run; "" if no run has a value of the metric."""
    ranked = sweep.ranked()
    best = sweep.best[ranked[0]] if ranked else None
    if best is None:
        return ""
    i = ranked[0]
    options = [
        f"{name} {truncate(value_text(values[i]), _MAX_NAME)}"
        for name, values in sweep.options.items()
        if values[i] is not None
    ]
    given = f" with {', '.join(options[:_NAMED_OPTIONS])}" if options else ""
    return (
        f"Best: {truncate(sweep.rows[i].name, _MAX_NAME)}, {best[0]:.4g} at step {best[1]}{given}. "
    )


def _name_cell(sweep: Sweep, i: int, depth: int) -> str:
    run = sweep.rows[i].run
    color = sweep.colors[i]
    text = sweep.rows[i].name
    if run.parent is not None:
        text += f" @{run.parent[1]}"
    swatch = f" {legend_key('', color, color)}" if color != NEUTRAL else ""
    padding = f"{min(depth, 12) * 1.1:.1f}em" if depth else ""
    return _cell(text, _MAX_NAME, swatch=swatch, padding=padding)


def _step_cell(run: RunSummary) -> str:
    if run.error:
        return "<td></td>"
    text = f"{run.step}" if run.last_step is None else f"{run.step}/{run.last_step}"
    return _cell(text, number=float(run.step))


def _option_cell(value: Any) -> str:
    if value is None:
        return "<td></td>"
    if is_finite_number(value):
        return _number(value, value_text)
    return _cell(value_text(value))


# Curves.


def _curves(sweep: Sweep) -> list[str]:
    """A picture for each scalar; of one run, training and evaluations are in one."""
    is_one = len(sweep.rows) == 1
    tags: dict[str, None] = {}
    for row in sweep.rows:
        tags |= dict.fromkeys(row.series)
    pictures: dict[str, list[str]] = {}
    for tag in tags:
        metric = tag.rpartition("/")[2]
        title = metric if is_one and metric in tags else tag
        pictures.setdefault(title, []).append(tag)

    def rank(title: str) -> tuple[bool, bool, bool]:
        # The metric that ranks the runs is first, then losses, then other metrics of training.
        return title != sweep.metric.name, title.rpartition("/")[2] != "loss", "/" in title

    titles = sorted(pictures, key=rank)
    shown = titles[:_MAX_PICTURES]
    if not shown:
        return []
    shown_tags = [tag for title in shown for tag in pictures[title]]
    columns = _picture_columns(sweep, shown_tags)
    figures = [f"<div>{_figure(sweep, title, pictures[title], columns)}</div>" for title in shown]
    others = len(titles) - len(shown)
    note = f"<p>{others} further scalars are not shown.</p>" if others else ""
    return [_legend(sweep), note, f'<div class="pictures">{"".join(figures)}</div>']


def _picture_columns(sweep: Sweep, tags: Sequence[str]) -> tuple[int, int]:
    """The columns of each colored curve, and of each other, so that a page of many stays small."""
    colored = 0
    neutral = 0
    for tag in tags:
        for row, color in zip(sweep.rows, sweep.colors, strict=True):
            if tag not in row.series:
                continue
            if color == NEUTRAL:
                neutral += 1
            else:
                colored += 1
    colored_columns = max(12, _COLORED_COLUMNS // max(1, colored))
    neutral_columns = max(2, _NEUTRAL_COLUMNS // max(1, neutral))
    return min(560 if len(sweep.rows) == 1 else 140, colored_columns), min(35, neutral_columns)


def _legend(sweep: Sweep) -> str:
    if len(sweep.rows) == 1:
        text = (
            "Marks: a start (thick), a checkpoint that is kept (short), a stage (dotted), the best "
            "value (dot)"
        )
        if any(sweep.rows[0].rewound.values()):
            text += ", steps that were made again (pale)"
        return f"<p>{text}.</p>"
    ranked = sweep.ranked()
    keys: list[str] = []
    for i in ranked:
        color = sweep.colors[i]
        keys.append(legend_key(truncate(sweep.rows[i].name, _MAX_NAME), color, color, i))
    if len(sweep.rows) > len(ranked):
        keys.append(legend_key("all others", NEUTRAL, 0))
    text = f"The best {len(ranked)} are in color, from the first on; dots are their best values."
    return f'<div id="drawing"></div><p id="legend">{"".join(keys)}</p><p>{html_text(text)}</p>'


def _figure(sweep: Sweep, name: str, tags: Sequence[str], columns: tuple[int, int]) -> str:
    """A picture of scalars, in which each run has its color, or each scalar of one run its dashes.

    Args:
        sweep: The runs.
        name: The title, the scalar that is drawn first.
        tags: The scalars; of several runs, there is one.
        columns: The number of columns of a colored curve, and of another one.
    """
    curves: list[Curve] = []
    marks: list[Mark] = []
    is_one = len(sweep.rows) == 1
    ordered_tags = sorted(tags, key=lambda tag: tag != name)
    for i, row in enumerate(sweep.rows):
        color = sweep.colors[i]
        for n, tag in enumerate(ordered_tags):
            if tag not in row.series:
                continue
            # A curve is known by its scalar if there is one run, and otherwise by its run.
            if is_one:
                key = n
                text = tag
                dash = n
                for points in row.rewound[tag]:
                    curves.append(Curve(text, *points, color, dash, pale=True, key=key))
            else:
                key = i
                text = truncate(row.name, _MAX_NAME)
                dash = color
            curves.append(Curve(text, *row.series[tag], color, dash, key=key))
            best = row.run.best.get(tag)
            if best is None and tag == sweep.metric.name:
                best = sweep.best[i]
            if best is not None and color != NEUTRAL:
                value, step = best
                marks.append(
                    Mark("best", step, f"{text}: best {value!r} at step {step}", color, value, key)
                )
    if is_one:
        marks += sweep.rows[0].marks()
    return picture(name, curves, marks, columns=columns, legend=is_one, style=False)


# What differs, and times.


def _differences(sweep: Sweep) -> list[str]:
    rows: list[str] = []
    for name, values in sweep.differences.items():
        runs: dict[str, list[str]] = {}
        for row, value in zip(sweep.rows, values, strict=True):
            text = "none" if value is None else value_text(value)
            runs.setdefault(text, []).append(truncate(row.name, _MAX_NAME))
        groups = [f"{truncate(text, 100)}: {format_list(names, 3)}" for text, names in runs.items()]
        rows.append(
            f"<tr>{_cell(name, 60)}{_number(len(runs))}{_cell('; '.join(groups), 120)}</tr>"
        )
    table = [_boxed(("what", "values", "values and their runs"), rows)] if rows else []
    if len(sweep.rows) != 2:
        return table
    pair = [RecordedRuns(row.run.path, [row.folder]) for row in sweep.rows]
    text = divergence(pair).text(pair)
    return [f"<p>{html_text(text)}</p>", *table] if text else table


class _TimeLine(NamedTuple):
    name: str
    goodput: Goodput
    note: str = ""


_PARTS = tuple(Goodput().parts)
"""The parts of time; their places are the classes of their colors in `report.css`."""


def _times(sweep: Sweep) -> list[str]:
    """A line for each run, and if there is one run for each start: how its time is divided."""
    lines: list[_TimeLine] = []
    for row in sweep.rows:
        if not row.folder.valid_starts:
            continue
        lines.append(_TimeLine(row.name, goodput_of_starts(row.folder.valid_starts)))
        if len(sweep.rows) == 1:
            lines += _start_lines(row.folder)
    if not lines:
        return []
    keys: list[str] = []
    for i, part in enumerate(_PARTS):
        if any(line.goodput.parts[part] for line in lines):
            keys.append(f'<span class="key"><span class="box b{i}"></span> {part}</span>')
    rows: list[str] = []
    for name, goodput, note in lines:
        cells = _cell(name, _MAX_NAME)
        cells += _number(goodput.fraction, "{:.1%}".format)
        cells += _number(goodput.total, duration_text)
        rows.append(f"<tr>{cells}<td>{_bar(goodput)}</td>{_cell(note, 80)}</tr>")
    return [f"<p>{' '.join(keys)}</p>", _boxed(("name", "goodput", "time", "parts", ""), rows)]


def _start_lines(folder: RunFolder) -> list[_TimeLine]:
    lines: list[_TimeLine] = []
    goodputs = goodput_by_start(folder.valid_starts)
    for start, goodput in zip(folder.valid_starts, goodputs, strict=True):
        facts = folder.facts_of(start)
        lines.append(_TimeLine(f"start {start['number']}", goodput, span_and_end(facts)))
    return lines


def _bar(goodput: Goodput) -> str:
    bars: list[str] = []
    texts: list[str] = []
    for i, (part, secs) in enumerate(goodput.parts.items()):
        if secs > 0:
            share = secs / goodput.total
            bars.append(f'<i class="b{i}" style="flex:{share:.4f}"></i>')
            texts.append(f"{part} {secs:.4g} s ({share:.1%})")
    return f'<div class="bar" title="{", ".join(texts)}">{"".join(bars)}</div>'
