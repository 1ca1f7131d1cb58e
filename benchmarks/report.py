"""Run the benchmarks, write their ratios into the page `docs/benchmarks.md`, and those of
overview.py into README.

    python benchmarks/report.py              # all of the page: hours on an otherwise idle machine
    python benchmarks/report.py --only step  # bench_step.py alone; other sections are kept
    python benchmarks/report.py --quick      # few rounds, only to check that they run

Each benchmark runs in a separate process, one after the other. Only its ratios are kept: jstep's
time divided by that of another library, measured interleaved in the same run, since ratios depend
less on the machine than times do. The page gives the date and the machine of each measurement, and
the benchmarks that could not run.
"""

import argparse
import ast
import datetime
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import overview
from bounds import REASONS

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- benchmarks: written by benchmarks/report.py -->", "<!-- end of benchmarks -->"
QUICK_ARGUMENTS = {"checkpoint": ["2", "20"], "start": ["--restore", "1"]}
ENVIRONMENTS = {"whole_runs": HERE.parent / ".whole_runs"}
"""Environments that benchmarks run programs in; these benchmarks run by default only if theirs
exists."""
NOT_SHOWN = {
    *(
        "collectives",
        "compact_quality",
        "compile_growth",
        "compilers",
        "create",
        "fingerprint",
        "growth",
        "import",
        "in_flight",
    ),
    *("lanes", "muon", "positions", "queues", "stages", "start"),
}
"""Benchmarks of jstep's inside: `--only` runs them, and the page leaves them out."""
PACKAGES = ("jax", "numpy", "optax", "flax", "orbax-checkpoint", "tensorboardX")
_RATIO = re.compile(
    r"\s*(\S.*?) / (\S.*?): (\d+(?:\.\d+)?)(?:\s+\(bound "
    r"([\d.]+)\))?(?:\s+(?:ok|OVER))?(?:\s+\[.*\])?\s*"
)
_DIGITS = re.compile(r"\d+(?:\.\d+)?")
_SECTION = re.compile(
    r"<!-- benchmark: (\w+) -->\n(.*?)(?=<!-- benchmark: |<!-- versions -->|\Z)",
    re.DOTALL,
)
_WHERE = re.compile(
    r"^\*(\d{4}-\d\d-\d\d, .*?)\.(?: Python ([^*]+?)\.)?( [A-Z][^*]*)?\*$", re.MULTILINE
)
_VERSIONS = "Versions, if a section does not list others: Python "


class Ratio(NamedTuple):
    """A row of the table.

    Attributes:
        title: What was measured.
        ours: Name of the program whose time is the numerator.
        peer: Name of the program whose time is the denominator.
        ratio: Their quotient; below 1 `ours` is faster.
        bound: The largest acceptable ratio; None if there is no bound.
    """

    title: str
    ours: str
    peer: str
    ratio: float
    bound: float | None


def ratios_in(output: str) -> list[Ratio]:
    """Return the ratios in the output of `_timing.report`: a title, with indented lines below
    it."""
    title, found = "", []
    for line in output.splitlines():
        match = _RATIO.fullmatch(line)
        if match:
            bound = None if match[4] is None else float(match[4])
            found.append(Ratio(title, match[1], match[2], float(match[3]), bound))
        elif line and not line[0].isspace() and line[0] != "|":
            title = line.strip().rstrip(":")
    return found


def tables_in(output: str) -> str:
    """Return the Markdown tables that a benchmark printed."""
    lines = "\n".join(line for line in output.splitlines() if line.startswith("|"))
    return re.sub(r"\n(?=\|.*\n\|-)", "\n\n", lines)  # a blank line before each header


