"""The command `events`, and the scalars that it reads."""

import io
import os
import subprocess
import sys

import pytest
from scalar_points import read_scalars

from jstep import summary
from jstep.look.cli import main


def write(path, values, tag="loss", start=None):
    with summary.SummaryWriter(path) as writer:
        if start is not None:
            writer.add_session_log("START", start)
        for step, value in values.items():
            writer.add_summary(summary.scalar(tag, value, collections=()), step)
    return writer.path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "missing: no such file or directory"),
        ("empty", "no event files"),
        ("corrupted", "corrupted record at offset 0"),
    ],
)
def test_errors_are_printed_to_stderr(tmp_path, cli, path, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "corrupted").write_bytes(b"x" * 100)
    captured = cli("events", tmp_path / path, code=2)
    assert captured.err.startswith("jstep events: ")
    assert message in captured.err


@pytest.mark.parametrize("arguments", [["events"], ["other"], ["events", "x", "--from", "y"]])
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: jstep" in capsys.readouterr().err


def test_a_closed_pipe_is_not_an_error(tmp_path):
    path = write(tmp_path / "run", dict.fromkeys(range(5000), 1.0))
    program = [sys.executable, "-m", "jstep", "events", path]
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    with subprocess.Popen(
        program,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    ) as process:
        assert b"run" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter in the locale C
def test_characters_that_the_locale_lacks_are_escaped(tmp_path, monkeypatch, errors):
    path = write(tmp_path, {1: 1.0}, tag="precisión/日")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1", errors))
    monkeypatch.setattr(sys, "argv", ["jstep", "events", path])
    assert main() == 0
    assert "precisión/\\u65e5     1      1" in sys.stdout.buffer.getvalue().decode("latin-1")


def test_a_closed_stdout_is_not_an_error(tmp_path, monkeypatch):
    path = write(tmp_path, {1: 1.0})
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["events", path]) == 0


def test_a_resumed_session_supersedes_later_points(tmp_path):
    write(tmp_path, {10: 1.0, 20: 1.0, 30: 1.0}, start=1)
    write(tmp_path, {10: 5.0, 30: 5.0}, tag="other")
    write(tmp_path, {30: 2.0, 40: 2.0}, start=21)
    series = read_scalars(tmp_path)
    assert [(p.step, p.value) for p in series["loss"]] == [
        (10, 1.0),
        (20, 1.0),
        (30, 2.0),
        (40, 2.0),
    ]
    # Later points belong to the superseded session.
    assert [p.step for p in series["other"]] == [10]
    write(tmp_path, {25: 3.0})  # without a session log, decreasing steps mark a restart
    assert [p.step for p in read_scalars(tmp_path)["loss"]] == [10, 20, 25]


def test_an_exact_name_comes_before_a_pattern(tmp_path, cli):
    write(tmp_path / "run", {1: 1.0}, tag="val[top1]")
    write(tmp_path / "run", {1: 2.0}, tag="valt")
    for pattern, names in {
        "val[top1]": ["val[top1]"],
        "val[t]": ["valt"],
        "val*": ["val[top1]", "valt"],
    }.items():
        lines = cli("events", tmp_path / "run", "--name", pattern).out.splitlines()
        assert [line.split()[1] for line in lines[1:]] == names
    error = cli("events", tmp_path / "run", "--name", "val*", "--name", "lss", code=2).err
    assert (
        "--name lss: must be a scalar, or a pattern that matches some; there are val[top1]"
    ) in error


@pytest.mark.parametrize("text", ["hi\n", ""])
def test_a_file_without_events_is_an_error(tmp_path, cli, text):
    (tmp_path / "notes.txt").write_text(text)
    assert "notes.txt: no event files" in cli("events", tmp_path / "notes.txt", code=2).err
