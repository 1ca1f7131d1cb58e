"""The program and the commands of the README."""

import pathlib
import re

import jax
import pytest

import jstep

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()


(PROGRAM,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.thorough(except_for=["100"])
@pytest.mark.parametrize(("last_step", "loss"), [(100, 2.25), (10_000, 0.2)], ids=["100", "10000"])
def test_the_program_learns(last_step, loss, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    assert PROGRAM.count("last_step=10_000") == 1
    program = PROGRAM.replace("last_step=10_000", f"last_step={last_step}")
    monkeypatch.chdir(tmp_path)
    # The program runs with JAX's default settings, not those of the tests.
    for _ in range(2):  # the second start restores the last step
        names: dict[str, object] = {}
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            exec(compile(program, "README.md", "exec"), names)
            assert names["evaluate"](names["state"])["loss"] < loss
        assert jstep.global_step(names["state"]) == last_step
    assert jstep.latest_checkpoint("runs/images").endswith(f"model-{last_step}")


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