def section(
    source: str,
    output: str,
    failure: str | None,
    where: str,
    reasons: Mapping[tuple[str, str], str] | None = None,
    is_read: Callable[[Ratio], bool] = lambda _: True,
) -> str:
    """Return the Markdown section of a benchmark.

    Args:
        source: Its source, whose docstring describes it.
        output: Its output.
        failure: The reason why it could not run, in one line; None if it ran.
        where: Date, machine and versions.
        reasons: (Program, compared with) → why a ratio is above its bound: numbered notes below the
            table.
        is_read: Whether overview.py reads a row. Of the others, rows without a bound are left out,
            and those within it are joined if they differ in sizes only.
    """
    about = " ".join((ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].split())
    heading, description = _heading(about)
    lines = [f"## {heading}", "", *([description, ""] if description else [])]
    notes: list[str] = []
    if found := [one for one in ratios_in(output) if one.bound is not None or is_read(one)]:
        rows = [(group, _note(group[0], reasons or {}, notes)) for group in _joined(found, is_read)]
        lines += [
            "| measured | program | compared with | ratio | bound |",
            "|---|---|---|---:|---:|",
        ]
        if notes:
            lines[-2:] = [f"{lines[-2]} note |", f"{lines[-1]}---|"]
        above = ""
        for group, note in rows:
            title = _span([one.title for one in group])
            one, last = group[0], max(group, key=_ratio)
            number = _number(one)
            if len(group) != 1:
                number = f"{_number(min(group, key=_ratio))} to {_number(last)}"
            cells = [
                "" if title == above else _cell(title),
                _cell(one.ours),
                _cell(one.peer),
                number,
            ]
            cells.append("" if one.bound is None else f"{one.bound:g}")
            lines.append(f"| {' | '.join([*cells, note] if notes else cells)} |")
            above = title
        lines.append("")
    if notes:
        lines += [*(f"{number}. {note}" for number, note in enumerate(notes, 1)), ""]
    if table := tables_in(output):
        lines += [table, ""]
    if failure is not None:
        lines += [f"Not complete: {_cell(failure)}", ""]
    return "\n".join([*lines, f"*{where}*", ""])


def _joined(found: Sequence[Ratio], is_read: Callable[[Ratio], bool]) -> list[list[Ratio]]:
    """Join ratios within their bound that no other page reads, if only numbers in their titles
    differ."""
    groups: dict[object, list[Ratio]] = {}
    for number, one in enumerate(found):
        is_alone = is_read(one) or one.bound is None or one.ratio > one.bound
        key = number if is_alone else (_DIGITS.sub("0", one.title), one.ours, one.peer, one.bound)
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _span(titles: Sequence[str]) -> str:
    """Return a title for several that differ in numbers only: "of 16 to 256 MB"."""
    numbers = zip(*(_DIGITS.findall(title) for title in titles), strict=True)
    ends = [(min(column, key=float), max(column, key=float)) for column in numbers]
    spans = iter([low if low == high else f"{low} to {high}" for low, high in ends])
    return _DIGITS.sub(lambda match: next(spans), titles[0])


def _ratio(one: Ratio) -> float:
    return one.ratio


def _note(one: Ratio, reasons: Mapping[tuple[str, str], str], notes: list[str]) -> str:
    """Return the number of the note that says why a ratio is above its bound, and add it to the
    notes if it is new."""
    reason = reasons.get((one.ours, one.peer))
    if reason is None or one.ratio <= (1.0 if one.bound is None else one.bound):
        return ""
    if reason not in notes:
        notes.append(reason)
    return str(notes.index(reason) + 1)


