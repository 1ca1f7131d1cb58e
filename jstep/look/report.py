"""`report`: one page of HTML about runs: setup, curves, where their time went, and warnings."""

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
from collections.abc import Iterable

from jstep.core.checks import as_choice, as_string, describe_type
from jstep.core.tables import html_text
from jstep.look.cli import OK, Command, utc_text
from jstep.look.page import sections
from jstep.look.run_folder import RunFolders
from jstep.look.runs import find_runs, run_names
from jstep.look.sweep import RunFiles, Sweep
from jstep.showing.drawing import stylesheet
from jstep.stores.files import check_no_links, replace_file, write_named
from jstep.stores.urls import absolute, location

_COLUMNS = 100
"""How many columns of a run's curves are kept, if the page shows several runs."""
_SINGLE_RUN_COLUMNS = 560
"""The same of the only run of a page."""


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
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
        return (
            f'<iframe sandbox="allow-scripts" style="{style}" '
            f'srcdoc="{html.escape(self.html)}"></iframe>'
        )

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the page to a file or URL, atomically."""
        write_named(absolute(location(file, "file")), self.html.encode())


def report(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    file: str | os.PathLike[str] | None = None,
    *,
    metric: str | None = None,
    mode: str | None = None,
) -> Report:
    """Show runs on one page of HTML, from the files that they wrote; a run may be in progress.

    The page needs no network, server or script. It shows warnings, a table with one row for each
    run, with the options that vary and the best value of a metric, the curves of the event files,
    what differs between the runs, and where the time went.

    Args:
        paths: A directory or URL with a run, or with runs below it; or several.
        file: A file to write the page to as well; None for no file.
        metric: The metric that ranks the runs; None for that of a `KeepBest`, or else the first
            metric of an evaluation, or else `"loss"`.
        mode: `"max"` if the greatest value is the best, `"min"` if the least is; a `KeepBest` of
            the metric, if there is one, comes before it. None means `"min"`.

    Returns:
        The page.

    Raises:
        FileNotFoundError: A directory does not exist, or has no run.
        ValueError: `paths` is empty, no run has the metric, `mode` is neither, or `file` is a link
            in one of the directories, which whoever made them has chosen.

    Example:
        >>> import jax.numpy as jnp, jstep, tempfile
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> run = tempfile.mkdtemp()
        >>> state = jstep.train(train_step, state, lambda step: jnp.ones(()), 9, checkpoint_dir=run)
        >>> page = jstep.report(run)
        >>> page.html.startswith("<!doctype html>"), "finished" in page.html
        (True, True)
    """
    output = None if file is None else location(file, "file")
    metric = None if metric is None else as_string(metric, "metric")
    mode = None if mode is None else as_choice(mode, "mode", ("min", "max"))
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if not isinstance(paths, Iterable):
        raise TypeError(f"paths={paths!r}: must be a path or several, got {describe_type(paths)}")
    places = list(paths)
    listed = find_runs(places)
    if not listed:
        raise ValueError(f"paths={places!r}: must be a path or several, got none")
    columns = _COLUMNS if len(listed) > 1 else _SINGLE_RUN_COLUMNS
    folders = RunFolders()
    rows = [
        RunFiles.read(run, folders, name, columns)
        for run, name in zip(listed, run_names(listed), strict=True)
    ]
    page = Report(html=_page(Sweep.build(rows, metric, mode)))
    if output is not None:
        for place in [*places, *(run.path for run in listed)]:
            check_no_links(output, location(place, "paths"))
        page.save(output)
    return page


# The page.


def _page(sweep: Sweep) -> str:
    title = f"Run {sweep.rows[0].name}" if len(sweep.rows) == 1 else f"{len(sweep.rows)} runs"
    body = [
        f"<h2>{html_text(name)}</h2>{''.join(parts)}"
        for name, parts in sections(sweep).items()
        if parts
    ]
    style = stylesheet() + _asset("report.css")
    script = _asset("report.js")
    # The browser runs this script alone: names and values on the page are somebody else's.
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html_text(title)}</title><style>{style}</style></head>\n"
        f"<body><main><h1>{html_text(title)}</h1>"
        f"<p>As of {utc_text(time.time(), 'minutes')} UTC, "
        f"by jstep {sys.modules['jstep'].__version__}.</p>\n"
        f"{chr(10).join(body)}\n</main><script>{script}</script></body></html>\n"
    )
    return _INVALID.sub("\N{REPLACEMENT CHARACTER}", page)


_INVALID = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)
"""Characters that HTML must not have, and marks that reverse the order of text."""


def _asset(name: str) -> str:
    return importlib.resources.files("jstep.look").joinpath(name).read_text(encoding="utf-8")


# `report` of the command line.

_DEFAULT = "report.html"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        metavar="RUN",
        nargs="+",
        help="a directory or URL with a run, or with runs below it",
    )
    parser.add_argument("--metric", metavar="NAME", help="the metric that ranks the runs")
    parser.add_argument(
        "--mode", choices=("max", "min"), help="whether its greatest or least value is the best"
    )
    parser.add_argument("-o", "--output", help=f"the page (default: {_DEFAULT}); - for stdout")


def _write_page(arguments: argparse.Namespace) -> int:
    output: str | None = arguments.output
    if output == "-":
        page = report(arguments.paths, metric=arguments.metric, mode=arguments.mode)
        sys.stdout.write(page.html)
        return OK
    if output is None:
        output = _DEFAULT
        # The user has not named the file, and the current directory may be somebody else's.
        if os.path.islink(output):
            raise ValueError(
                f"{output}: is a link, and nothing is written through it; give the page with -o"
            )
        page = report(arguments.paths, metric=arguments.metric, mode=arguments.mode)
        replace_file(output, page.html.encode())
    else:
        page = report(arguments.paths, output, metric=arguments.metric, mode=arguments.mode)
    print(f"{output}: {len(page.html.encode()) / 1000:.0f} kB")
    return OK


REPORT = Command(_add_arguments, _write_page, has_json=False)
