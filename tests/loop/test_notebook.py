"""A run in a notebook: one output that updates in place, an interrupt; a fake kernel and a real
one."""

import logging
import re
import sys
import types

import jax.numpy as jnp
import pytest

import jstep
from jstep.watching.notebook import NotebookBar

optimizer = jstep.gradient_descent(0.01)


def loss_fn(params, x):
    return (params["w"] - x) ** 2, {"ratio": jstep.metrics.mean_of(3.0, 2.0)}


train_step = jstep.minimize(loss_fn, optimizer, has_aux=True)


class Handle:
    def __init__(self):
        self.shown = []

    def update(self, shown):
        self.shown.append(shown._repr_html_())


@pytest.fixture
def kernel(monkeypatch):
    """A kernel that shows nothing; returns the handles of its outputs."""
    handles = []

    def display(shown, display_id):
        handles.append(Handle())
        handles[-1].update(shown)
        return handles[-1]

    shell = types.SimpleNamespace(kernel=object())
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    module = types.ModuleType("IPython.display")
    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return handles


def train(last_step, *hooks, **options):
    state = jstep.TrainState.create({"w": 1.0}, optimizer)
    return jstep.train(
        train_step, state, lambda step: jnp.float32(0), last_step, hooks=hooks, **options
    )


def evaluation():
    return jstep.EvaluationHook(lambda state: {"w": float(state.params["w"])}, every_n_steps=100)


def test_the_output_has_the_bar_the_evaluations_and_the_curves(kernel, capfd):
    train(300, evaluation(), jstep.History())
    (handle,) = kernel
    last = handle.shown[-1]
    assert "step 300 of 300" in last
    assert 'value="300" max="300"' in last
    assert re.search(r"loss \d.* ratio 1.5", last)
    assert last.count("<tr") == 4
    assert "<svg" in last
    assert capfd.readouterr().err == ""


def test_a_history_shows_nothing_by_itself(kernel):
    train(300, jstep.History(), progress=False)
    assert kernel == []


def test_log_lines_go_to_handlers_of_the_users_own_and_warnings_are_lines(kernel, capfd):
    handler = logging.Handler()
    lines = []
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("jstep")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        train(200)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert [line for line in lines if line.startswith("step 100  loss")]
    state = jstep.TrainState.create({"w": 1.0}, optimizer)
    capfd.readouterr()
    jstep.train(train_step, state, [jnp.float32(0)] * 3, 5)
    assert "The batches ended after step 3" in capfd.readouterr().err


def test_a_run_that_takes_no_step_says_so(kernel, tmp_path, capfd):
    train(10, checkpoint_dir=tmp_path)
    train(10, checkpoint_dir=tmp_path)
    last = kernel[1].shown[-1]
    assert "step 10 of 10" in last
    assert "<div>restored model-10</div>" in last
    assert "the run is already at step 10; there is nothing left to run" in last
    assert "compiling" not in last
    train(5, checkpoint_dir=tmp_path)
    assert "the run is already at step 10; there is nothing" in kernel[2].shown[-1]


def test_what_has_changed_is_below_the_bar(kernel, tmp_path):
    for rate in (0.1, 0.5):
        changed = jstep.gradient_descent(rate)
        step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, changed)
        state = jstep.TrainState.create({"w": 1.0}, changed)
        jstep.train(
            step,
            state,
            lambda step: jnp.float32(0),
            10,
            checkpoint_dir=tmp_path,
            config={"rate": rate},
        )
    assert "<div>  config: rate: 0.1 before, 0.5 now</div>" in kernel[1].shown[-1]


def test_names_are_escaped(kernel):
    below = types.SimpleNamespace(html=lambda is_last: "", least_secs=0.0)
    bar = NotebookBar(details=below, clock=lambda: 0.0, total=None, initial=3, postfix="<script>")
    assert "&lt;script&gt;" in bar._repr_html_()
    assert repr(bar) == "step 3  <script>"


HEAD = """
import jax.numpy as jnp, jstep, logging
optimizer = jstep.gradient_descent(0.01)
def loss_fn(params, x):
    return (params["w"] - x) ** 2
train_step = jstep.minimize(loss_fn, optimizer)
state = jstep.TrainState.create({"w": 1.0}, optimizer)
batch = lambda step: jnp.float32(0)
"""


@pytest.mark.thorough
def test_a_real_kernel(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    stop = "jstep.every(1, lambda step, state, metrics: 1 / (50 - step))"
    cells = [
        HEAD,
        # This ends with an error at step 50.
        f"state = jstep.train(train_step, state, batch, 100, hooks=[{stop}])",
        "state = jstep.train(train_step, state, batch, 100)",  # the state was donated
        "state = jstep.train(train_step, jstep.interrupted_state(), batch, 100); "
        "print(int(state.global_step))",
        "state = jstep.train(train_step, state, batch, 20_000, hooks=[history := jstep.History()])",
        "history",
        "train_step",
        "from IPython.display import display\nprint(len(dir(jstep.summary)))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook,
        timeout=200,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    found = [cell.outputs for cell in notebook.cells]
    assert "in jstep.interrupted_state()" in found[1][-1]["traceback"][-1] + str(found[1][-1])
    assert "state = jstep.interrupted_state()" in str(found[2])
    assert found[3][-1]["text"] == "100\n"
    kinds = [one["output_type"] for one in found[4]]
    assert kinds.count("display_data") == 1
    assert sum(len(one.get("text", "")) for one in found[4]) < 400
    assert "<svg" in found[5][0]["data"]["text/html"]
    assert "loss_fn, gradient_descent(learning_rate=0.01)" in found[6][0]["data"]["text/plain"]
