"""`plot`: curves of scalars, drawn with matplotlib, without a display and without a server."""

import argparse
import fnmatch
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from jstep.cli.command import OK, TROUBLE, Command
from jstep.cli.output import complain, printable
from jstep.stores import absolute, is_directory, is_url, location
from jstep.summary import DataLossError
from jstep.summary.read.files import find_runs
from jstep.summary.read.series import Point, read_scalars


def plot_scalars(
    logdirs: Sequence[str],
    output: str,
    *,
    tags: Sequence[str] = ("*",),
    x_axis: str = "step",
    smoothing: float = 0.0,
    log_y: bool = False,
    damaged: Callable[[DataLossError], None] | None = None,
) -> list[str]:
    """Draws the scalars of one or several runs, a panel for each tag and a line for each run.

    Args:
        logdirs: Directories; each directory at or below them that holds event files is a run.
        output: The picture's path; its suffix (`.png`, `.svg`, `.pdf`) is its format.
        tags: Globs of the tags to draw.
        x_axis: "step", or "time" (hours since the first point of the run).
        smoothing: The decay, 0 ≤ decay < 1, of a moving average (debiased, as TensorBoard's). The values are
            drawn faintly behind it.
        log_y: Whether the vertical axes are logarithmic.
        damaged: Is told of files that are damaged; what lies before the damage is drawn, and all other files.

    Returns:
        The tags that were drawn.

    Raises:
        FileNotFoundError: There is no such directory, or no event file in one.
        ValueError: No scalar has a tag that matches; or smoothing is out of range.
        DataLossError: A file is damaged, and nobody is there to be told.
        ImportError: matplotlib is not installed.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be at least 0 and less than 1, not {smoothing}")
    runs = _read(logdirs, damaged)
    there = list(dict.fromkeys(tag for series in runs.values() for tag in series))
    chosen = [tag for tag in there if any(fnmatch.fnmatchcase(tag, pattern) for pattern in tags)]
    if not chosen:
        if not there:
            raise ValueError(f"no scalars in {', '.join(logdirs)}")
        from jstep.core.trees import nearest  # not at the top: it imports JAX, and a curve is drawn without

        raise ValueError(f"no scalar's tag matches {', '.join(tags)}{nearest(tags[0], there)}")
    _draw(runs, chosen, output, x_axis, smoothing, log_y)
    return chosen


def _read(logdirs: Sequence[str], damaged: Callable[[DataLossError], None] | None) -> dict[str, dict[str, list[Point]]]:
    """Run → tag → points; a run is named by its path below what all of them share."""
    paths: list[str] = []
    for logdir in logdirs:
        if not is_url(logdir) and not os.path.exists(logdir):
            raise FileNotFoundError(f"no such directory: {logdir}")
        found = find_runs(logdir) if is_directory(logdir) else [logdir]
        if not found:
            raise FileNotFoundError(f"no event files (events.out.tfevents.*) in {logdir} or below")
        paths += found
    paths = list(dict.fromkeys(map(absolute, paths)))
    return {name: read_scalars(path, damaged) for name, path in zip(_names(paths), paths, strict=True)}


def _names(paths: Sequence[str]) -> list[str]:
    parts = [path.split("/" if is_url(path) else os.sep) for path in paths]
    shared = len(parts[0]) - 1 if len(parts) == 1 else 0
    while len(parts) > 1 and all(len(part) > shared and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    return ["/".join(part[shared:]) or "." for part in parts]


def _draw(
    runs: dict[str, dict[str, list[Point]]],
    tags: Sequence[str],
    output: str,
    x_axis: str,
    smoothing: float,
    log_y: bool,
) -> None:
    figure = _figure()
    columns = min(len(tags), 3)
    rows = math.ceil(len(tags) / columns)
    figure.set_size_inches(4.8 * columns, 3.2 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(tags) :]:
        axes.set_visible(False)
    for axes, tag in zip(grid, tags, strict=False):
        for i, (run, series) in enumerate(runs.items()):
            points = series.get(tag, [])
            if not points:
                continue
            xs = [p.step if x_axis == "step" else (p.wall_time - points[0].wall_time) / 3600 for p in points]
            values = [p.value for p in points]
            marker = "o" if len(points) == 1 else None
            if smoothing:
                axes.plot(xs, values, color=f"C{i}", alpha=0.25, linewidth=1)
                values = _smooth(values, smoothing)
            axes.plot(xs, values, color=f"C{i}", label=printable(run), marker=marker, linewidth=1.5)
        axes.set_title(printable(tag), fontsize=10, parse_math=False)
        axes.set_xlabel("global step" if x_axis == "step" else "hours", fontsize=9)
        axes.tick_params(which="both", labelsize=8)  # the minor ones of a logarithmic axis too
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if log_y:
            axes.set_yscale("log", nonpositive="mask")
        if len(runs) > 1 and axes.lines:
            for text in axes.legend(fontsize=8, frameon=False).get_texts():
                text.set_parse_math(False)
    figure.savefig(os.path.expanduser(output), dpi=150)


def _figure() -> Any:
    """An empty figure; built without pyplot, it needs no display and touches no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install jstep[plot]") from error
    return Figure(layout="constrained")


def _smooth(values: Sequence[float], decay: float) -> list[float]:
    """A moving average, divided by 1 − decayⁿ against its start at 0; passes over what is not finite."""
    smoothed, average, weight = [], 0.0, 1.0
    for value in values:
        if math.isfinite(value):
            average = decay * average + (1 - decay) * value
            weight *= decay
        smoothed.append(average / (1 - weight) if weight < 1 else value)
    return smoothed


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logdir", nargs="+", help="a directory; every one below it with event files is a run")
    parser.add_argument("-o", "--output", required=True, help="the picture: loss.png, loss.svg or loss.pdf")
    parser.add_argument("-t", "--tags", action="append", metavar="GLOB", help="tags to draw (repeatable)")
    parser.add_argument("-x", choices=("step", "time"), default="step", help="the horizontal axis")
    parser.add_argument("-s", "--smoothing", type=float, default=0.0, metavar="DECAY", help="0 (none) to below 1")
    parser.add_argument("--log-y", action="store_true", help="logarithmic vertical axes")


def _run(arguments: argparse.Namespace) -> int:
    code = OK

    def damaged(error: DataLossError) -> None:
        nonlocal code
        code = TROUBLE
        complain("plot", f"{error}; what lies behind it is not drawn")

    tags = plot_scalars(
        [location(logdir, "logdir") for logdir in arguments.logdir],
        arguments.output,
        tags=arguments.tags or ("*",),
        x_axis=arguments.x,
        smoothing=arguments.smoothing,
        log_y=arguments.log_y,
        damaged=damaged,
    )
    print(printable(f"{arguments.output}: {', '.join(tags)}"))
    return code


COMMAND = Command(_add_arguments, _run)
