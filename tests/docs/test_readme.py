"""The program and the commands of the README."""

import pathlib
import re

import jax
import pytest

import jstep

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.thorough(except_for=["20"])
@pytest.mark.parametrize("last_step", [20, 200])
def test_the_program_learns(tmp_path, monkeypatch, last_step):
    names: dict[str, object] = {}
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(program.splitlines()) <= 25
    assert program.count("last_step=200") == 1
    program = program.replace("last_step=200", f"last_step={last_step}")
    monkeypatch.chdir(tmp_path)
    # The program runs with JAX's default settings, not those of the tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(program, "README.md", "exec"), names)
        first, last = (
            names["loss_fn"](params, names["data"][0]) for params in (names["params"], names["state"].params)
        )
    assert jstep.global_step(names["state"]) == last_step
    assert jstep.latest_checkpoint("runs/gpt").endswith(f"model-{last_step}")
    assert last < (0.5 if last_step == 200 else 0.9) * first


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 200


def test_both_commands_create_an_environment():
    commands = [
        re.search(rf"<!-- {name} command -->\n```bash\n(.*)\n```", README).group(1) for name in ("example", "test")
    ]
    for command in commands:
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")


def test_measured_ratios_are_those_of_the_page_of_benchmarks():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    summary, written = page.split("<!-- benchmarks: written by")
    on_page = set(re.findall(r"\| \**([\d.]+)\** \|", written))
    measured = README.split("## Measured")[1].split("\n\n")[2]
    assert summary.split("\n\n")[2] == measured, "the page begins with the same table"
    ratios = re.findall(r"\| ([\d.]+) \|$", measured, re.MULTILINE)
    assert len(ratios) > 5
    assert set(ratios) <= on_page
