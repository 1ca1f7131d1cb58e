"""The command line: the list of commands, tables that fit the terminal, and what `inspect`
hides."""

import ast
import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import jax.numpy as jnp
import pytest
from positioned import Positioned
from processes import python
from source_files import ROOT, text_of

import jstep
from jstep.core.tables import columns
from jstep.look.arrays import is_inexact
from jstep.look.cli import COMMANDS, Command, main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with long paths, awkward numbers and states of hooks."""
    directory = tmp_path_factory.mktemp("cli") / "run"
    optimizer = jstep.adam(jstep.held("learning_rate", 0.1))
    kernel = jnp.linspace(-1.23456e-7, 123.456, 512).reshape(4, 128)
    params = {
        "decoder": {"layers": {"0": {"attention": {"query_projection": {"kernel": kernel}}}}},
        "b": jnp.ones(2),
    }
    state = jstep.TrainState.create(params, optimizer)
    step = jstep.minimize(lambda params, x: (params["b"] * x).sum(), optimizer)
    # The position of a loader, states of hooks, and the hook that stopped the run.
    hooks = [
        jstep.EvaluationHook(lambda state: {"loss": 1.0}, every_n_steps=2),
        jstep.StopAtStepHook(last_step=4),
    ]
    jstep.train(
        step,
        state,
        Positioned(lambda n: jnp.ones(2)),
        9,
        checkpoint_dir=directory,
        hooks=hooks,
        progress=False,
    )
    return directory


def test_without_a_command_the_commands_are_shown(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/usr/bin/jstep"])
    monkeypatch.setenv("COLUMNS", "80")
    assert main() == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: jstep ")
    for name, (words, _) in COMMANDS.items():
        assert any(line.split(maxsplit=1) == [name, words] for line in out.splitlines()), name
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) <= 28
    for words in ("Exit codes: 0 on success; 1 if", "`stalls` a process", "or `runs` a run"):
        assert words in out
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == out


def test_the_path_has_the_same_command():
    assert tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["scripts"] == {
        "jstep": "jstep.look.cli:main"
    }


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 300, None])
def test_tables_fit_the_terminal(run, monkeypatch, cli, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    for arguments in (
        ["inspect", f"{run}/model-4"],
        ["inspect", str(run), "--verify"],
        ["goodput", str(run)],
    ):
        out = cli(*arguments).out
        assert max(map(len, out.splitlines())) <= (width or 80), out
    text = "".join(cli("inspect", f"{run}/model-4").out.split())  # folded, and not cut off
    assert "slots/m/decoder/layers/0/attention/query_projection/kernel" in text
    assert "123.456" in text
    assert "[4,128]" in text


def test_columns_fold_and_lose_nothing():
    rows = [["leaf", "n", "text"], ["a/long/path/of/a/leaf", "12", "of some words"], ["b", "3", ""]]
    assert columns(rows, 1) == columns(rows, 1, 40)
    assert columns(rows, 1, 39) == [
        "a/long/path/of/a/leaf  n 12  text of",
        "  some words",
        "b  n 3  text",
    ]
    assert columns(rows, 1, 18) == [
        "a/long/path/of/a/l",
        "  eaf  n 12  text",
        "  of some words",
        "b  n 3  text",
    ]


# Commands that only read files do not import JAX, whose import takes longer than the commands.

RUN = """
import runpy, sys
for line in sys.argv[1:]:
    sys.argv, code = ["jstep", *line.split()], 0
    try:
        runpy.run_module("jstep", run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    has_jax = bool({"jax", "jaxlib", "tensorstore", "orbax"} & sys.modules.keys())
    print(f"\\n{code or 0} {has_jax}", end="\\0")
"""


def run_commands(folder, *lines):
    """Run commands in one process; return of each what it printed, its exit code, and whether JAX
    is loaded."""
    parts = python("-c", RUN, *lines, cwd=folder).split("\0")
    assert len(parts) == len(lines) + 1
    return [part.rpartition("\n")[::2] for part in parts[:-1]]


@pytest.fixture(scope="module")
def run_without_jax(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    optimizer = jstep.gradient_descent(0.25)
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
    jstep.train(
        train_step,
        state,
        [jnp.ones(())] * 3,
        3,
        checkpoint_dir=folder / "run",
        logdir=folder / "log",
        save_summaries_steps=1,
        progress=False,
    )
    return folder


def test_commands_do_not_import_jax(run_without_jax):
    """Those that read arrays do."""
    expected = {
        "--help": "goodput",
        **{f"{name} --help": f"jstep {name}" for name in COMMANDS},
        "--version": f"jstep {jstep.__version__}",
        "inspect run": "model-3",
        "goodput run": "3 steps in",
        "events log": "loss",
        "events log --name loss": "loss",
        "runs run": "finished",
        "report run -o log/page.html": "page.html: ",
        "inspect run --verify": "as written",
        "inspect run/model-3": "step 3",
    }
    found = run_commands(run_without_jax, *expected)
    for (out, end), (line, words) in zip(found, expected.items(), strict=True):
        assert words in out, line
        assert end == f"0 {line in ('inspect run/model-3', 'inspect run --verify')}", line


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module_and_help(name, capsys):
    module, _, command = COMMANDS[name][1].partition(":")
    assert isinstance(getattr(importlib.import_module(f"jstep.{module}"), command), Command)
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert COMMANDS[name][0][1:] in " ".join(capsys.readouterr().out.split())


def test_lazy_exports_agree_with_the_static_imports():
    module = jstep.summary
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    names = {
        a.name: n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names
    }
    assert set(module.__all__) <= names.keys()
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is getattr(importlib.import_module(names[name]), name)
    with pytest.raises(AttributeError, match=r"'jstep\.summary' has no attribute 'adamm'"):
        module.adamm


# Without JAX, floating-point dtypes are recognized as by JAX, including those of ml_dtypes.

NAMES = (
    "bool_ int2 int4 int8 int64 uint4 uint64 float16 float32 float64 bfloat16 complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e8m0fnu float4_e2m1fn"
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES.split())
def test_inexact_dtypes_are_those_of_jax(name):
    dtype = jnp.dtype(getattr(jnp, name))
    assert is_inexact(dtype) == jnp.issubdtype(dtype, jnp.inexact)


def test_no_module_is_taken_from_the_current_directory(tmp_path):
    """`cd RUNS; python -m jstep runs .`, where somebody else has put modules."""
    for name in ("numpy", "jax", "tensorstore", "argparse"):
        (tmp_path / f"{name}.py").write_text("open('was-run', 'w')\nraise ImportError\n")
    (tmp_path / "starts").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "jstep", "runs", "."]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert not (tmp_path / "was-run").exists()
    assert "no run is there" in done.stderr
