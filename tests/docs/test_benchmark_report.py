"""`tests/benchmarks/report.py`: parsing the output of benchmarks and writing the page."""

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "benchmarks"
SPEC = importlib.util.spec_from_file_location("benchmark_report", HERE / "report.py")
report = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(report)

OUTPUT = """\
cpu, load 0.3

1000 leaves, Adam: a step
  jstep                                   10.00 µs  (best 9.00)
  Optax                                   20.00 µs  (best 19.00)
  jstep / Optax: 0.500  (bound 1.0) ok
  jstep / Optax, donated | raw: 1.250  (bound 1.2) OVER
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
    assert "| 1000 leaves, Adam: a step | jstep | Optax, donated \\| raw | **1.25** | 1.2 |" in lines
    assert "| Importing | import jstep, all it has | import jax | 0.016 |  |" in lines
    assert "| 1 / 2: 3 | 4 |" in lines
    assert lines[-1] == "*2026-11-21, a CPU*"
    assert not any("Not complete" in line for line in lines)
    failed = report.section(SOURCE, "", "No module named 'x<y>'", "2026-11-21").splitlines()
    assert "Not complete: No module named 'x&lt;y>'" in failed
    assert not any(line.startswith("|") for line in failed)


@pytest.mark.parametrize(
    ("about", "heading", "description"),
    [
        ("Large leaves.", "Large leaves", ""),
        ("Cost of `train`, compared with a loop.", "Cost of train", "Compared with a loop."),
        ("Batches: `batches[N]`, and NumPy. Shuffled.", "Batches", "`batches[N]`, and NumPy. Shuffled."),
        ("Digests of 64M floats, and of leaves.", "Digests of 64M floats, and of leaves", ""),
        ("Step time: jstep and Optax.", "Step time", "jstep and Optax."),
    ],
)
def test_the_description_does_not_repeat_the_heading(about, heading, description):
    lines = report.section(f'"""{about}"""', "", None, "2026-11-21").splitlines()
    assert lines == [f"## {heading}", "", *([description, ""] if description else []), "*2026-11-21*"]


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
    assert [line for line in again.splitlines() if line.startswith("##")] == ["## D", "## S again", "## T"]
    assert report.written(again, {}, order) == again, "writing is idempotent"
    assert "## T" not in report.written(again, {}, order[:2]), "the section of a deleted benchmark is removed"


@pytest.mark.parametrize("page", ["# B\n", f"{report.END}\n{report.BEGIN}\n", page_with(report.BEGIN)])
def test_a_page_without_markers_raises(page):
    with pytest.raises(ValueError, match="must have the line"):
        report.written(page, {"step": "## S\n"}, ["step"])


def test_benchmarks_are_run_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "HERE", tmp_path)
    prints = "import os, sys\nprint('Title')\nprint('  a / b: 0.5  (bound 0.4) OVER')\n"
    (tmp_path / "bench_over.py").write_text(f'"""Over."""\n{prints}sys.exit(1)\n')
    quick = "print('  q / b:', 1.0 if os.environ.get('JSTEP_QUICK_BENCHMARKS') else 2.0)"
    (tmp_path / "bench_quick.py").write_text(f'"""Quick."""\n{prints}{quick}\n')
    (tmp_path / "bench_raises.py").write_text(f'"""Raises."""\n{prints}import nosuchmodule\n')
    (tmp_path / "bench_slow.py").write_text('"""Slow."""\nimport time\nprint("Title", flush=True)\ntime.sleep(300)\n')
    page = tmp_path / "page.md"
    page.write_text(page_with(""))
    assert (
        report.main(["--quick", "--page", str(page), *["--only", "over", "--only", "quick", "--only", "raises"]]) == 1
    )
    assert report.main(["--page", str(page), "--only", "slow", "--limit", "3"]) == 1
    text = page.read_text()
    sections = dict(zip(["over", "quick", "raises", "slow"], text.split("<!-- benchmark: ")[1:], strict=True))
    assert "| Title | a | b | **0.50** | 0.4 |" in sections["over"]
    assert "Not complete" not in sections["over"]
    assert "| Title | q | b | 1.00 |  |" in sections["quick"]
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
    (tmp_path / "bench_peers.py").write_text('"""Peers."""\nprint("Title")\nprint("  a / b: 0.5")\n')
    page = tmp_path / "page.md"
    page.write_text(page_with("<!-- benchmark: peers -->\n## Peers, measured before"))
    assert report.main(["--page", str(page)]) == 0
    assert "peers: skipped" in capsys.readouterr().out
    assert "## Peers, measured before" in page.read_text()
    assert report.main(["--page", str(page), "--only", "peers"]) == 0
    assert "| Title | a | b | 0.50 |  |" in page.read_text()
    page.write_text(page_with(""))
    (tmp_path / "environment").mkdir()
    assert report.main(["--page", str(page)]) == 0
    assert "| Title | a | b | 0.50 |  |" in page.read_text()


def test_the_page_has_its_markers_and_known_sections():
    page = report.PAGE.read_text(encoding="utf-8")
    names = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    assert report.written(page, {}, names) == page, "the page was edited, or a benchmark was deleted: run report.py"
