"""The program and the commands of the README."""

import inspect
import pathlib
import re
import textwrap

import jax
import jax.numpy as jnp
import pytest
from source_files import MODULES, ROOT, text_of

import jstep

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()


PROGRAM, LOOP = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.thorough(except_for=["100"])
@pytest.mark.parametrize(("last_step", "loss"), [(100, 2.25), (10_000, 0.2)], ids=["100", "10000"])
def test_the_program_learns(last_step, loss, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    assert PROGRAM.count("last_step=10_000") == 1
    program = PROGRAM.replace("last_step=10_000", f"last_step={last_step}")
    monkeypatch.chdir(tmp_path)
    # The program runs with JAX's default settings, not those of the tests.
    for _ in range(1 if last_step == 100 else 2):  # the second start restores the last step
        names = {}
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            exec(compile(program, "README.md", "exec"), names)
            assert names["evaluate"](names["state"])["loss"] < loss
        assert jstep.global_step(names["state"]) == last_step
    assert jstep.latest_checkpoint("runs/images").endswith(f"model-{last_step}")


def test_the_loop_prunes_and_learns(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    definitions, _ = PROGRAM.split("state = jstep.train(")
    loop = LOOP
    for old, new in {"10_000": "40", "1000": "20", "5000": "20"}.items():
        assert loop.count(old) == 1
        loop = loop.replace(old, new)
    monkeypatch.chdir(tmp_path)
    names = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(definitions + loop, "README.md", "exec"), names)
        run = names["run"]
        assert names["evaluate"](run.state)["loss"] < 2.3
    assert run.step == jstep.global_step(run.state) == 40
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["20", "40"]
    assert (names["pruned"]["w"] == 0).any()
    assert jstep.latest_checkpoint("runs/loop").endswith("model-40")


def test_the_program_is_read_in_half_a_minute():
    lines = PROGRAM.splitlines()
    assert len(lines) <= 16
    assert max(map(len, lines)) <= 100


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 200


def test_both_commands_create_an_environment():
    commands = [
        re.search(rf"<!-- {name} command -->\n```bash\n(.*)\n```", README).group(1) for name in ("example", "test")
    ]
    for command in commands:
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")


# CONTRIBUTING.md: the hook that it shows works as it says, and the files that it names exist.

TEXT = text_of(ROOT / "CONTRIBUTING.md")
(HOOK,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
OPTIMIZER = jstep.gradient_descent(0.1)


def test_the_hook_stops_a_run_when_the_file_appears(tmp_path):
    names = {}
    exec(textwrap.dedent(HOOK), names)
    hook = names["StopAtFileHook"](tmp_path / "stop", every_n_steps=2)

    def batch(step):
        if step == 3:
            (tmp_path / "stop").write_text("")
        return jnp.ones(())

    def run():
        state = jstep.TrainState.create({"w": jnp.ones(())}, OPTIMIZER)
        step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, OPTIMIZER)
        return jstep.global_step(jstep.train(step, state, batch, 10, hooks=[hook], checkpoint_dir=tmp_path / "run"))

    assert [run(), run()] == [4, 6]  # a restart runs steps until it is due again


def test_the_files_that_it_names_exist():
    named = set(re.findall(r"`((?:jstep|tests|docs)/[\w/.]+\.(?:py|pyi|md|sh))`", TEXT))
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists()]


# Names and terms that a reader would stumble over: signatures name types, and errors say what must be.


def test_signatures_of_optimizers_and_schedules_name_their_types():
    """The files begin with `from __future__ import annotations`, so that `help()` does not expand the type aliases."""
    functions = [getattr(jstep, name) for name in jstep.__all__ if inspect.isfunction(getattr(jstep, name))]
    files = {function: inspect.getsourcefile(inspect.unwrap(function)) or "" for function in functions}
    taken = [one for one, file in files.items() if {"optimizers", "schedules"} & set(pathlib.Path(file).parts)]
    assert jstep.adamw in taken
    assert not [one.__name__ for one in taken if "numpy.number" in str(inspect.signature(one))]


def test_errors_say_what_a_value_must_be():
    """One word for it, not `expected`."""
    wrong = re.compile(r""": expected [a-z\['{0-9]""")
    assert not [f"{path.name}: {found.group()}" for path in MODULES.values() for found in wrong.finditer(text_of(path))]


# The page on choosing an optimizer: its bytes per parameter match the slots, and its names exist in jstep.

TEXT_OF_OPTIMIZERS = (pathlib.Path(__file__).parents[2] / "docs" / "help" / "choosing-an-optimizer.md").read_text(
    encoding="utf-8"
)
BYTES = re.findall(r"^\| `(\w+\(.*?\))` \| ([\d.]+) \|", TEXT_OF_OPTIMIZERS, re.MULTILINE)


@pytest.mark.parametrize(("call", "quoted"), BYTES, ids=[call for call, _ in BYTES])
def test_bytes_per_parameter(call, quoted):
    optimizer = eval(f"jstep.{call}", {"jstep": jstep, "jnp": jnp})
    state = jax.eval_shape(lambda: jstep.TrainState.create({"w": jnp.zeros((1024, 1024))}, optimizer))
    actual = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.slots)) / 1024**2
    # Scalar counters add a few bytes per million parameters; the page has two digits.
    assert actual == pytest.approx(float(quoted), abs=0.005)


def test_all_rows_are_parsed():
    assert len(BYTES) == len(re.findall(r"^\| `", TEXT_OF_OPTIMIZERS, re.MULTILINE)) > 0


def test_every_name_exists_in_jstep():
    named = re.findall(r"`(\w+)(?:\([^`]*\))?`", TEXT_OF_OPTIMIZERS.replace("```", ""))
    arguments = {"mask", "var_list", "weight_decay_mask"}
    assert {name for name in named if not hasattr(jstep, name)} <= arguments
