"""`report`: one page of HTML about runs: their setup, their course, their use of time, and oddities."""

import argparse
import base64
import dataclasses
import hashlib
import html
import importlib.resources
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jstep.core.checks import as_string, check_choice, describe_type, truncate
from jstep.core.curves import STYLE, Curve, Mark, picture
from jstep.core.tables import html_text
from jstep.hooks.start_differences import values_of
from jstep.stores.files import write_named
from jstep.stores.starts import FOLDER
from jstep.stores.urls import absolute, location, split_path
from jstep.tools import report_many
from jstep.tools.cli import OK, Command, utc_text
from jstep.tools.run_files import RunFiles
from jstep.tools.run_summary import RunSummary
from jstep.tools.runs import RunList, distinct, run_names, runs
from jstep.tools.sweep import Ranking, Row, Sweep

_FEW = 5
"""The maximum number of runs that are shown one by one."""


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """A page of HTML that shows runs; a notebook displays it in a frame.

    Attributes:
        html: The page, self-contained.
    """

    html: str

    def __repr__(self) -> str:
        return f"Report({len(self.html.encode())} bytes of HTML)"

    def _repr_html_(self) -> str:
        # A frame separates its style and script from the notebook's.
        style = "width: 100%; height: 80vh; border: 0; background: white"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(self.html)}"></iframe>'

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the page to a file or URL, atomically; through what is not a regular file, such as a FIFO."""
        write_named(absolute(location(file, "file")), self.html.encode())


def report(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    file: str | os.PathLike[str] | None = None,
    *,
    metric: str | None = None,
    mode: str | None = None,
) -> Report:
    """Show runs on one page of HTML, from the files that they have written; a run may still be in progress.

    The page needs no network, server or script, and fits phones and paper. It shows the setup of the runs (of several
    runs, first their differences), their course (the scalars of their event files; repeated steps are pale), their use
    of time, and oddities: stalls, restarts, values that are not finite, and corrupted files. From six runs on, oddities
    come first, then a table with one row for each run, the options that vary against the best value of a metric, and
    the curves, those of the ten best runs in color.

    Args:
        paths: A directory or URL with a run, or with runs below it; or several.
        file: A file to write the page to as well; None for no file.
        metric: From six runs on, the metric that ranks the runs; None for that of a `KeepBest`, or else the first
            metric of an evaluation, or else `"loss"`.
        mode: `"max"` if the greatest value is the best, `"min"` if the least is. None means as a `KeepBest` of the
            metric has it, or else `"min"`; a `KeepBest` whose direction is known takes precedence.

    Returns:
        The page.

    Raises:
        FileNotFoundError: A directory does not exist, or has no run.
        ValueError: `paths` is empty, no run has the metric, or `mode` is neither.

    Example:
        >>> import jax.numpy as jnp, jstep, tempfile
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> state, run = jstep.TrainState.create({"w": 0.0}, optimizer), tempfile.mkdtemp()
        >>> state = jstep.train(train_step, state, lambda step: jnp.ones(()), 9, checkpoint_dir=run)
        >>> page = jstep.report(run)
        >>> page.html.startswith("<!doctype html>"), "finished" in page.html
        (True, True)
    """
    output = None if file is None else location(file, "file")
    metric = None if metric is None else as_string(metric, "metric")
    mode = None if mode is None else check_choice(mode, "mode", ("min", "max"))
    places = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(places, Iterable):
        raise TypeError(f"paths={paths!r}: must be a path or several, got {describe_type(paths)}")
    listed = RunList()
    for place in places:
        some = runs(place)
        if not some:
            raise FileNotFoundError(f"{os.fspath(place)}: no run is there; a run has a folder {FOLDER}/")
        listed = distinct([*listed, *some])
    if not listed:
        raise ValueError(f"paths={paths!r}: must be a path or several, got none")
    page = Report(_few(listed, metric, mode) if len(listed) <= _FEW else _many(listed, metric, mode))
    if output is not None:
        page.save(output)
    return page


# The page.


def _few(run_list: RunList, metric: str | None, mode: str | None) -> str:
    names = zip(run_list, run_names(run_list), range(len(run_list)), strict=True)
    all_left = [RunFiles.of(*fields) for fields in names]
    if metric is not None:  # which is checked, though nothing is ranked
        Ranking.of([Row.of(left.run, left.name) for left in all_left], metric, mode)
    title = f"Run {all_left[0].name}" if len(run_list) == 1 else f"{len(run_list)} runs"
    sections = {
        "What it was": _what(run_list, all_left),
        "How it went": _how(all_left),
        "Where its time went": [part for left in all_left for part in left.part([], _where, left, len(run_list))],
        "What is odd": [part for left in all_left for part in _odd(left, len(run_list))],
    }
    return _page(title, sections, _asset("report.js"))


def _many(run_list: RunList, metric: str | None, mode: str | None) -> str:
    rows = [Row.of(*fields) for fields in zip(run_list, run_names(run_list), strict=True)]
    scripts = _asset("report.js") + _asset("report_many.js")
    return _page(f"{len(rows)} runs", report_many.sections(Sweep.of(rows, metric, mode)), scripts)


def _page(title: str, sections: Mapping[str, Sequence[str]], script: str) -> str:
    body = [f"<h2>{html_text(name)}</h2>{''.join(parts)}" for name, parts in sections.items() if parts]
    style = STYLE + _asset("report.css")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html_text(title)}</title><style>{style}</style></head>\n<body><main><h1>{html_text(title)}</h1>"
        f"<p>As of {utc_text(time.time(), 'minutes')} UTC, by jstep {sys.modules['jstep'].__version__}.</p>\n"
        f"{chr(10).join(body)}\n</main><script>{script}</script></body></html>\n"
    )
    return _INVALID.sub("\N{REPLACEMENT CHARACTER}", page)


_INVALID = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
"""Characters that HTML must not have, and marks that make text read in another order than it has."""


def _asset(name: str) -> str:
    return importlib.resources.files("jstep.tools").joinpath(name).read_text(encoding="utf-8")


def _table(rows: Iterable[Sequence[object]], head: Sequence[object] = (), kind: str = "") -> str:
    heads = f"<thead><tr>{''.join(f'<th>{html_text(value)}</th>' for value in head)}</tr></thead>" if head else ""
    cells = "".join(f"<tr>{''.join(f'<td>{html_text(value)}</td>' for value in row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}">{heads}<tbody>{cells}</tbody></table></div>'


def _heading(left: RunFiles, count: int) -> str:
    return f"<h3>{html_text(left.name)}</h3>" if count > 1 else ""


def _what(run_list: RunList, all_left: Sequence[RunFiles]) -> list[str]:
    """The facts of the runs; of several runs first a table, and their differences."""
    if len(run_list) == 1:
        (left,) = all_left
        return [left.part("", _facts, all_left, left), left.part("", _recorded, left, True)]
    parts = [f'<div class="wide">{run_list._repr_html_()}</div>']
    sound = [left for left in all_left if not left.is_damaged]
    differences = {
        name: [truncate(str(value), 60) for value in values]
        for name, values in RunList(left.run for left in sound).differences().items()
    }
    if differences:
        parts.append("<h3>What differs</h3>")
        parts.append(
            _table(([name, *values] for name, values in differences.items()), ["", *(left.name for left in sound)])
        )
    for left in all_left:
        inner = left.part("", _facts, all_left, left) + left.part("", _recorded, left)
        parts.append(f"<details><summary>{html_text(left.name)}</summary>{inner}</details>")
    return parts


def _facts(all_left: Sequence[RunFiles], left: RunFiles) -> str:
    run = left.run
    times = {"started": run.started, "ended": run.ended}
    rows = {
        "status": f"{run.status}: {run.reason}".rstrip(": "),
        "step": f"{run.step}" if run.last_step is None else f"{run.step} of {run.last_step}",
        **{name: f"{utc_text(at, 'seconds')} UTC" for name, at in times.items() if at},
        "wall time": f"{run.wall_seconds:.0f} s" if run.wall_seconds < 600 else f"{run.wall_seconds / 3600:.2f} h",
        "devices": run.devices,
        "parameters": run.parameters and f"{run.parameters:,}",
        "peak memory of a device": run.peak_bytes and f"{run.peak_bytes / 2**30:.2f} GiB",
        "mfu": run.mfu and f"{run.mfu:.3g}",
        "goodput": left.starts and f"{left.total().fraction:.1%}",
        "commit": run.commit and run.commit + f", with edits ({run.edits})" * bool(run.edits),
        "branch of": run.parent and f"{run.parent[0]} (step {run.parent[1]})",
        "branches": ", ".join(other.name for other in all_left if _is_branch(other.run, run)),
        **{f"best {name}": f"{value:.6g} at step {at}" for name, (value, at) in run.best.items()},
        **{f"last {name}": f"{value:.6g}" for name, value in run.metrics.items()},
        "directory": run.path,
    }  # fmt: skip
    facts = (
        f"<div><dt>{html_text(name)}</dt><dd>{html_text(value)}</dd></div>" for name, value in rows.items() if value
    )
    return f"<dl>{''.join(facts)}</dl>"


def _is_branch(run: RunSummary, of: RunSummary) -> bool:
    is_below = run.parent is not None and split_path(run.parent[0])[0] == of.path
    return is_below or (run.parent_run is not None and run.parent_run == of.run)


def _recorded(left: RunFiles, is_open: bool = False) -> str:
    """The program, its arguments, batches and versions, as recorded on the card."""
    settings = left.card.get("settings") or {}
    values = {name: value for name, (_, value) in values_of(left.trained).items() if value is not None}
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        if name not in settings:
            group, _, rest = name.rpartition(": ")
            groups.setdefault(group or "program", []).append(f"{rest} = {truncate(str(value), 300)}")
    options = {
        name: [f"{key} = {truncate(str(value), 300)}" for key, value in config.items()]
        for name, config in left.options().items()
    }
    groups = {name: entries for name, entries in groups.items() if name != "config"} | options
    opened, words = " open" * is_open, "program, arguments, batches, versions"
    rows = [(group, ", ".join(entries)) for group, entries in groups.items()]
    return f"<details{opened}><summary>{words}</summary>{_table(rows, kind='facts')}</details>" if rows else ""


def _how(all_left: Sequence[RunFiles]) -> list[str]:
    """The plots, one for each metric, with its evaluations and all runs."""
    tags = dict.fromkeys(tag for left in all_left for tag in left.series)
    groups: dict[str, list[str]] = {}
    for tag in tags:
        metric = tag.rpartition("/")[2]
        groups.setdefault(metric if metric in tags else tag, []).append(tag)
    order = sorted(groups, key=lambda name: (name != "loss", len(groups[name]) == 1))
    axis = [mark for left in all_left for mark in left.part((), left.marks)]
    figures = [_figure(name, sorted(groups[name], key=lambda tag: tag != name), all_left, axis) for name in order]
    if not figures:
        return []
    words = {"start": "a start (thick)", "checkpoint": "a checkpoint that is kept (short)", "stage": "a stage (dotted)"}
    told = [word for kind, word in words.items() if any(mark.kind == kind for mark in axis)]
    told += ["steps that were made again (pale)"] * any(
        series.rewound for left in all_left for series in left.series.values()
    )
    told += ["the best value (dot)"] * any(left.run.best for left in all_left)
    marks = f"<p>Marks: {', '.join(told)}.</p>" if told else ""
    return [marks, f'<div class="pictures">{"".join(figures)}</div>']


def _figure(name: str, tags: Sequence[str], all_left: Sequence[RunFiles], axis: Sequence[Mark]) -> str:
    curves: list[Curve] = []
    rows: list[list[object]] = []
    marks = list(axis)
    for left in all_left:
        for dash, tag in enumerate(tags):
            if (series := left.series.get(tag)) is None:
                continue
            label = tag if len(all_left) == 1 else left.name if len(tags) == 1 else f"{left.name}: {tag}"
            for old_steps, old in series.rewound:
                curves.append(Curve(label, np.asarray(old_steps), np.asarray(old), left.color, dash, pale=True))
            steps, values = np.asarray(series.steps), np.asarray(series.values)
            curves.append(Curve(label, steps, values, left.color, dash))
            rows.append([label, *_row(steps, values)])
            if tag in left.run.best:
                value, at = left.run.best[tag]
                marks.append(Mark("best", at, f"{label}: best {value:.6g} at step {at}", left.color, value))
    head = ["", "points", "first", "last", "least", "at step", "greatest", "at step", "not finite"]
    behind = f"<details><summary>the numbers</summary>{_table(rows, head)}</details>"
    return f"<div>{picture(name, curves, marks, style=False)}{behind}</div>"


def _row(steps: Any, values: Any) -> list[str]:
    finite = np.flatnonzero(np.isfinite(values))
    ends = [f"{values[i]:.6g}" for i in (0, -1)] if values.size else ["", ""]
    if not finite.size:
        return [f"{values.size}", *ends, "", "", "", "", f"{values.size}"]
    low, high = finite[values[finite].argmin()], finite[values[finite].argmax()]
    extremes = [f"{values[low]:.6g}", f"{steps[low]}", f"{values[high]:.6g}", f"{steps[high]}"]
    return [f"{values.size}", *ends, *extremes, f"{values.size - finite.size}"]


def _where(left: RunFiles, count: int) -> list[str]:
    """The time of a run, in total and for each start."""
    if not left.starts:
        return []
    total = left.total()
    shares = {name: secs for name, secs in total.parts.items() if secs}
    names = list(total.parts)
    bar = "".join(
        f'<div class="b{names.index(name)}" title="{name} {secs:.1f} s" style="flex: {secs / total.total:.6f}"></div>'
        for name, secs in shares.items()
    )
    keys = " ".join(
        f'<span class="key"><span class="box b{names.index(name)}"></span> {name} {secs / total.total:.1%}</span>'
        for name, secs in shares.items()
    )
    head = ["", "steps", *(f"{name} (s)" for name in shares), "ended"]
    digits = 1 if total.total > 60 else 3
    rows = [["all", f"{total.steps}", *(f"{secs:.{digits}f}" for secs in shares.values()), ""]]
    for i, (end, item, span) in enumerate(zip(left.ends(), left.goodput, left.spans(), strict=True), 1):
        where = "" if span is None else f"{span[0]} to {span[1]}"
        seconds = [f"{item.parts[name]:.{digits}f}" for name in shares]
        rows.append([f"start {i}", where, *seconds, end])
    title = f"<p>{html_text(total._title())}</p>"
    return [_heading(left, count), title, f'<div class="bar">{bar}</div><p>{keys}</p>', _table(rows, head)]


def _odd(left: RunFiles, count: int) -> list[str]:
    lines = left.odd()
    items = "".join(f"<li>{html_text(line)}</li>" for line in lines)
    return [_heading(left, count), f"<ul>{items}</ul>"] if lines else []


# `report` of the command line.


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", metavar="RUN", nargs="+", help="a directory or URL with a run, or with runs below it")
    parser.add_argument("--metric", metavar="NAME", help="the metric that ranks six runs or more")
    parser.add_argument("--mode", choices=("max", "min"), help="whether its greatest or least value is the best")
    parser.add_argument("-o", "--output", default="report.html", help="the page (default: report.html); - for stdout")


def _run(arguments: argparse.Namespace) -> int:
    page = report(arguments.paths, metric=arguments.metric, mode=arguments.mode)
    if arguments.output == "-":
        sys.stdout.write(page.html)
    else:
        page.save(arguments.output)
        print(f"{arguments.output}: {len(page.html.encode()) / 1000:.0f} kB")
    return OK


REPORT = Command(_add_arguments, _run, has_json=False)
