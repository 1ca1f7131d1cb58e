"""`cost` of a file or a module, as a table or JSON; errors are printed to stderr, with exit code
2."""

import json
import sys
import textwrap

import pytest

PROGRAM = """
    import dataclasses
    import jax, jax.numpy as jnp, jstep
    from helper_of_{name} import SIDE

    @dataclasses.dataclass
    class Config:
        side: int = SIDE

    def make():
        optimizer = jstep.adam(1e-3)
        train_step = jstep.minimize(lambda params, x: jnp.mean((x @ params["w"]) ** 2), optimizer)
        state = jax.eval_shape(lambda: jstep.TrainState.create({{"w": jnp.zeros((Config().side, 32))}}, optimizer))
        return train_step, state, jax.ShapeDtypeStruct((8, SIDE), jnp.float32)

    def wrong():
        return 3

    constant = 5
"""  # noqa: E501


@pytest.fixture
def program(tmp_path, monkeypatch):
    name = "program_to_cost"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(PROGRAM.format(name=name)))
    (tmp_path / f"helper_of_{name}.py").write_text("SIDE = 64\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    for module in (name, f"helper_of_{name}", "failing"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path / f"{name}.py"


def test_a_file_and_a_module(program, cli):
    table = cli("cost", f"{program}:make").out
    assert table.startswith("a step on one device")
    assert "parameters      8 KiB" in table
    out = cli("cost", f"{program.stem}:make", "--json").out
    assert out.count("\n") == 1
    cost = json.loads(out)
    assert cost["params_bytes"] == 4 * 64 * 32
    assert cost["fits"] is None


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{file}", "must be PROGRAM:FUNCTION"),
        ("{file}:", "must be PROGRAM:FUNCTION"),
        ("{file}:nothing", "has no function 'nothing'"),
        ("{file}:constant", "has no function 'constant'"),
        ("{file}:wrong", "must return (train_step, state, *batch), returned an int"),
        ("missing.py:make", "no file missing.py"),
        ("no_such_module_anywhere:make", "No module named"),
    ],
)
def test_errors(program, cli, target, message):
    captured = cli("cost", target.format(file=program), code=2)
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("line", ["raise KeyError('of the user')", "of the user"])
def test_an_exception_of_the_program_is_shown_with_its_traceback(program, cli, line):
    """Exit code 1, Python's own, would mean that `diff` found a difference."""
    program.with_name("failing.py").write_text(f"def make():\n    {line}\n")
    error = cli("cost", "failing.py:make", code=2).err
    assert 'failing.py", line 2' in error
    assert "of the user" in error


@pytest.mark.parametrize("name", ["train.v2.py", "json.py"])
def test_a_file_that_cannot_be_imported_by_its_name(program, cli, name):
    program.rename(program.with_name(name))
    assert f"{name}: must not have a dot in its name" in cli("cost", f"{name}:make", code=2).err


def test_a_bad_topology_fails_before_the_program_runs(tmp_path, cli):
    (tmp_path / "never.py").write_text("raise SystemExit('it ran')\n")
    assert (
        "--topology='v5e:32x32'"
        in cli("cost", f"{tmp_path}/never.py:make", "--topology", "v5e:32x32", code=2).err
    )


@pytest.mark.parametrize(("name", "extra"), [("v5e:2x2", "tpu"), ("h100:8", "aot-cuda")])
def test_a_missing_compiler_fails_before_the_program_runs(tmp_path, cli, monkeypatch, name, extra):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    for module in ("libtpu", "jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "never.py").write_text("raise SystemExit('it ran')\n")
    error = cli("cost", f"{tmp_path}/never.py:make", "--topology", name, code=2).err
    assert f"{name}: " in error
    assert f"pip install 'jstep[{extra}]'" in error
