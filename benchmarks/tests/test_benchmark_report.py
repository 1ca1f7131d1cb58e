"""`benchmarks/report.py`: parsing the output of benchmarks and writing the page."""

import importlib
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE))
try:
    report, overview = map(importlib.import_module, ("report", "overview"))
finally:
    sys.path.remove(str(HERE))
    del sys.modules["report"]

OUTPUT = """\
cpu, load 0.3

1000 leaves, Adam: a step
  jstep                                   10.00 µs  (best 9.00)
  Optax                                   20.00 µs  (best 19.00)
  jstep / Optax: 0.500  (bound 1.0) ok
  jstep / Optax, donated | raw: 1.250  (bound 1.2) OVER  [run delay 0.3%; 3 / 4: quiet]
  jstep: trace and lower 33 ms, compile 12 ms

Importing
  import jstep, all it has / import jax: 0.016
| a | b |
|---|---|
| 1 / 2: 3 | 4 |
"""
SOURCE = '"""A step beside `Optax`: small, and\nlarge.\n\n    python bench.py\n"""\n'


def test_ratios_are_read_with_their_titles():
    assert report.ratios_in(OUTPUT) == [
        ("1000 leaves, Adam: a step", "jstep", "Optax", 0.5, 1.0),
        ("1000 leaves, Adam: a step", "jstep", "Optax, donated | raw", 1.25, 1.2),
        ("Importing", "import jstep, all it has", "import jax", 0.016, None),
    ]
    assert report.ratios_in("") == []


def test_a_section_has_the_table_and_the_machine():
    lines = report.section(SOURCE, OUTPUT, None, "2026-11-21, a CPU").splitlines()
    assert lines[0] == "## A step beside Optax"
    assert lines[2] == "Small, and large."
    assert "| measured | program | compared with | ratio | bound |" in lines
    assert "| 1000 leaves, Adam: a step | jstep | Optax | 0.50 | 1 |" in lines
    assert "|  | jstep | Optax, donated \\| raw | **1.25** | 1.2 |" in lines, (
        "an empty title is the one above"
    )
    assert "| Importing | import jstep, all it has | import jax | 0.016 |  |" in lines
    assert "| 1 / 2: 3 | 4 |" in lines
    assert lines[-1] == "*2026-11-21, a CPU*"
    assert not any("Not complete" in line for line in lines)
    reasons = {
        ("jstep", "Optax"): "not here",
        ("jstep", "Optax, donated | raw"): "it is raw",
        ("1", "2"): "unused",
    }
    reasons |= {("import jstep, all it has", "import jax"): "below 1"}
    lines = report.section(SOURCE, OUTPUT, None, "2026-11-21, a CPU", reasons).splitlines()
    assert "| measured | program | compared with | ratio | bound | note |" in lines
    assert "| 1000 leaves, Adam: a step | jstep | Optax | 0.50 | 1 |  |" in lines
    assert "|  | jstep | Optax, donated \\| raw | **1.25** | 1.2 | 1 |" in lines
    assert "| Importing | import jstep, all it has | import jax | 0.016 |  |  |" in lines
    assert [line for line in lines if line.startswith("1. ")] == ["1. it is raw"]
    failed = report.section(SOURCE, "", "No module named 'x<y>'", "2026-11-21").splitlines()
    assert "Not complete: No module named 'x&lt;y>'" in failed
    assert not any(line.startswith("|") for line in failed)


SIZES = """\
A save of 16 MB in 3 arrays
  Saver / Orbax: 0.63  (bound 0.6) OVER
  Saver / Zarr: 0.55  (bound 0.6) ok
A save of 64 MB in 10 arrays
  Saver / Orbax: 0.40  (bound 0.6) ok
  Saver / Zarr: 0.45  (bound 0.6) ok
  Saver / pickle: 0.50
A save of 256 MB in 10 arrays
  Saver / Orbax: 0.30  (bound 0.6) ok
| a |
|---|
| 1 |
| b |
|---|
"""


