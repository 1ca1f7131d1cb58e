"""The sections of the page of runs: warnings, table or facts, curves, differences, times."""

import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jstep.core.checks import format_list, truncate
from jstep.core.drawing import NEUTRAL, Curve, Mark, legend_key, picture
from jstep.core.tables import html_text
from jstep.look.cli import utc_text
from jstep.look.diff import RecordedRuns, divergence
from jstep.look.goodput import Goodput, goodput_by_start, goodput_of_starts
from jstep.look.run_folder import last_step_text
from jstep.look.run_summary import RunSummary
from jstep.look.runs import duration_text, main_metrics, shared_ids
from jstep.look.sweep import RunFiles, Sweep, is_finite_number, value_text
from jstep.record.differences import values_of

_MAX_CELL, _MAX_NAME, _MAX_TITLE = 24, 40, 2000
"""The maximum number of characters of a cell, of a name, and of a tooltip."""
_BOX_ROWS = 20
"""The maximum number of rows of a table that does not scroll."""
_NAMED_OPTIONS = 8
"""The number of options of the best run that are named."""
_MAX_PICTURES, _MAX_ODD = 100, 20
"""The maximum number of pictures of curves, and of warnings of one run."""
_COLORED, _NEUTRAL = 40_000, 75_000
"""How many columns all colored curves of a page have together, and all others."""


def sections(sweep: Sweep) -> dict[str, list[str]]:
    """Return the parts of the page by their headings; one without parts is not shown."""
    several = len(sweep.rows) > 1
    runs = {"The runs": [*_table(sweep), *_seeds(sweep)]} if several else {"The run": _facts(sweep.rows[0])}
    return {
        "Warnings": _odd(sweep),
        **runs,
        "How it went": _curves(sweep),
        "What differs": _differences(sweep),
        "Where the time went": _times(sweep),
    }


# Cells and tables.


def _cell(text: str, most: int = _MAX_CELL, *, number: float | None = None, after: str = "", padding: str = "") -> str:
    """A cell; a long text is cut, and the whole is its tooltip. `number` is what it is sorted by."""
    cut = truncate(text, most)
    title = f' title="{html_text(truncate(text, _MAX_TITLE))}"' if cut != text else ""
    attributes = "" if number is None else f' class="n" data-v="{_sorted_by(number)}"'
    style = f' style="padding-left:{padding}"' if padding else ""
    return f"<td{attributes}{title}{style}>{html_text(cut)}{after}</td>"


def _number(value: float | None, text: Callable[[float], str] = "{:.4g}".format) -> str:
    if value is None:
        return "<td></td>"
    exact = f"{value!r}".removesuffix(".0")
    title = f' title="{exact}"' if exact != text(value) else ""
    return f'<td class="n" data-v="{_sorted_by(value)}"{title}>{text(value)}</td>'


def _sorted_by(number: float) -> str:
    """A number as the script reads it; NaN is behind all others, as empty cells are."""
    return "" if math.isnan(number) else f"{number:.9g}".replace("inf", "Infinity")


def _boxed(names: Iterable[str], rows: Sequence[str], key: str = "") -> str:
    kind = "wide scrolls" if len(rows) > _BOX_ROWS else "wide"
    attributes = f' id="{key}"' if key else ""
    heads = "".join(_cell(name).replace("td", "th") for name in names)
    body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="{kind}" tabindex="0"><table{attributes}>{body}</table></div>'


# Warnings.


def _odd(sweep: Sweep) -> list[str]:
    items = [html_text(line) for line in shared_ids([row.run for row in sweep.rows])]
    several = len(sweep.rows) > 1
    for row in sweep.rows:
        not_shown = [f"and {len(row.warnings) - _MAX_ODD} more"] if len(row.warnings) > _MAX_ODD else []
        lines = [html_text(truncate(line, 300)) for line in (*row.warnings[:_MAX_ODD], *not_shown)]
        together = [f"<b>{html_text(truncate(row.name, _MAX_NAME))}</b>: {'; '.join(lines)}"] if lines else []
        items += together if several else lines
    listed = "".join(f"<li>{item}</li>" for item in items)
    return [f'<ul class="{"scrolls odd" if several else ""}" tabindex="0">{listed}</ul>'] if items else []


# One run: its facts.


