"""`benchmarks/bench_whole_runs.py`: how it counts lines, and what it finds after a SIGKILL."""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jstep

HERE = Path(__file__).parents[1]


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
    own = 1 + 3 + 3 + 2  # nothing of a line with marks
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
        order = jstep.batches(np.arange(len(read.train[0])), task.batch_size, seed=0)
        np.testing.assert_array_equal(read.order, [order[step] for step in range(task.steps)])
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


STAGES = {"import": 0.5, "data": 0.75, "init": 1.0}


def outcome(bench, loss, steps, compile_seconds=0.5):
    return bench.Outcome(9.0, STAGES, compile_seconds, steps, 7, loss)


@pytest.mark.parametrize(
    ("losses", "resumed", "shown"),
    [
        (["0.25", "0.25"], "0.25", "the same"),
        (["0.25", "0.25"], "0.2500001", "different: 0.2500"),
        (["0.25", "0.5"], "0.25", "different in each run: 0.2500"),
    ],
)
def test_a_row_tells_what_a_kill_changes(bench, losses, resumed, shown):
    task = bench.whole_run_tasks.TASKS["digits"]
    steps = {1: 2.0, task.steps // 2: 4.0, task.killed: 5.0, task.steps: 6.0}
    outcomes = [outcome(bench, loss, steps) for loss in losses]
    again = outcome(bench, resumed, {281: 2.0, task.steps: 3.0}, 0.125)
    row = bench.row(task, "jstep", "jstep", outcomes, again, "0.125")
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:4] == ["digits", "jstep", "10.00", "9.0"]
    difference = max(abs(float(loss) - 0.125) for loss in losses)
    assert cells[6:] == [f"{difference:.0e}", shown, "20"]
    assert len(cells) == bench.HEADER.splitlines()[0].strip("|").count("|") + 1
    row = bench.stages_row(task, "jstep", outcomes, again)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["digits", "jstep", "0.5", "0.2", "0.2", "0.5", "0.5", "2.0", "0.1", "2.0"]
    assert len(cells) == bench.STAGES_HEADER.splitlines()[0].strip("|").count("|") + 1


def test_toolkits_must_train_the_same(bench):
    def done(**losses):
        return {name: [outcome(bench, loss, {1: 2.0})] for name, loss in losses.items()}

    bench.refuse_another_training("mlp", done(jstep="0.5", flax="0.50009", hf="0.509"))
    bench.refuse_another_training("mlp", done(flax="0.5", hf="0.7"))
    with pytest.raises(
        RuntimeError,
        match=r"the loss of flax differs from jstep.s by more than 0\.0001",
    ):
        bench.refuse_another_training("mlp", done(jstep="0.5", flax="0.5002"))
    with pytest.raises(RuntimeError, match="the loss of hf differs"):
        bench.refuse_another_training("mlp", done(jstep="0.5", hf="0.52"))
    other = done(jstep="0.5", flax="0.5")
    other["flax"][0].parameters = 8
    with pytest.raises(RuntimeError, match="numbers of parameters"):
        bench.refuse_another_training("mlp", other)


def test_ratios_are_to_the_quickest_on_each_library(bench, capsys):
    task = bench.whole_run_tasks.TASKS["mlp"]

    def one(whole, first=2.0):
        return bench.Outcome(
            whole, {}, 0.0, {1: first, 1000: first, 2000: first + 1 + whole / 10}, 7, "0.5"
        )

    done = {
        "jstep": [one(8.0)],
        "jstep_single": [one(9.0)],
        "flax": [one(10.0)],
        "keras": [one(5.0)],
        "hf": [one(4.0)],
    }
    assert not bench.report_task(task, done, {"jstep": one(1.0, 3.0), "flax": one(1.0, 4.0)})
    printed = capsys.readouterr().out
    assert "jstep / the quickest on JAX, Keras on JAX: 1.600  (bound 1.0) OVER" in printed
    assert "jstep / the quickest on PyTorch, Hugging Face Trainer: 2.000\n" in printed
    assert "jstep / the quickest on JAX, Flax + Optax + Orbax: 0.750" in printed
    assert "jstep / the quickest on JAX, Flax + Optax + Orbax: 0.950" in printed


@pytest.mark.thorough
def test_a_killed_run_of_jstep_ends_with_the_same_loss(bench, tmp_path):
    task = bench.whole_run_tasks.write("mlp", tmp_path / "mlp.npz", share=0.1)
    whole = bench.run(sys.executable, "jstep", tmp_path / "mlp.npz", tmp_path / "whole")
    killed = bench.run(sys.executable, "jstep", tmp_path / "mlp.npz", tmp_path / "run", task.killed)
    assert killed.loss is None
    resumed = bench.run(sys.executable, "jstep", tmp_path / "mlp.npz", tmp_path / "run")
    assert (whole.first_step, resumed.loss) == (1, whole.loss)
    assert resumed.first_step in (1, 201), "the save of step 200 may not have ended"
    assert whole.parameters == 4810


def test_a_program_that_fails_is_an_error_with_its_output(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "HERE", tmp_path)
    (tmp_path / "run_jstep.py").write_text(
        "print('mark step 1 2.0', flush=True)\nraise SystemExit('no data')\n"
    )
    with pytest.raises(RuntimeError, match="no data"):
        bench.run(sys.executable, "jstep", tmp_path / "mlp.npz", tmp_path / "run")
    with pytest.raises(RuntimeError, match="no data"):
        bench.run(sys.executable, "jstep", tmp_path / "mlp.npz", tmp_path / "run", killed=5)


@pytest.fixture
def programs(monkeypatch):
    """The modules of the programs can be imported."""
    monkeypatch.syspath_prepend(HERE / "whole_runs")


@pytest.mark.usefixtures("programs")
def test_initial_weights_are_the_parameters_of_the_networks(bench, tmp_path):
    from networks_jax import NETWORKS
    from whole_run_weights import tree_of

    for name, (init, _) in NETWORKS.items():
        bench.whole_run_tasks.write(name, tmp_path / "task.npz", share=0.1)
        weights = bench.whole_run_tasks.read(tmp_path / "task.npz").weights
        expected = jax.eval_shape(init, jax.random.key(0))
        shapes = jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), tree_of(weights)
        )
        assert shapes == expected


@pytest.mark.usefixtures("programs")
def test_flax_computes_the_same_with_the_same_weights(bench, tmp_path):
    from networks_flax import NETWORKS as MODULES
    from networks_jax import NETWORKS
    from whole_run_weights import for_flax, tree_of

    for name, (_, predict) in NETWORKS.items():
        bench.whole_run_tasks.write(name, tmp_path / "task.npz", share=0.1)
        task = bench.whole_run_tasks.read(tmp_path / "task.npz")
        x = task.valid[0][:2]
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            theirs = MODULES[name]().apply({"params": for_flax(task)}, x)
            ours = predict(jax.tree.map(jax.numpy.asarray, tree_of(task.weights)), x)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("programs")
def test_compilations_at_the_same_time_are_counted_once(bench, capsys):
    from whole_run_marks import Marks

    marks = Marks()
    marks._initialized = 10.0
    marks._compiled = [
        (11.0, 13.0),
        (8.0, 10.5),
        (12.0, 14.0),
        (15.0, 16.0),
        (15.25, 15.5),
        (1.0, 2.0),
    ]
    assert marks._seconds_compiling() == 0.5 + 3.0 + 1.0
    assert capsys.readouterr().out.startswith("mark import ")
