"""`plot`: curves of scalars with matplotlib, without a display or a server."""

import argparse
import fnmatch
import math
import os
from collections.abc import Callable, Sequence

from jstep.cli.command import OK, TROUBLE, Command, complain, printable
from jstep.core.checks import figure
from jstep.stores.files import is_directory
from jstep.stores.objects import absolute, is_url, location
from jstep.summary.read import DataLossError, Point, find_runs, read_scalars


def plot_scalars(
    logdirs: Sequence[str],
    output: str,
    *,
    tags: Sequence[str] = ("*",),
    x_axis: str = "step",
    smoothing: float = 0.0,
    log_y: bool = False,
    on_corrupted: Callable[[DataLossError], None] | None = None,
) -> list[str]:
    """Plot the scalars of one or several runs, with a panel for each tag and a line for each run.

    Args:
        logdirs: Directories; each directory at or below them that contains event files is a run.
        output: The path of the image; its suffix (`.png`, `.svg`, `.pdf`) determines the format.
        tags: Globs of the tags to plot.
        x_axis: "step", or "time" (hours since the first point of the run).
        smoothing: The decay, 0 ≤ decay < 1, of a moving average (debiased, as in TensorBoard). The original values
            are drawn faintly behind it.
        log_y: Whether the vertical axes are logarithmic.
        on_corrupted: A callback for corrupted files. The events before the corruption, and all other files, are
            plotted.

    Returns:
        The tags that were plotted.

    Raises:
        FileNotFoundError: A directory does not exist or contains no event files.
        ValueError: No tag of a scalar matches, or smoothing is out of range.
        DataLossError: A file is corrupted, and `on_corrupted` is None.
        ImportError: matplotlib is not installed.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be at least 0 and less than 1, not {smoothing}")
    runs = _read(logdirs, on_corrupted)
    there = list(dict.fromkeys(tag for series in runs.values() for tag in series))
    chosen = [tag for tag in there if any(fnmatch.fnmatchcase(tag, pattern) for pattern in tags)]
    if not chosen:
        if not there:
            raise ValueError(f"no scalars in {', '.join(logdirs)}")
        from jstep.core.trees import nearest  # imported here because it imports JAX, which plotting does not need

        raise ValueError(f"no scalar's tag matches {', '.join(tags)}{nearest(tags[0], there)}")
    _draw(runs, chosen, output, x_axis, smoothing, log_y)
    return chosen


def _read(
    logdirs: Sequence[str], on_corrupted: Callable[[DataLossError], None] | None
) -> dict[str, dict[str, list[Point]]]:
    """Return run → tag → points; a run is named by its path below the common prefix of all runs."""
    paths: list[str] = []
    for logdir in logdirs:
        if not is_url(logdir) and not os.path.exists(logdir):
            raise FileNotFoundError(f"no such directory: {logdir}")
        found = find_runs(logdir) if is_directory(logdir) else [logdir]
        if not found:
            raise FileNotFoundError(f"no event files (events.out.tfevents.*) in {logdir} or below")
        paths += found
    paths = list(dict.fromkeys(map(absolute, paths)))
    return {name: read_scalars(path, on_corrupted) for name, path in zip(_names(paths), paths, strict=True)}


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
    fig = figure()
    columns = min(len(tags), 3)
    rows = math.ceil(len(tags) / columns)
    fig.set_size_inches(4.8 * columns, 3.2 * rows)
    grid = fig.subplots(rows, columns, squeeze=False).ravel()
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
        axes.tick_params(which="both", labelsize=8)  # including minor ticks of logarithmic axes
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if log_y:
            axes.set_yscale("log", nonpositive="mask")
        if len(runs) > 1 and axes.lines:
            for text in axes.legend(fontsize=8, frameon=False).get_texts():
                text.set_parse_math(False)
    fig.savefig(os.path.expanduser(output), dpi=150)


def _smooth(values: Sequence[float], decay: float) -> list[float]:
    """Return a moving average, debiased by 1 − decayⁿ; non-finite values are skipped."""
    smoothed, average, weight = [], 0.0, 1.0
    for value in values:
        if math.isfinite(value):
            average = decay * average + (1 - decay) * value
            weight *= decay
        smoothed.append(average / (1 - weight) if weight < 1 else value)
    return smoothed


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logdir", nargs="+", help="a directory; every directory below it with event files is a run")
    parser.add_argument("-o", "--output", required=True, help="the image file: loss.png, loss.svg or loss.pdf")
    parser.add_argument("-t", "--tags", action="append", metavar="GLOB", help="tags to plot (repeatable)")
    parser.add_argument("-x", choices=("step", "time"), default="step", help="the horizontal axis")
    parser.add_argument("-s", "--smoothing", type=float, default=0.0, metavar="DECAY", help="0 (none) to below 1")
    parser.add_argument("--log-y", action="store_true", help="logarithmic vertical axes")


def _run(arguments: argparse.Namespace) -> int:
    code = OK

    def on_corrupted(error: DataLossError) -> None:
        nonlocal code
        code = TROUBLE
        complain("plot", f"{error}; the data after it is not drawn")

    tags = plot_scalars(
        [location(logdir, "logdir") for logdir in arguments.logdir],
        arguments.output,
        tags=arguments.tags or ("*",),
        x_axis=arguments.x,
        smoothing=arguments.smoothing,
        log_y=arguments.log_y,
        on_corrupted=on_corrupted,
    )
    print(printable(f"{arguments.output}: {', '.join(tags)}"))
    return code


COMMAND = Command(_add_arguments, _run)