def test_rows_that_no_table_reads_are_joined_or_left_out():
    lines = report.section(
        SOURCE, SIZES, None, "2026-11-21", None, lambda one: one.title.startswith("A save of 256")
    )
    assert [line for line in lines.splitlines() if line.startswith(("| A", "|  "))] == [
        "| A save of 16 MB in 3 arrays | Saver | Orbax | **0.63** | 0.6 |",
        "| A save of 16 to 64 MB in 3 to 10 arrays | Saver | Zarr | 0.45 to 0.55 | 0.6 |",
        "| A save of 64 MB in 10 arrays | Saver | Orbax | 0.40 | 0.6 |",
        "| A save of 256 MB in 10 arrays | Saver | Orbax | 0.30 | 0.6 |",
    ]
    assert "| 1 |\n\n| b |" in lines, "tables are apart"
    assert overview.is_read(
        "step", ("A step, called by hand", "jstep, small", "a tuple of arrays", 1.0, None)
    )
    assert not overview.is_read(
        "step", ("A step, called by hand", "jstep, small", "a list", 1.0, None)
    )


@pytest.mark.parametrize(
    ("about", "heading", "description"),
    [
        ("Large leaves.", "Large leaves", ""),
        ("Cost of `train`, compared with a loop.", "Cost of train", "Compared with a loop."),
        (
            "Batches: `batches[N]`, and NumPy. Shuffled.",
            "Batches",
            "`batches[N]`, and NumPy. Shuffled.",
        ),
        ("Digests of 64M floats, and of leaves.", "Digests of 64M floats, and of leaves", ""),
        ("Step time: jstep and Optax.", "Step time", "jstep and Optax."),
    ],
)
def test_the_description_does_not_repeat_the_heading(about, heading, description):
    lines = report.section(f'"""{about}"""', "", None, "2026-11-21").splitlines()
    assert lines == [
        f"## {heading}",
        "",
        *([description, ""] if description else []),
        "*2026-11-21*",
    ]


def page_with(body):
    return f"# Benchmarks\n\nWords.\n\n{report.BEGIN}\n{body}\n{report.END}\n\nMore words.\n"


def test_sections_are_written_between_the_markers_in_order():
    order = ["data", "step", "step_two"]
    one = report.written(page_with(""), {"step": "## S\n"}, order)
    two = report.written(one, {"step_two": "## T\n", "data": "## D\n"}, order)
    assert [line for line in two.splitlines() if line.startswith("##")] == ["## D", "## S", "## T"]
    assert two.startswith("# Benchmarks\n\nWords.\n")
    assert two.endswith("\n\nMore words.\n")
    again = report.written(two, {"step": "## S again\n"}, order)
    assert [line for line in again.splitlines() if line.startswith("##")] == [
        "## D",
        "## S again",
        "## T",
    ]
    assert report.written(again, {}, order) == again, "writing is idempotent"
    assert "## T" not in report.written(again, {}, order[:2]), (
        "the section of a deleted benchmark is removed"
    )


def test_versions_that_most_sections_share_are_printed_once():
    line = "*2026-11-2{}, a CPU, load 0.1. Python 3.11, {}.{}*\n"
    both, old = "jstep 1, jax 2", "jstep 1, jax 1"
    sections = {
        "a": line.format(1, both, " One round."),
        "b": line.format(2, old, ""),
        "c": line.format(3, both, ""),
    }
    page = report.written(
        page_with(""), {name: f"## S\n\n{text}" for name, text in sections.items()}, list("abcd")
    )
    assert [one for one in page.splitlines() if one.startswith("*")] == [
        "*2026-11-21, a CPU, load 0.1. One round.*",
        f"*2026-11-22, a CPU, load 0.1. Python 3.11, {old}.*",
        "*2026-11-23, a CPU, load 0.1.*",
    ]
    assert (
        page.count(f"do not list others: Python 3.11, {both}.\n")
        == page.count("do not list others")
        == 0
    )
    assert page.count(f"does not list others: Python 3.11, {both}.\n") == 1
    assert report.written(page, {}, list("abcd")) == page
    again = report.written(
        page, {name: f"## S\n\n{line.format(4, old, '')}" for name in "cd"}, list("abcd")
    )
    assert f"*2026-11-21, a CPU, load 0.1. Python 3.11, {both}. One round.*" in again, (
        "it keeps its own"
    )
    assert f"others: Python 3.11, {old}.\n" in again


