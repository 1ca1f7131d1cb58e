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
    """A function that runs a program as a reader does, and returns its names; a WARNING is an
    error."""

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


LAST_STEP = int(re.search(r"last_step=([\d_]+)", PROGRAM.code)[1])
(TRANSCRIPT,) = re.findall(r"```text\n(\$ python line\.py\n.*?)```", README, re.DOTALL)
SHOWN_STEPS = re.findall(r"^step (\d+)  loss (\S+)  learning_rate (\S+) ", TRANSCRIPT, re.MULTILINE)


def shortened(last_step):
    """The first program with fewer steps, but with its own learning rates."""
    program = PROGRAM.code
    for old, new in {
        f"last_step={LAST_STEP:_}": f"last_step={last_step}",
        "log_steps=50_000": "log_steps=5000",
    }.items():
        assert program.count(old) == 1
        program = program.replace(old, new)
    return program


@pytest.mark.thorough(except_for=["100"])
@pytest.mark.parametrize(
    ("last_step", "loss"), [(100, 140.0), (20_000, 0.01)], ids=["100", "20000"]
)
def test_the_program_learns_and_resumes(last_step, loss, run, caplog):
    for _ in range(1 if last_step == 100 else 2):  # the second start restores the last step
        names = run(shortened(last_step))
        params = names["state"].params
        assert names["loss_fn"](params, names["x"], names["x"] @ jnp.arange(8.0)) < loss
        assert jstep.global_step(names["state"]) == last_step
    assert jstep.latest_checkpoint("runs/line").endswith(f"model-{last_step}")
    rates = [
        names["optimizer"].hyperparameters(int(step) - 1)["learning_rate"]
        for step, _, _ in SHOWN_STEPS
    ]
    assert [f"{rate:.4g}" for rate in rates] == [shown for _, _, shown in SHOWN_STEPS]
    if last_step > 100:
        # A loss depends on how XLA compiles, which the tests do otherwise than a reader, and the
        # other numbers on the machine.
        shown = {re.sub(r"\d[\d.e-]*", "…", line) for line in TRANSCRIPT.splitlines()} - {
            "$ python line.py",
            "Killed",
        }
        logged = [record.getMessage() for record in caplog.records]
        assert not [
            line
            for line in shown
            if not any(shows(line, message, whole=True) for message in logged)
        ]


def test_a_step_that_is_shown_twice_has_the_same_numbers():
    assert len(set(SHOWN_STEPS)) == len({step for step, _, _ in SHOWN_STEPS}) < len(SHOWN_STEPS)


def test_the_program_is_not_over_before_it_is_killed():
    """Neither on a machine that is twice as quick as the quickest on which we tried it, at 6,400
    steps per second."""
    assert "Fifteen seconds after the line `first step`" in README
    assert LAST_STEP / (2 * 6400) > 2 * 15


def test_the_site_opens_with_the_same_run():
    """Its first screen has the program and the picture of a run that was killed, before any
    table."""
    page = text_of(ROOT / "docs" / "index.md")
    first = blocks_of(ROOT / "docs" / "index.md")[0]
    assert first.line < 10
    assert first.code == PROGRAM.code
    assert TRANSCRIPT in page
    picture = page.index("](pictures/one_clock.png)")
    assert (
        page.index("```python")
        < picture
        < min(page.index("```text"), page.index("\n|"), page.index("\n## "))
    )


def test_the_row_about_a_mesh_trains_on_it(run):
    (row,) = re.findall(r"^\| one GPU, a TPU pod.*$", README, re.MULTILINE)
    placed, option = re.search(
        r"`state = (jstep\.shard_state\(.*?\))`, and `train\(…, (.*?)\)`", row
    ).groups()
    program = shortened(10).replace(
        "jstep.train(\n    step, state, data,", f"jstep.train(\n    step, {placed}, data, {option},"
    )
    state = run(program)["state"]
    assert len(state.params["w"].sharding.device_set) == 8


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
    for place in (
        "README.md",
        "docs/index.md",
        "pyproject.toml",
        "CITATION.cff",
        "mkdocs.yml",
        "jstep/__init__.py",
    ):
        text = " ".join(text_of(ROOT / place).split())
        assert summary in text[:1500], place
        if place not in ("pyproject.toml", "mkdocs.yml"):
            assert re.search(r"pytree,? `?\(params, slots, global_step\)", text), place


def test_both_commands_create_an_environment():
    commands = [
        re.search(rf"<!-- {name} command -->\n```bash\n(.*)\n```", README).group(1)
        for name in ("example", "test")
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
        return jstep.global_step(
            jstep.train(step, state, batch, 10, hooks=[hook], checkpoint_dir=tmp_path / "run")
        )

    assert [run(), run()] == [4, 6]  # a restart runs steps until it is due again


def test_the_files_that_it_names_exist():
    named = set(re.findall(r"`((?:jstep|tests|docs)/[\w/.]+\.(?:py|pyi|md|sh))`", TEXT))
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists()]


# Names and terms that a reader would stumble over: signatures name types, and errors say what must
# be.


def test_signatures_of_optimizers_and_schedules_name_their_types():
    """The files begin with `from __future__ import annotations`, so that `help()` does not expand
    the type aliases."""
    functions = [
        getattr(jstep, name) for name in jstep.__all__ if inspect.isfunction(getattr(jstep, name))
    ]
    files = {
        function: inspect.getsourcefile(inspect.unwrap(function)) or "" for function in functions
    }
    taken = [
        one
        for one, file in files.items()
        if {"optimizers", "schedules"} & set(pathlib.Path(file).parts)
    ]
    assert jstep.adamw in taken
    assert not [one.__name__ for one in taken if "numpy.number" in str(inspect.signature(one))]


def test_errors_say_what_a_value_must_be():
    """One word for it, not `expected`."""
    wrong = re.compile(r""": expected [a-z\['{0-9]""")
    assert not [
        f"{path.name}: {found.group()}"
        for path in MODULES.values()
        for found in wrong.finditer(text_of(path))
    ]


# The page on choosing an optimizer: its bytes per parameter match the slots, and its names exist in
# jstep.

TEXT_OF_OPTIMIZERS = (
    pathlib.Path(__file__).parents[2] / "docs" / "help" / "choosing-an-optimizer.md"
).read_text(encoding="utf-8")
BYTES = re.findall(r"^\| `(\w+\(.*?\))` \| ([\d.]+) \|", TEXT_OF_OPTIMIZERS, re.MULTILINE)


@pytest.mark.parametrize(("call", "quoted"), BYTES, ids=[call for call, _ in BYTES])
def test_bytes_per_parameter(call, quoted):
    optimizer = eval(f"jstep.{call}", {"jstep": jstep, "jnp": jnp})
    state = jax.eval_shape(
        lambda: jstep.TrainState.create({"w": jnp.zeros((1024, 1024))}, optimizer)
    )
    actual = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.slots)) / 1024**2
    # Scalar counters add a few bytes per million parameters; the page has two digits.
    assert actual == pytest.approx(float(quoted), abs=0.005)


def test_all_rows_are_parsed():
    assert len(BYTES) == len(re.findall(r"^\| `", TEXT_OF_OPTIMIZERS, re.MULTILINE)) > 0


def test_every_name_exists_in_jstep():
    named = re.findall(r"`(\w+)(?:\([^`]*\))?`", TEXT_OF_OPTIMIZERS.replace("```", ""))
    arguments = {"mask", "var_list", "weight_decay_mask"}
    assert {name for name in named if not hasattr(jstep, name)} <= arguments
