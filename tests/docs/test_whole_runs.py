"""`tests/benchmarks/bench_whole_runs.py`: how it counts lines, and what it finds after a SIGKILL."""

import dataclasses
import re
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parents[1] / "benchmarks"
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def bench():
    before = list(sys.path)
    sys.path.insert(0, str(HERE))
    try:
        import bench_whole_runs
    finally:
        sys.path[:] = before
    return bench_whole_runs


PROGRAM = '''"""What it does.

On two lines.
"""

import numpy as np  # one
from whole_run_marks import Marks

x = [
    1,
]
text = """two

lines"""
marks = Marks(x)


def f():
    """A docstring."""
    # A comment.
    return x
'''
NETWORKS = """import jax
import numpy as np
from flax import linen as nn

def init_digits(): return init_layer()
def init_layer(): return jax, normal()
def normal(): return np
def digits(): return dense()
def dense(): return jax
class Mlp(nn.Module):
    width = 3
NETWORKS = {"digits": (init_digits, digits), "mlp": Mlp}
"""


def test_lines_of_code_are_counted(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "HERE", tmp_path)
    (tmp_path / "run_jstep.py").write_text(PROGRAM)
    (tmp_path / "networks_jax.py").write_text(NETWORKS)
    own = 1 + 3 + 3 + 2
    assert bench.lines_of("jstep", "digits") == own + 7, "five functions, and two of the imports"
    assert bench.lines_of("jstep", "mlp") == own + 3, "a class of two lines, and its import"


@pytest.mark.parametrize("toolkit", ["jstep", "flax", "keras", "lightning", "hf"])
def test_each_toolkit_has_each_network(bench, toolkit):
    small, large = (bench.lines_of(toolkit, task) for task in ("mlp", "digits"))
    assert 30 < small < large < 100


def test_tasks_are_written_and_read(bench, tmp_path):
    tasks = bench.whole_run_tasks
    for name, whole in tasks.TASKS.items():
        task = tasks.write(name, tmp_path / "task.npz", share=0.1)
        assert dataclasses.replace(task, steps=whole.steps) == whole
        read = tasks.read(tmp_path / "task.npz")
        for x, y in (read.train, read.valid, read.test):
            assert len(x) == len(y)
        assert len(read.valid[0]) % task.eval_size == len(read.test[0]) % task.eval_size == 0
        for one in (whole, task):
            assert one.steps % (2 * one.every) == 0, "half of the steps ends with a checkpoint"
            assert one.steps // 2 < one.killed < one.steps
            assert one.killed % one.every == one.every // 2
            assert one.patience > one.steps // one.every
    x, y = tasks._characters()[0]
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])


def outcome(bench, loss, steps):
    return bench.Outcome(9.0, steps, 7, loss)


@pytest.mark.parametrize(
    ("losses", "resumed", "shown"),
    [
        (["0.25", "0.25"], "0.25", "the same"),
        (["0.25", "0.25"], "0.2500001", "another, 0.2500"),
        (["0.25", "0.5"], "0.25", "another in each run, 0.2500"),
    ],
)
def test_a_row_tells_what_a_kill_changes(bench, losses, resumed, shown):
    task = bench.whole_run_tasks.TASKS["digits"]
    steps = {1: 2.0, 500: 4.0, task.killed: 5.0, 1000: 6.0}
    outcomes = [outcome(bench, loss, steps) for loss in losses]
    row = bench.row(task, "jstep", "jstep", outcomes, outcome(bench, resumed, {701: 2.0, 1000: 3.0}))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:5] == ["digits", "jstep", "2.0", "4.00", "9.0"]
    assert cells[7:] == [shown, "25"]


@pytest.mark.thorough
def test_a_killed_run_of_jstep_ends_with_the_same_loss(bench, tmp_path):
    task = bench.whole_run_tasks.write("mlp", tmp_path / "mlp.npz", share=0.1)
    whole = bench.run(sys.executable, "jstep", tmp_path / "mlp.npz", tmp_path / "whole")
    killed = bench.run(sys.executable, "jstep", tmp_path / "mlp.npz", tmp_path / "run", task.killed)
    assert killed.loss is None
    resumed = bench.run(sys.executable, "jstep", tmp_path / "mlp.npz", tmp_path / "run")
    assert (whole.first_step, resumed.first_step, resumed.loss) == (1, 201, whole.loss)
    assert whole.parameters == 4810


def test_a_program_that_fails_is_an_error_with_its_output(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "HERE", tmp_path)
    (tmp_path / "run_jstep.py").write_text("print('mark step 1 2.0', flush=True)\nraise SystemExit('no data')\n")
    with pytest.raises(RuntimeError, match="no data"):
        bench.run(sys.executable, "jstep", tmp_path / "mlp.npz", tmp_path / "run")
    with pytest.raises(RuntimeError, match="no data"):
        bench.run(sys.executable, "jstep", tmp_path / "mlp.npz", tmp_path / "run", killed=5)


def test_the_page_that_compares_tools_has_the_figures_of_the_benchmarks():
    measured = {}
    for row in re.findall(r"^\| (?:digits|transformer|mlp) \|.*", (DOCS / "benchmarks.md").read_text(), re.MULTILINE):
        toolkit, _, _, whole, lines, _, after, _ = (cell.strip() for cell in row.strip("|").split("|")[1:])
        measured.setdefault(toolkit.split(" (")[0], []).append((lines, whole, after.split(",")[0]))
    table = (DOCS / "from" / "which-tool.md").read_text().split("| lines |")[1].split("\n\n")[0]
    shown = {}
    for row in table.splitlines()[2:]:
        toolkit, lines, whole, after = (cell.strip() for cell in row.strip("|").split("|"))
        shown[toolkit] = list(zip(lines.split(", "), whole.split(", "), [after] * 3, strict=True))
    assert shown == measured
    assert len(shown) == 5
