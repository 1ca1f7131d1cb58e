"""The public names: they exist, with the expected signatures and docstrings."""

import ast
import importlib
import inspect
import operator
import pathlib
import pickle
import pydoc
import re
import shutil
import subprocess
import sys
import tomllib
import traceback
import typing

import pytest
from processes import python
from source_files import PACKAGE, ROOT, text_of, tree_of

import jstep
import jstep.distributed
import jstep.metrics
import jstep.summary
from jstep.core import public_names

PACKAGES = {path.name for path in PACKAGE.iterdir() if path.is_dir()}

# The public names.


def test_all_is_complete_and_unique() -> None:
    assert all(hasattr(jstep, name) for name in jstep.__all__)
    assert len(set(jstep.__all__)) == len(jstep.__all__)
    public = {name for name in vars(jstep) if not name.startswith("_") and name not in PACKAGES}
    assert public <= set(jstep.__all__), (
        f"reachable but not in __all__: {sorted(public - set(jstep.__all__))}"
    )
    assert dir(jstep) == sorted(jstep.__all__)


def test_each_name_is_in_the_module_of_the_list() -> None:
    """The stub is written from the list by dev/stub.py."""
    nodes = [
        node for node in tree_of(PACKAGE / "__init__.pyi").body if isinstance(node, ast.ImportFrom)
    ]
    stub = {
        alias.name: node.module
        for node in nodes
        for alias in node.names
        if alias.asname == alias.name
    }
    assert stub == jstep._EXPORTS, "run .venv/bin/python dev/stub.py"
    for name, module in jstep._EXPORTS.items():
        assert hasattr(importlib.import_module(module), name)


def test_the_package_needs_no_stub(tmp_path: pathlib.Path) -> None:
    """Slimmed images and PyInstaller leave out files that Python does not load."""
    shutil.copytree(
        PACKAGE, tmp_path / "jstep", ignore=shutil.ignore_patterns("*.pyi", "__pycache__")
    )
    code = (
        "import jstep; print(jstep.__file__, len(jstep.__all__), jstep.checkpoint_name('model', 3))"
    )
    file, count, name = python("-OO", "-c", code, cwd=tmp_path).split()
    assert (pathlib.Path(file).parent.parent, int(count), name) == (
        tmp_path,
        len(jstep.__all__),
        "model-3",
    )


@pytest.mark.thorough
def test_namespaces_are_attributes() -> None:
    code = (
        "import jstep; print(jstep.metrics.__name__, jstep.summary.__name__, "
        "jstep.distributed.__name__)"
    )
    assert python("-c", code).split() == ["jstep.metrics", "jstep.summary", "jstep.distributed"]


@pytest.mark.thorough
def test_tracebacks_show_public_names() -> None:
    """Also of classes that the program itself never names."""
    code = "import jstep; queue = jstep.FIFOQueue(1); queue.close(); queue.dequeue()"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, timeout=300, capture_output=True, text=True
    )
    assert done.stderr.splitlines()[-1].startswith("jstep.OutOfRangeError: FIFOQueue is closed")


@pytest.mark.thorough
def test_public_names_can_be_pickled() -> None:
    """By the name that users type, whether or not it was loaded before."""
    code = (
        "import pickle, jstep; from jstep.optimizers.adam import adam; "
        "from jstep.queues.queues import CancelledError\n"
        "values = [adam, CancelledError, jstep.adam, jstep.TrainState, jstep.CancelledError]\n"
        "assert pickle.loads(pickle.dumps(values)) == values\n"
        "print(*(value.__module__ for value in values))"
    )
    assert python("-c", code).split() == ["jstep"] * 3 + ["jstep.state.train_state", "jstep"]


def test_the_package_docstring_lists_every_name() -> None:
    assert set(jstep.__all__) <= set(re.findall(r"\w+", jstep.__doc__ or ""))


@pytest.mark.thorough
def test_names_can_be_loaded_under_a_trace() -> None:
    """Importing creates no arrays: under a trace they would be tracers and leak."""
    code = (
        "import jax, jstep\n"
        "with jax.checking_leaks():\n"
        "    jax.jit(lambda x: (x, [getattr(jstep, name) for name in jstep.__all__])[0])(1.0)\n"
        "assert jstep.summary.merge_all() is None"
    )
    python("-c", code)


