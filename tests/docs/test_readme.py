"""The programs and the commands of the README."""

import inspect
import logging
import pathlib
import re
import textwrap

import jax
import jax.numpy as jnp
import pytest
from pages import blocks_of, shows
from source_files import MODULES, ROOT, text_of

import jstep

README = text_of(ROOT / "README.md")
PROGRAM, LOOP, WHOLE_RUNS = blocks_of(ROOT / "README.md")


@pytest.fixture
def run(tmp_path, monkeypatch, caplog):
    """A function that runs a program as a reader does, and returns its names; a WARNING is an error."""

    def run(program):
        names = {}
        # Programs run with JAX's default settings, not those of the tests.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            exec(compile(program, "README.md", "exec"), names)
        assert not [line for line in caplog.records if line.levelno >= logging.WARNING]
        return names

    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, logger="jstep")
    return run


@pytest.mark.thorough(except_for=["100"])
@pytest.mark.parametrize(("last_step", "loss"), [(100, 140.0), (20_000, 0.01)], ids=["100", "20000"])
def test_the_program_learns_and_resumes(last_step, loss, run, caplog):
    assert PROGRAM.code.count("last_step=50_000") == 1
    program = PROGRAM.code.replace("last_step=50_000", f"last_step={last_step}")
    for _ in range(1 if last_step == 100 else 2):  # the second start restores the last step
        names = run(program)
        params = names["state"].params
        assert names["loss_fn"](params, names["x"], names["x"] @ jnp.arange(8.0)) < loss
        assert jstep.global_step(names["state"]) == last_step
    assert jstep.latest_checkpoint("runs/line").endswith(f"model-{last_step}")
    if last_step > 100:
        lines = [record.getMessage() for record in caplog.records]
        for shown in re.findall(r"^(?:step|restored) [\w-]+(?:  loss .*)?$", README, re.MULTILINE):
            # The last digits of a small loss depend on how XLA compiles, which the tests do otherwise than a reader.
            shown = re.sub(r"loss \S+", "loss …", shown.replace("14321", "20000"))
            assert any(shows(shown, line, whole=True) for line in lines), shown


def test_the_loop_prunes_and_learns(run, capsys):
    definitions, _ = PROGRAM.code.split("state = jstep.train(")
    loop = LOOP.code
    for old, new in {"10_000": "40", "1000": "20", "5000": "20"}.items():
        assert loop.count(old) == 1
        loop = loop.replace(old, new)
    names = run(definitions + loop)
    step = names["run"].step
    assert step == jstep.global_step(names["run"].state) == 40
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["20", "40"]
    assert (names["pruned"]["w"] == 0).any()
    assert jstep.latest_checkpoint("runs/loop").endswith("model-40")


def test_whole_runs_in_one_program_print_what_is_shown(run, capsys):
    definitions, _ = PROGRAM.code.split("optimizer =")
    names = run(definitions + WHOLE_RUNS.code)
    assert shows(WHOLE_RUNS.shown, capsys.readouterr().out, whole=True)
    assert jax.tree.leaves(names["states"].slots["m"])[0].shape == (3, 8)


def test_the_programs_are_read_in_half_a_minute():
    for program in (PROGRAM, LOOP, WHOLE_RUNS):
        assert len(program.code.splitlines()) <= 16
        assert max(map(len, program.code.splitlines())) <= 100


def test_one_sentence_says_what_jstep_is():
    """The same in all places that say it first."""
    summary = "functional training toolkit"
    for place in ("README.md", "docs/index.md", "pyproject.toml", "CITATION.cff", "mkdocs.yml", "jstep/__init__.py"):
        text = " ".join(text_of(ROOT / place).split())
        assert summary in text[:1500], place
        if place not in ("pyproject.toml", "mkdocs.yml"):
            assert re.search(r"pytree,? `?\(params, slots, global_step\)", text), place


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
