"""Run the benchmarks, write their ratios into the page `docs/benchmarks.md`, and those of overview.py into README.

    python benchmarks/report.py                  # all: takes hours on an otherwise idle machine
    python benchmarks/report.py --only step      # bench_step.py alone; other sections are kept
    python benchmarks/report.py --quick          # few rounds, only to check that they run

Each benchmark runs in a separate process, one after the other. Only its ratios are kept: jstep's time divided by that
of another library, measured interleaved in the same run, since ratios depend less on the machine than times do.
The page gives the date and the machine of each measurement, and the benchmarks that could not run.
"""

import argparse
import ast
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import overview
from bounds import REASONS

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- benchmarks: written by benchmarks/report.py -->", "<!-- end of benchmarks -->"
QUICK_ARGUMENTS = {"checkpoint": ["2", "20"], "start": ["--restore", "1"]}
ENVIRONMENTS = {"whole_runs": HERE.parent / ".whole_runs"}
"""Environments that benchmarks run programs in; these benchmarks run by default only if theirs exists."""
PACKAGES = ("jax", "numpy", "optax", "flax", "orbax-checkpoint", "tensorboardX")
_RATIO = re.compile(r"\s*(\S.*?) / (\S.*?): (\d+(?:\.\d+)?)(?:\s+\(bound ([\d.]+)\))?(?:\s+(?:ok|OVER))?\s*")
_SECTION = re.compile(r"<!-- benchmark: (\w+) -->\n(.*?)(?=<!-- benchmark: |\Z)", re.DOTALL)


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
    """Return the ratios in the output of `_timing.report`: a title, with indented lines below it."""
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
    return "\n".join(line for line in output.splitlines() if line.startswith("|"))


def section(
    source: str, output: str, failure: str | None, where: str, reasons: Mapping[tuple[str, str], str] | None = None
) -> str:
    """Return the Markdown section of a benchmark.

    Args:
        source: Its source, whose docstring describes it.
        output: Its output.
        failure: The reason why it could not run, in one line; None if it ran.
        where: Date, machine and versions.
        reasons: (Program, compared with) → why a ratio is above its bound; the table then has a column for it.
    """
    about = " ".join((ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].split())
    heading, description = _heading(about)
    lines = [f"## {heading}", "", *([description, ""] if description else [])]
    if found := ratios_in(output):
        lines += ["| measured | program | compared with | ratio | bound |", "|---|---|---|---:|---:|"]
        if reasons:
            lines[-2:] = [f"{lines[-2]} why above it |", f"{lines[-1]}---|"]
        for one in found:
            cells = [_cell(one.title), _cell(one.ours), _cell(one.peer), _number(one)]
            cells.append("" if one.bound is None else f"{one.bound:g}")
            if reasons:
                is_above = one.ratio > (1.0 if one.bound is None else one.bound)
                cells.append(reasons.get((one.ours, one.peer), "") if is_above else "")
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    if table := tables_in(output):
        lines += [table, ""]
    if failure is not None:
        lines += [f"Not complete: {_cell(failure)}", ""]
    return "\n".join([*lines, f"*{where}*", ""])


def written(page: str, sections: dict[str, str], order: Sequence[str]) -> str:
    """Return the page with new sections; other sections are kept, and those of deleted benchmarks are removed.

    Raises:
        ValueError: The page lacks its two markers.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"docs/benchmarks.md: must have the line {BEGIN} and, below it, {END}")
    head, rest = page.split(BEGIN)
    inside, tail = rest.split(END)
    known = {name: text.strip() for name, text in _SECTION.findall(inside)} | sections
    body = "\n\n".join(f"<!-- benchmark: {name} -->\n{known[name].strip()}" for name in order if name in known)
    return f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}"


def _heading(about: str) -> tuple[str, str]:
    """Split a description into a heading, which is its first clause, and the rest, which is a sentence or empty."""
    first, *rest = re.split(r"(?:[.:;]|,(?! and)) |\.$", about, maxsplit=1)
    description = "".join(rest)
    if not description.startswith("jstep"):  # the name is lowercase, also at the start of a sentence
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
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    load = f", load {os.getloadavg()[0]:.1f} before it" if hasattr(os, "getloadavg") else ""
    return f"{name}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores{load}"


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
    command = [sys.executable, str(HERE / f"bench_{name}.py"), *(QUICK_ARGUMENTS.get(name, []) if quick else [])]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **({"JSTEP_QUICK_BENCHMARKS": "1"} if quick else {})}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return output, f"it took longer than {limit:g} s"
    if done.returncode and ("Traceback" in done.stderr or done.returncode != 1 or not ratios_in(done.stdout)):
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return done.stdout, last[:300]
    return done.stdout, None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected benchmarks, and write the page after each; return 1 if one of them did not finish."""
    names = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help=f"repeatable: {', '.join(names)}"
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, which the page mentions")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for a benchmark (default: 3600)")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write (default: docs/benchmarks.md)")
    given = parser.parse_args(argv)
    failures = 0
    for name in given.only or names:
        if not given.only and name in ENVIRONMENTS and not ENVIRONMENTS[name].exists():
            print(f"{name}: skipped, {ENVIRONMENTS[name]} does not exist; its section is kept", flush=True)
            continue
        print(f"{name} …", flush=True)
        where = f"{datetime.date.today().isoformat()}, {machine()}. {versions()}."
        if given.quick:
            where += " A quick run, with few rounds: it shows that the benchmark runs, and its figures say little."
        output, failure = run(name, given.quick, given.limit)
        print(output if failure is None else f"{output}\n{name}: {failure}", flush=True)
        failures += failure is not None
        source = (HERE / f"bench_{name}.py").read_text(encoding="utf-8")
        text = section(source, output, failure, where, REASONS.get(name))
        given.page.write_text(written(given.page.read_text(encoding="utf-8"), {name: text}, names), encoding="utf-8")
    if given.page == PAGE:
        overview.write()
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
