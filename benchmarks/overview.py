"""The tables of figures in README.md, at the top of `docs/benchmarks.md` and in
`docs/from/which-tool.md`.

    python benchmarks/overview.py   # rewrites them; report.py does, too, after its benchmarks

They are made of the sections of `docs/benchmarks.md` alone, so that a figure is written in one
place, by report.py. Each row is like for like: of the peers that a row names, the quickest counts
in each case, and the row shows the range over the cases. A row whose benchmark was not run is left
out. The rows are in overview.toml.
"""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- figures: written by benchmarks/overview.py -->", "<!-- end of figures -->"
LEVEL = 0.03
"""Ratios that differ from 1 by less than this are called level."""
_SECTION = re.compile(
    r"<!-- benchmark: (\w+) -->\n(.*?)(?=<!-- benchmark: |<!-- end of benchmarks -->|\Z)",
    re.DOTALL,
)
_RATIO = re.compile(r"\| (.*?) ?\| (.*?) \| (.*?) \| \**([\d.]+)\** \| [\d.]* ?\|.*")
_RUN = re.compile(r"^\| (?:digits|transformer|mlp) \|.*", re.MULTILINE)


class Row(NamedTuple):
    """A row.

    Attributes:
        words: What is measured, and on what.
        peer: What it is compared with.
        benchmark: The name of the section that has the ratios.
        title: A pattern for what was measured.
        ours: A pattern for the programs of jstep.
        peers: A pattern for what they are compared with.
        in_readme: Whether README has the row, too.
        excuse: Where the peer is quicker: why; or where the row holds only on some hardware.
    """

    words: str
    peer: str
    benchmark: str
    title: str
    ours: str
    peers: str
    in_readme: bool = False
    excuse: str = ""


_FILE = Path(__file__).with_suffix(".toml")
ROWS = tuple(Row(**row) for row in tomllib.loads(_FILE.read_text(encoding="utf-8"))["row"])


def ratios_of(row: Row, page: str) -> list[float]:
    """Return the ratio of each case of a row to the quickest of its peers, as the page shows
    them."""
    cases: dict[tuple[str, str], float] = {}
    title = ""
    section = dict(_SECTION.findall(page)).get(row.benchmark, "")
    for measured, ours, peer, ratio in _RATIO.findall(section):
        title = measured or title  # an empty cell is the one above
        texts = ((row.title, title), (row.ours, ours), (row.peers, peer))
        if all(re.fullmatch(pattern, text) for pattern, text in texts):
            cases[title, ours] = max(float(ratio), cases.get((title, ours), 0.0))
    return sorted(cases.values())


def is_read(benchmark: str, ratio: Sequence[object]) -> bool:
    """Say whether a row has this ratio of a benchmark: its title, program and peer."""
    return any(
        row.benchmark == benchmark
        and all(
            re.fullmatch(*pair)
            for pair in zip((row.title, row.ours, row.peers), map(str, ratio[:3]), strict=True)
        )
        for row in ROWS
    )


def span(ratios: Sequence[float]) -> str:
    """Return the range of sorted ratios."""
    low, high = f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}"
    return low if low == high else f"{low} to {high}"


def verdict(ratios: Sequence[float]) -> str:
    """Say who is quicker, by sorted ratios."""
    kinds = [
        "jstep" if one < 1 - LEVEL else "the other" if one > 1 + LEVEL else "level"
        for one in ratios
    ]
    counts = {kind: kinds.count(kind) for kind in ("jstep", "level", "the other") if kind in kinds}
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{kind} in {count}" for kind, count in counts.items()) + f" of {len(kinds)}"


def readme_table(page: str) -> str:
    """Return the table of README."""
    lines = ["| | compared with | ratio |", "|---|---|---:|"]
    for row in ROWS:
        if row.in_readme and (ratios := ratios_of(row, page)):
            lines.append(f"| {row.words} | {row.peer} | {span(ratios)} |")
    return "\n".join(lines)


def page_table(page: str) -> str:
    """Return the table at the top of the page."""
    lines = ["| | compared with | ratio | quicker | |", "|---|---|---:|---|---|"]
    for row in ROWS:
        if ratios := ratios_of(row, page):
            lines.append(
                f"| {row.words} | {row.peer} | {span(ratios)} | {verdict(ratios)} | {row.excuse} |"
            )
    return "\n".join(lines)


def tool_table(page: str) -> str:
    """Return the table of the page that compares tools: for each toolkit, the figures of the three
    whole runs."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for line in _RUN.findall(dict(_SECTION.findall(page)).get("whole_runs", "")):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 9:  # the second table, of the first step, has ten
            _, toolkit, _, whole, lines, _, _, after, _ = cells
            found.setdefault(toolkit.split(" (")[0], []).append((lines, whole, after.split(":")[0]))
    table = [
        "| | lines of code | seconds for the whole run | test loss after a SIGKILL |",
        "|---|---|---|---|",
    ]
    for toolkit, runs in found.items():
        lines, wholes, afters = zip(*runs, strict=True)
        after = afters[0] if len(set(afters)) == 1 else ", ".join(afters)
        table.append(f"| {toolkit} | {', '.join(lines)} | {', '.join(wholes)} | {after} |")
    return "\n".join(table)


TABLES = {
    "docs/benchmarks.md": page_table,
    "README.md": readme_table,
    "docs/from/which-tool.md": tool_table,
}


def with_table(text: str, table: str, name: str) -> str:
    """Return a page with another table between its markers.

    Raises:
        ValueError: The page lacks its two markers.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{name}: must have the line {BEGIN} and, below it, {END}")
    return f"{text.partition(BEGIN)[0]}{BEGIN}\n\n{table}\n\n{END}{text.partition(END)[2]}"


def write(root: Path = ROOT) -> None:
    """Rewrite the tables."""
    page = (root / "docs/benchmarks.md").read_text(encoding="utf-8")
    for name, make in TABLES.items():
        path = root / name
        path.write_text(
            with_table(path.read_text(encoding="utf-8"), make(page), name), encoding="utf-8"
        )


if __name__ == "__main__":
    write()
