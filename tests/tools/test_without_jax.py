"""Commands that only read files do not import JAX, whose import takes longer than the commands."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import jstep
from jstep.tools.cli import COMMANDS, Command, main

REPORT = """
import atexit, sys
atexit.register(lambda: print("JAX" if {"jax", "jaxlib", "tensorstore", "orbax"} & sys.modules.keys() else "no JAX"))
import runpy
sys.argv = ["jstep", *sys.argv[1:]]
runpy.run_module("jstep", run_name="__main__")
"""


def run_command(*arguments: str) -> tuple[int, list[str]]:
    completed = subprocess.run(
        [sys.executable, "-c", REPORT, *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    return completed.returncode, [*completed.stdout.splitlines(), *completed.stderr.splitlines()]


def in_folder(folder, arguments):
    """Return the arguments with the paths of the fixture below `folder`."""
    paths = {"run", "log"}
    return [str(folder / word) if word.split("/")[0] in paths else word for word in arguments]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
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


@pytest.mark.thorough(except_for=["inspect run-", "cost --help-"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("inspect", "run"), "model-3"),
        (("inspect", "run", "--verify"), "as written"),
        (("goodput", "run"), "3 steps in"),
        (("events", "log"), "loss = "),
        (("events", "log", "--name", "loss"), "loss"),
        (("runs", "run"), "finished"),
        (("report", "run", "-o", "log/page.html"), "page.html: "),
        (("--help",), "goodput"),
        (("--version",), f"jstep {jstep.__version__}"),
        *(((name, "--help"), f"jstep {name}") for name in COMMANDS),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_commands_do_not_import_jax(run, arguments, expected):
    code, lines = run_command(*in_folder(run, arguments))
    assert code == 0, lines
    assert any(expected in line for line in lines), lines
    assert "no JAX" in lines


@pytest.mark.thorough
def test_reading_arrays_imports_jax(run):
    """This shows that the tests above can fail."""
    assert "JAX" in run_command("inspect", str(run / "run" / "model-3"))[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module_and_help(name, capsys):
    module, _, command = COMMANDS[name][1].partition(":")
    assert isinstance(getattr(importlib.import_module(f"jstep.tools.{module}"), command), Command)
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert COMMANDS[name][0][1:] in " ".join(capsys.readouterr().out.split())


def test_lazy_exports_agree_with_the_static_imports():
    module = jstep.summary
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    names = {a.name: n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert set(module.__all__) <= names.keys()
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is getattr(importlib.import_module(names[name]), name)
    with pytest.raises(AttributeError, match=r"'jstep\.summary' has no attribute 'adamm'"):
        module.adamm