def _facts(row: RunFiles) -> list[str]:
    run = row.run
    facts: dict[str, Any] = {
        "status": f"{run.status}: {run.reason}".rstrip(": "),
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

    items = []
    for name, text in facts.items():
        title = f' title="{exact_numbers[name]!r}"' if name in exact_numbers else ""
        if text:
            items.append(f"<div><dt>{html_text(name)}</dt><dd{title}>{html_text(text)}</dd></div>")
    return [f"<dl>{''.join(items)}</dl>", _recorded(row)]


def _recorded(row: RunFiles) -> str:
    groups: dict[str, Any] = {"options": row.run.config} if row.run.config else {}
    if argv := row.folder.last_trained_start.get("argv"):
        groups["command"] = shlex.join(argv)
    for name, (section, value) in values_of(row.folder.last_trained_start).items():
        if section not in ("config", "settings") and value is not None:
            group = groups.setdefault("program" if section == "programs" else section, {})
            group[name.partition(": ")[2] or name] = value
    rows = []
    for title, values in groups.items():
        is_text = isinstance(values, str)
        named = [] if is_text else [f"{name} = {truncate(value_text(value), 300)}" for name, value in values.items()]
        text = truncate(values, _MAX_TITLE) if is_text else ", ".join(named)
        rows.append(f"<tr><td>{html_text(title)}</td><td>{html_text(text)}</td></tr>")
    table = f'<table class="facts"><tbody>{"".join(rows)}</tbody></table>'
    return f"<details open><summary>what it was given</summary>{table}</details>" if rows else ""


# Several runs: a row a run, and a small table of those that differ by a seed.


def _table(sweep: Sweep) -> list[str]:
    runs = [row.run for row in sweep.rows]
    columns = {
        "status": list(map(_status_cell, runs)),
        "step": list(map(_step_cell, runs)),
        f"best {sweep.metric.name}": [_number(best and best[0]) for best in sweep.best],
        "at step": [_number(best and best[1]) for best in sweep.best],
    }
    for name in main_metrics(runs, None):
        columns[f"last {name}"] = [_number(run.metrics.get(name)) for run in runs]
    columns |= {name: list(map(_option_cell, values)) for name, values in sweep.options.items()}
    columns["wall time"] = [_number(None if run.error else run.wall_seconds, duration_text) for run in runs]
    columns["goodput"] = [_number(run.goodput, "{:.1%}".format) for run in runs]
    drawn = list[str]()
    for i, depth in sweep.tree():
        cells = "".join(column[i] for column in columns.values())
        drawn.append(f'<tr data-r="{i}">{_name_cell(sweep, i, depth)}{cells}</tr>')
    words = html_text(f"{_best_words(sweep)}The best is the {sweep.metric}.")
    return [f'<p>{words}</p><div id="controls"></div>', _boxed(["name", *columns], drawn, "runs")]


def _seeds(sweep: Sweep) -> list[str]:
    """A row for each group of runs that differ in nothing but a seed."""
    rows = list[str]()
    for group in sweep.groups:
        values = [best[0] for i in group if (best := sweep.best[i]) is not None]
        if values:
            names = format_list([sweep.rows[i].name for i in group], 10)
            numbers = (sum(values) / len(values), min(values), max(values))
            rows.append(f"<tr>{_cell(f'{len(group)} seeds: {names}', _MAX_NAME)}{''.join(map(_number, numbers))}</tr>")
    return [_boxed(("runs", f"mean {sweep.metric.name}", "least", "greatest"), rows)] if rows else []


def _best_words(sweep: Sweep) -> str:
    i = next(iter(sweep.ranked()), None)
    if i is None or (best := sweep.best[i]) is None:
        return ""
    varied = [(name, values[i]) for name, values in sweep.options.items() if values[i] is not None]
    options = ", ".join(f"{name} {truncate(value_text(value), _MAX_NAME)}" for name, value in varied[:_NAMED_OPTIONS])
    name = truncate(sweep.rows[i].name, _MAX_NAME)
    return f"Best: {name}, {best[0]:.4g} at step {best[1]}{options and f' with {options}'}. "


def _name_cell(sweep: Sweep, i: int, depth: int) -> str:
    row, color = sweep.rows[i], sweep.colors[i]
    swatch = f" {legend_key('', color, color)}" if color != NEUTRAL else ""
    text = row.name + (f" @{row.run.parent[1]}" if row.run.parent is not None else "")
    return _cell(text, _MAX_NAME, after=swatch, padding=f"{min(depth, 12) * 1.1:.1f}em" if depth else "")


def _status_cell(run: RunSummary) -> str:
    return _cell(f"{run.status}: {run.reason or run.error or ''}".rstrip(": "))


def _step_cell(run: RunSummary) -> str:
    text = f"{run.step}" if run.last_step is None else f"{run.step}/{run.last_step}"
    return "<td></td>" if run.error else _cell(text, number=float(run.step))


def _option_cell(value: Any) -> str:
    if value is None:
        return "<td></td>"
    return _number(value, value_text) if is_finite_number(value) else _cell(value_text(value))


# Curves.


def _curves(sweep: Sweep) -> list[str]:
    """A picture for each scalar; of one run, training and evaluations are in one."""
    tags, is_one = dict.fromkeys(tag for row in sweep.rows for tag in row.series), len(sweep.rows) == 1
    groups: dict[str, list[str]] = {}
    for tag in tags:
        metric = tag.rpartition("/")[2]
        groups.setdefault(metric if is_one and metric in tags else tag, []).append(tag)
    order = sorted(groups, key=lambda tag: (tag != sweep.metric.name, tag.rpartition("/")[2] != "loss", "/" in tag))
    shown = order[:_MAX_PICTURES]
    if not shown:
        return []
    every = [i for name in shown for tag in groups[name] for i, row in enumerate(sweep.rows) if tag in row.series]
    colored = sum(sweep.colors[i] != NEUTRAL for i in every)
    most = max(12, _COLORED // max(1, colored)), max(2, _NEUTRAL // max(1, len(every) - colored))
    columns = min(560 if is_one else 140, most[0]), min(35, most[1])
    figures = [f"<div>{_figure(sweep, name, groups[name], columns)}</div>" for name in shown]
    note = f"<p>{len(order) - len(shown)} further scalars are not shown.</p>" if len(order) > len(shown) else ""
    return [_legend(sweep), note, f'<div class="pictures">{"".join(figures)}</div>']


def _legend(sweep: Sweep) -> str:
    if len(sweep.rows) == 1:
        words = "Marks: a start (thick), a checkpoint that is kept (short), a stage (dotted), the best value (dot)"
        again = ", steps that were made again (pale)" if any(sweep.rows[0].rewound.values()) else ""
        return f"<p>{words}{again}.</p>"
    ranked = sweep.ranked()
    keys = [legend_key(truncate(sweep.rows[i].name, _MAX_NAME), sweep.colors[i], sweep.colors[i], i) for i in ranked]
    if len(sweep.rows) > len(ranked):
        keys.append(legend_key("all others", NEUTRAL, 0))
    words = f"The best {len(ranked)} are in color, from the first on; dots are their best values."
    return f'<div id="drawing"></div><p id="legend">{"".join(keys)}</p><p>{html_text(words)}</p>'


def _figure(sweep: Sweep, name: str, tags: Sequence[str], columns: tuple[int, int]) -> str:
    curves = list[Curve]()
    marks = list[Mark]()
    is_one = len(sweep.rows) == 1
    for i, row in enumerate(sweep.rows):
        for n, tag in enumerate(sorted(tags, key=lambda tag: tag != name)):
            if tag not in row.series:
                continue
            color, key = sweep.colors[i], n if is_one else i
            text, dash = (tag, n) if is_one else (truncate(row.name, _MAX_NAME), color)
            for points in row.rewound[tag] if is_one else ():
                curves.append(Curve(text, *points, color, dash, pale=True, key=key))
            curves.append(Curve(text, *row.series[tag], color, dash, key=key))
            best = row.run.best.get(tag) or (sweep.best[i] if tag == sweep.metric.name else None)
            if best is not None and color != NEUTRAL:
                marks.append(Mark("best", best[1], f"{text}: best {best[0]!r} at step {best[1]}", color, best[0], key))
    marks += sweep.rows[0].marks() if is_one else []
    return picture(name, curves, marks, columns=columns, legend=is_one, style=False)


# What differs, and times.


def _differences(sweep: Sweep) -> list[str]:
    rows = []
    for name, values in sweep.differ.items():
        runs: dict[str, list[str]] = {}
        for row, value in zip(sweep.rows, values, strict=True):
            runs.setdefault("none" if value is None else value_text(value), []).append(truncate(row.name, _MAX_NAME))
        lines = [f"{truncate(value, 100)}: {format_list(names, 3)}" for value, names in runs.items()]
        rows.append(f"<tr>{_cell(name, 60)}{_number(len(runs))}{_cell('; '.join(lines), 120)}</tr>")
    table = [_boxed(("what", "values", "values and their runs"), rows)] if rows else []
    if len(sweep.rows) != 2:
        return table
    pair = [RecordedRuns(row.run.path, [row.folder]) for row in sweep.rows]
    text = divergence(pair).text(pair)
    return [f"<p>{html_text(text)}</p>", *table] if text else table


def _times(sweep: Sweep) -> list[str]:
    """A line for each run, or of one run for each start: how its time is divided."""
    known = [row for row in sweep.rows if row.folder.valid_starts]
    lines = [(row.name, goodput_of_starts(row.folder.valid_starts), "") for row in known]
    for folder in [row.folder for row in known] if len(sweep.rows) == 1 else ():
        for start, item in zip(folder.valid_starts, goodput_by_start(folder.valid_starts), strict=True):
            facts = folder.facts_of(start)
            steps = "no step" if facts["first"] is None else f"steps {facts['first']} to {last_step_text(facts)}"
            words = f"{steps}, {facts['status']}: {facts['reason']}".rstrip(": ")
            lines.append((f"start {start['number']}", item, words))
    names = list(Goodput().parts)
    used = [name for name in names if any(item.parts[name] for _, item, _ in lines)]
    keys = " ".join(f'<span class="key"><span class="box b{names.index(name)}"></span> {name}</span>' for name in used)
    rows = []
    for name, item, words in lines:
        parts = {part: secs for part, secs in item.parts.items() if secs > 0}
        bar = "".join(
            f'<i class="b{names.index(part)}" style="flex:{secs / item.total:.4f}"></i>' for part, secs in parts.items()
        )
        title = ", ".join(f"{part} {secs:.4g} s ({secs / item.total:.1%})" for part, secs in parts.items())
        cells = _cell(name, _MAX_NAME) + _number(item.fraction, "{:.1%}".format) + _number(item.total, duration_text)
        rows.append(f'<tr>{cells}<td><div class="bar" title="{title}">{bar}</div></td>{_cell(words, 80)}</tr>')
    return [f"<p>{keys}</p>", _boxed(("name", "goodput", "time", "parts", ""), rows)] if rows else []