@pytest.mark.parametrize(
    "page", ["# B\n", f"{report.END}\n{report.BEGIN}\n", page_with(report.BEGIN)]
)
def test_a_page_without_markers_raises(page):
    with pytest.raises(ValueError, match="must have the line"):
        report.written(page, {"step": "## S\n"}, ["step"])


def test_benchmarks_are_run_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "HERE", tmp_path)
    prints = "import os, sys\nprint('Title')\nprint('  a / b: 0.5  (bound 0.4) OVER')\n"
    (tmp_path / "bench_over.py").write_text(f'"""Over."""\n{prints}sys.exit(1)\n')
    quick = (
        "print('  q / b: %s  (bound 3.0)' % (1.0 if "
        "os.environ.get('JSTEP_QUICK_BENCHMARKS') else 2.0))"
    )
    (tmp_path / "bench_quick.py").write_text(f'"""Quick."""\n{prints}{quick}\n')
    (tmp_path / "bench_raises.py").write_text(f'"""Raises."""\n{prints}import nosuchmodule\n')
    (tmp_path / "bench_slow.py").write_text(
        '"""Slow."""\nimport time\nprint("Title", flush=True)\ntime.sleep(300)\n'
    )
    page = tmp_path / "page.md"
    page.write_text(page_with(""))
    assert (
        report.main(
            [
                "--quick",
                "--page",
                str(page),
                *["--only", "over", "--only", "quick", "--only", "raises"],
            ]
        )
        == 1
    )
    assert report.main(["--page", str(page), "--only", "slow", "--limit", "3"]) == 1
    text = page.read_text()
    sections = dict(
        zip(["over", "quick", "raises", "slow"], text.split("<!-- benchmark: ")[1:], strict=True)
    )
    assert "| Title | a | b | **0.50** | 0.4 |" in sections["over"]
    assert "Not complete" not in sections["over"]
    assert "|  | q | b | 1.00 | 3 |" in sections["quick"]
    assert "A quick run" in sections["quick"]
    assert "Not complete: ModuleNotFoundError: No module named 'nosuchmodule'" in sections["raises"]
    assert "| Title | a | b |" in sections["raises"]
    assert "Not complete: it took longer than 3 s" in sections["slow"]
    assert "A quick run" not in sections["slow"]
    assert "raises: ModuleNotFoundError" in capsys.readouterr().out
    assert report.main(["--page", str(page), "--only", "over"]) == 0


def test_benchmarks_without_their_environment_are_skipped_by_default(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "HERE", tmp_path)
    monkeypatch.setattr(report, "ENVIRONMENTS", {"peers": tmp_path / "environment"})
    (tmp_path / "bench_peers.py").write_text(
        '"""Peers."""\nprint("Title")\nprint("  a / b: 0.5  (bound 1.0) ok")\n'
    )
    page = tmp_path / "page.md"
    page.write_text(page_with("<!-- benchmark: peers -->\n## Peers, measured before"))
    assert report.main(["--page", str(page)]) == 0
    assert "peers: skipped" in capsys.readouterr().out
    assert "## Peers, measured before" in page.read_text()
    assert report.main(["--page", str(page), "--only", "peers"]) == 0
    assert "| Title | a | b | 0.50 | 1 |" in page.read_text()
    page.write_text(page_with(""))
    (tmp_path / "environment").mkdir()
    assert report.main(["--page", str(page)]) == 0
    assert "| Title | a | b | 0.50 | 1 |" in page.read_text()


def test_the_page_has_its_markers_and_known_sections():
    page = report.PAGE.read_text(encoding="utf-8")
    names = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    assert set(names) > report.NOT_SHOWN
    shown = [name for name in names if name not in report.NOT_SHOWN]
    assert report.written(page, {}, shown) == page, (
        "the page was edited, or a benchmark was deleted: run report.py"
    )


