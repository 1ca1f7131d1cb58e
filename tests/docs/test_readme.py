"""What the README shows, runs."""

import pathlib
import re

import jax

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()


def test_the_code_of_the_readme_runs_in_order(capsys, tmp_path, monkeypatch):
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 2
    monkeypatch.chdir(tmp_path)
    # A README is read with JAX's own settings, not with those of our tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(compile(block, "README.md", "exec"), names)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("TrainState(global_step=500, params: 4 numbers in 2 leaves (16 B)")
    assert shown[1].endswith("model-500")


def test_it_is_read_in_one_sitting():
    assert len(README.splitlines()) <= 200


def test_the_two_commands_are_lines_that_make_their_own_environment():
    commands = [
        re.search(rf"<!-- {name} command -->\n```bash\n(.*)\n```", README).group(1) for name in ("example", "test")
    ]
    for command in commands:
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