def written(page: str, sections: dict[str, str], order: Sequence[str]) -> str:
    """Return the page with new sections; other sections are kept, and those of deleted benchmarks
    are removed.

    Raises:
        ValueError: The page lacks its two markers.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"docs/benchmarks.md: must have the line {BEGIN} and, below it, {END}")
    head, rest = page.split(BEGIN)
    inside, tail = rest.split(END)
    known = {name: text.strip() for name, text in _SECTION.findall(inside)} | sections
    known = {name: known[name] for name in order if name in known}
    shared = inside.partition(_VERSIONS)[2].partition(".\n")[0]
    versions = [match[2] or shared for text in known.values() for match in _WHERE.finditer(text)]
    most = max(versions, key=lambda line: sum(_within(one, line) for one in versions), default="")
    for name, text in known.items():

        def with_versions(match: re.Match[str]) -> str:
            own = match[2] or shared
            listed = "" if _within(own, most) else f" Python {own}."
            return f"*{match[1]}.{listed}{match[3] or ''}*"

        known[name] = f"<!-- benchmark: {name} -->\n{_WHERE.sub(with_versions, text).strip()}"
    common = [f"<!-- versions -->\n{_VERSIONS}{most}."] if most else []
    return "\n\n".join([f"{head}{BEGIN}", *known.values(), *common, f"{END}{tail}"])


def _within(some: str, versions: str) -> bool:
    """Say whether all packages of a list of versions are in another one, in the same versions."""
    return set(some.split(", ")) <= set(versions.split(", "))


def _heading(about: str) -> tuple[str, str]:
    """Split a description into a heading, which is its first clause, and the rest, which is a
    sentence or empty."""
    first, *rest = re.split(r"(?:[.:;]|,(?! and)) |\.$", about, maxsplit=1)
    description = "".join(rest)
    if not description.startswith("jstep"):
        # The name is lowercase, also at the start of a sentence.
        description = description[:1].upper() + description[1:]
    return first.replace("`", ""), description


def _number(one: Ratio) -> str:
    text = f"{one.ratio:.2f}" if one.ratio >= 0.1 else f"{one.ratio:.3f}"
    return text if one.bound is None or one.ratio <= one.bound else f"**{text}**"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def machine() -> str:
    """Return a description of the machine and its load."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        pass
    load = f", load {os.getloadavg()[0]:.1f} before it" if hasattr(os, "getloadavg") else ""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    return f"{name}, {cores} cores{load}"


def versions() -> str:
    """Return the versions of Python, jstep and the libraries that it is compared with."""
    found = [f"Python {platform.python_version()}"]
    for name in ("jstep", *PACKAGES):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def run(name: str, quick: bool, limit: float) -> tuple[str, str | None]:
    """Run a benchmark; return its output, and the reason why it did not finish, or None if it did.

    An exit code of 1 without a traceback means that a bound does not hold, which the table shows.
    """
    command = [
        sys.executable,
        str(HERE / f"bench_{name}.py"),
        *(QUICK_ARGUMENTS.get(name, []) if quick else []),
    ]
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        **({"JSTEP_QUICK_BENCHMARKS": "1"} if quick else {}),
    }
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return output, f"it took longer than {limit:g} s"
    if done.returncode and (
        "Traceback" in done.stderr or done.returncode != 1 or not ratios_in(done.stdout)
    ):
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return done.stdout, last[:300]
    return done.stdout, None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected benchmarks, and write the page after each; return 1 if one of them did not
    finish."""
    names = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=names,
        metavar="NAME",
        help=f"repeatable: {', '.join(names)}",
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, which the page mentions")
    parser.add_argument(
        "--limit", type=float, default=3600, help="seconds for a benchmark (default: 3600)"
    )
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="the page to write (default: docs/benchmarks.md)"
    )
    given = parser.parse_args(argv)
    failures = 0
    shown = [name for name in names if name not in NOT_SHOWN]
    for name in given.only or shown:
        if not given.only and name in ENVIRONMENTS and not ENVIRONMENTS[name].exists():
            print(
                f"{name}: skipped, {ENVIRONMENTS[name]} does not exist; its section is kept",
                flush=True,
            )
            continue
        print(f"{name} …", flush=True)
        where = f"{datetime.date.today().isoformat()}, {machine()}. {versions()}."
        if given.quick:
            where += (
                " A quick run, with few rounds: it shows that the benchmark runs, "
                "and its figures say little."
            )
        output, failure = run(name, given.quick, given.limit)
        print(output if failure is None else f"{output}\n{name}: {failure}", flush=True)
        failures += failure is not None
        if name in NOT_SHOWN:
            continue
        source = (HERE / f"bench_{name}.py").read_text(encoding="utf-8")
        is_read = functools.partial(overview.is_read, name)
        text = section(source, output, failure, where, REASONS.get(name), is_read)
        given.page.write_text(
            written(given.page.read_text(encoding="utf-8"), {name: text}, shown), encoding="utf-8"
        )
    if given.page == PAGE:
        overview.write()
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