CONTRACT = """
    TrainState create_global_step get_global_step get_or_create_global_step global_step
    increment_global_step get_slot_names get_slot Optimizer gradient_descent momentum adagrad adam
    rmsprop ftrl IndexedSlices chain scope clip_gradients partition gradients stop_gradient
    compute_gradients apply_gradients minimize scan_steps GATE_NONE GATE_OP GATE_GRAPH
    AggregationMethod constant exponential_decay natural_exp_decay inverse_time_decay
    polynomial_decay piecewise_constant cosine_decay cosine_decay_restarts linear_cosine_decay
    linear_warmup join shift clip_by_value clip_by_norm clip_by_average_norm clip_by_global_norm
    global_norm ExponentialMovingAverage with_moving_average with_projection averaged_params
""".split()  # noqa: SIM905


def test_contract_names_exist() -> None:
    assert not set(CONTRACT) - set(jstep.__all__)


SIGNATURES = (
    pathlib.Path(__file__)
    .with_name("contract_signatures.txt")
    .read_text(encoding="utf-8")
    .splitlines()
)


def bare_signature(name: str) -> str:
    """Return the signature of a public function, without annotations."""
    signature = inspect.signature(operator.attrgetter(name)(jstep))
    return str(
        inspect.Signature([p.replace(annotation=p.empty) for p in signature.parameters.values()])
    )


def test_signatures_match_the_contract() -> None:
    names = [line.split("(")[0] for line in SIGNATURES]
    assert [name + bare_signature(name) for name in names] == SIGNATURES


def test_an_old_name_works_with_a_warning_that_shows_the_new_one(monkeypatch):
    monkeypatch.setitem(public_names.MOVED, "adam_with_decay", "adamw")
    with pytest.warns(
        DeprecationWarning,
        match=r"jstep\.adam_with_decay is called jstep\.adamw now",
    ) as warned:
        assert jstep.adam_with_decay is jstep.adamw
    assert warned[0].filename == __file__
    assert "adam_with_decay" not in dir(jstep)