PAGE = """\
<!-- benchmark: loop -->
| measured | program | compared with | ratio | bound | why above it |
|---|---|---|---:|---:|---|
| 5 steps: a step | train, small | a loop | **1.25** | 1.2 | it is small |
| 5 steps: a step | train, small | a loop, donated | 1.30 |  |  |
| 5 steps: a step | train, large | a loop | 0.90 | 1 |  |
| Two features: a step | train, small | a loop | 0.10 |  |  |

<!-- benchmark: whole_runs -->
| task | toolkit | a step, ms | whole, s | lines | test loss | difference | after a SIGKILL | steps repeated |
|---|---|---:|---:|---:|---:|---:|---|---:|
| digits | jstep, auto | 13.44 | 21.4 | 67 | 0.0225 | 0e+00 | the same | 25 |
| mlp | jstep, auto | 0.44 | 7.4 | 57 | 0.0225 | 0e+00 | the same | 25 |
| digits | Keras (keras 3, jax 0.10) | 15.44 | 22.4 | 60 | 0.0225 | 1e-06 | different: 0.0451 | 25 |
| mlp | Keras (keras 3, jax 0.10) | 0.55 | 8.4 | 50 | 0.0225 | 1e-06 | the same | 25 |

| to the first step, s | toolkit | import | data | init | compile | the rest | all | restarted: compile | all |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|
| digits | jstep, auto | 1.0 | 0.1 | 1.2 | 3.0 | 0.4 | 5.7 | 0.5 | 3.0 |
<!-- end of benchmarks -->
| 5 steps: a step | train, small | a loop | 9.00 |  |  |
"""  # noqa: E501


def test_a_row_of_the_overview_is_the_range_over_its_cases_with_the_quickest_peer(monkeypatch):
    row = overview.Row(
        "a step", "a loop", "loop", r"\d steps: .*", "train, .*", "a loop.*", excuse="why"
    )
    assert overview.ratios_of(row, PAGE) == [0.9, 1.3]
    assert overview.ratios_of(
        row,
        PAGE.replace("| 5 steps: a step | train, small | a loop, ", "|  | train, small | a loop, "),
    ) == [0.9, 1.3]
    assert overview.ratios_of(row._replace(peers="a loop"), PAGE) == [0.9, 1.25]
    assert overview.ratios_of(row._replace(benchmark="feed"), PAGE) == []
    absent = row._replace(benchmark="feed", in_readme=True)
    one = row._replace(words="one", ours="train, large", in_readme=True)
    monkeypatch.setattr(overview, "ROWS", (row, absent, one))
    assert overview.page_table(PAGE).splitlines()[2:] == [
        "| a step | a loop | 0.90 to 1.30 | jstep in 1, the other in 1 of 2 | why |",
        "| one | a loop | 0.90 | jstep | why |",
    ]
    assert overview.readme_table(PAGE).splitlines()[2:] == ["| one | a loop | 0.90 |"]


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([0.5, 0.9], "jstep"),
        ([0.98, 1.02], "level"),
        ([1.1], "the other"),
        ([0.9, 1.0, 1.01], "jstep in 1, level in 2 of 3"),
    ],
)
def test_who_is_quicker(ratios, verdict):
    assert overview.verdict(ratios) == verdict


def test_the_page_that_compares_tools_has_the_runs_of_each():
    assert overview.tool_table(PAGE).splitlines()[2:] == [
        "| jstep, auto | 67, 57 | 21.4, 7.4 | the same |",
        "| Keras | 60, 50 | 22.4, 8.4 | different, the same |",
    ]


@pytest.mark.parametrize("name", overview.TABLES)
def test_tables_of_figures_are_those_of_the_page_of_benchmarks(name):
    page = report.PAGE.read_text(encoding="utf-8")
    text = (overview.ROOT / name).read_text(encoding="utf-8")
    assert overview.with_table(text, overview.TABLES[name](page), name) == text, (
        "run benchmarks/overview.py"
    )
    with pytest.raises(ValueError, match="must have the line"):
        overview.with_table(text.replace(overview.END, ""), "", name)


def test_the_readme_has_at_most_six_rows_and_one_where_the_peer_is_quicker():
    rows = [row for row in overview.ROWS if row.in_readme]
    assert len(rows) <= 7
    assert len(overview.ROWS) <= 14
    *_, last = rows
    assert last.excuse
    for row in rows:
        assert "feature" not in row.words


def test_reasons_are_of_pairs_that_benchmarks_can_print():
    for name, reasons in report.REASONS.items():
        assert (HERE / f"bench_{name}.py").exists()
        assert all(reasons.values())
