"""The command line: the list of commands, tables that fit the terminal, and what `inspect` hides."""

import tomllib

import jax.numpy as jnp
import pytest
from positioned import Positioned
from source_files import ROOT, text_of

import jstep
from jstep.core.tables import columns
from jstep.tools.cli import COMMANDS, main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with long paths, awkward numbers and states of hooks."""
    directory = tmp_path_factory.mktemp("cli") / "run"
    optimizer = jstep.adam(jstep.held("learning_rate", 0.1))
    kernel = jnp.linspace(-1.23456e-7, 123.456, 512).reshape(4, 128)
    params = {"decoder": {"layers": {"0": {"attention": {"query_projection": {"kernel": kernel}}}}}, "b": jnp.ones(2)}
    state = jstep.TrainState.create(params, optimizer)
    step = jstep.minimize(lambda params, x: (params["b"] * x).sum(), optimizer)
    # The position of a loader, states of hooks, and the hook that stopped the run.
    hooks = [jstep.EvaluationHook(lambda state: {"loss": 1.0}, every_n_steps=2), jstep.StopAtStepHook(last_step=4)]
    jstep.train(
        step, state, Positioned(lambda n: jnp.ones(2)), 9, checkpoint_dir=directory, hooks=hooks, progress=False
    )
    return directory


def test_without_a_command_the_commands_are_shown(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/jstep"])
    monkeypatch.setenv("COLUMNS", "80")
    assert main() == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m jstep ")
    for name, (words, _) in COMMANDS.items():
        assert any(line.split(maxsplit=1) == [name, words] for line in out.splitlines()), name
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) <= 28
    for words in ("Exit codes: 0 on success; 1 if", "or `stalls` a process"):
        assert words in out
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == out


def test_the_path_has_the_same_command() -> None:
    assert tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["scripts"] == {"jstep": "jstep.tools.cli:main"}


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 300, None])
def test_tables_fit_the_terminal(run, monkeypatch, cli, width) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    for arguments in (["inspect", f"{run}/model-4"], ["inspect", str(run), "--verify"], ["goodput", str(run)]):
        out = cli(*arguments).out
        assert max(map(len, out.splitlines())) <= (width or 80), out
    text = "".join(cli("inspect", f"{run}/model-4").out.split())  # folded, and not cut off
    assert "slots/m/decoder/layers/0/attention/query_projection/kernel" in text
    assert "123.456" in text
    assert "[4,128]" in text


def test_columns_fold_and_lose_nothing() -> None:
    rows = [["leaf", "n", "text"], ["a/long/path/of/a/leaf", "12", "of some words"], ["b", "3", ""]]
    assert columns(rows, 1) == columns(rows, 1, 40)
    assert columns(rows, 1, 39) == ["a/long/path/of/a/leaf  n 12  text of", "  some words", "b  n 3  text"]
    assert columns(rows, 1, 18) == ["a/long/path/of/a/l", "  eaf  n 12  text", "  of some words", "b  n 3  text"]