@pytest.mark.parametrize(
    ("form", "new", "call"),
    [
        ("KeepBest(keep=)", "max_to_keep", lambda: jstep.KeepBest("best", "loss", keep=2)),
        ("adam(lr=)", "learning_rate", lambda: jstep.adam(lr=0.5)),
        (
            "Saver.save(extras=)",
            "extra",
            lambda: jstep.Saver("run").save({"global_step": 3}, extras=1),
        ),
    ],
)
def test_an_old_argument_works_with_a_warning_that_shows_the_new_one(
    form, new, call, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(public_names.MOVED, form, new)
    with pytest.warns(DeprecationWarning, match=rf"{new}=…\) now") as warned:
        call()
    assert [(one.filename, len(warned)) for one in warned] == [(__file__, 1)]


def test_an_argument_by_both_names_is_an_error(monkeypatch):
    monkeypatch.setitem(public_names.MOVED, "adam(lr=)", "learning_rate")
    with pytest.raises(TypeError, match="lr"):
        jstep.adam(lr=0.5, learning_rate=0.5)


@pytest.mark.parametrize(
    ("old", "new"),
    [pair for pair in public_names.MOVED.items() if "." in pair[0] and "(" not in pair[0]],
)
def test_an_old_attribute_works_with_a_warning_that_shows_the_new_one(old, new):
    made = {
        "EarlyStopping": jstep.EarlyStopping("loss"),
        "ReduceOnPlateau": jstep.ReduceOnPlateau("loss", "rate"),
    }
    cls, _, attribute = old.partition(".")
    with pytest.warns(DeprecationWarning, match=f"{old} is called {new} now") as warned:
        assert getattr(made[cls], attribute) == getattr(made[cls], new)
    assert warned[0].filename == __file__


TENSORFLOWS = """
    momentum rmsprop exponential_decay natural_exp_decay inverse_time_decay polynomial_decay
    ExponentialMovingAverage start_queue_runners Coordinator.join QueueRunner.create_threads
    FIFOQueue.close RandomShuffleQueue.close summary.write_graph Optimizer
""".split()  # noqa: SIM905


def test_bools_are_keyword_only_but_in_tensorflows_signatures() -> None:
    callables: dict[str, typing.Any] = {}
    for space, prefix in ((jstep, ""), (jstep.metrics, "metrics."), (jstep.summary, "summary.")):
        for name in space.__all__:
            value = getattr(space, name)
            if isinstance(value, type):
                methods = inspect.getmembers_static(value, inspect.isfunction)
                callables |= {
                    f"{prefix}{name}.{method}": fn for method, fn in methods if method[0] != "_"
                }
                callables[prefix + name] = value.__init__
            elif callable(value):
                callables[prefix + name] = value
    positional = set()
    for name, value in callables.items():
        parameters = list(inspect.signature(value).parameters.values())
        if any(
            p.kind is p.POSITIONAL_OR_KEYWORD and isinstance(p.default, bool) for p in parameters
        ):
            positional.add(name)
    assert positional <= set(TENSORFLOWS)


RESULTS = (
    "Cost Plan Goodput RunSummary Report NonFinite NonFiniteUpdate "
    "ResumeReport MupFactors CoordCheck"
)


@pytest.mark.parametrize("name", RESULTS.split())
def test_results_are_made_by_name(name):
    with pytest.raises(TypeError, match="positional argument"):
        getattr(jstep, name)(0, 0)


FUNCTIONS = [name for name in jstep.__all__ if inspect.isfunction(getattr(jstep, name))]
CLASSES = [name for name in jstep.__all__ if inspect.isclass(getattr(jstep, name))]


def test_public_names_have_docstrings() -> None:
    docs = {name: getattr(jstep, name).__doc__ for name in FUNCTIONS + CLASSES}
    assert not [name for name, doc in docs.items() if not doc]
    assert not [name for name, doc in docs.items() if doc.startswith(f"{name}(")], (
        "generated docstrings of dataclasses"
    )


def test_public_functions_have_a_runnable_example() -> None:
    without = [name for name in FUNCTIONS if ">>> " not in getattr(jstep, name).__doc__]
    assert not without, "add an Example with >>> to each docstring"


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["version"]
    assert jstep.__version__ == version
    released = re.search(r"^## \[(\d[^\]]*)\]", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert released is not None
    assert f"version: {released[1]}\n" in text_of(ROOT / "CITATION.cff")
    # What is not released is no release: a checkpoint's "written by" has to tell one from the
    # other.
    assert version == released[1] or (".dev" in version and version > released[1])


def test_type_hints_of_public_classes_can_be_evaluated() -> None:
    for name in ("Batches", "Mixture", "Saver", "TrainState", "EvaluationHook", "Slot"):
        typing.get_type_hints(getattr(jstep, name))


def test_states_of_hooks_are_stored_by_public_names() -> None:
    from jstep.hooks.hook_states import get_states

    assert (
        get_states([jstep.EarlyStopping("loss", patience=1)])["states"][0]["class"]
        == "jstep.EarlyStopping"
    )


def test_the_source_of_each_public_class_and_function_is_found():
    """`??` of a notebook and "go to definition" use it; errors show the public name."""
    for namespace in (jstep, jstep.metrics, jstep.summary, jstep.distributed):
        for name in namespace.__all__:
            value = getattr(namespace, name)
            if isinstance(value, type):
                assert type(value.__module__) is str
                assert all(
                    pickle.loads(pickle.dumps(value, protocol)) is value for protocol in range(6)
                )
            if isinstance(value, type) and issubclass(value, BaseException):
                assert value.__module__ == namespace.__name__
            elif isinstance(value, type):
                assert f"class {value.__name__}" in inspect.getsource(value)
                assert inspect.getmodule(value).__dict__[name] is value
            elif callable(value):
                assert inspect.getsource(value)
    assert traceback.format_exception_only(jstep.CheckpointError("x")) == [
        "jstep.CheckpointError: x\n"
    ]
    with pytest.raises(OSError, match=r"could not find class definition|source code not available"):
        inspect.getsource(jstep.CheckpointError)
    for gate in (jstep.GATE_NONE, jstep.GATE_OP, jstep.GATE_GRAPH):
        assert "`GATE_OP`: each gradient is" in pydoc.render_doc(gate)
