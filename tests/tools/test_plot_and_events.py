"""The commands `plot` and `events`, and the scalars that they read."""

import io
import os
import subprocess
import sys

import numpy as np
import pictures
import pytest

from jstep import summary
from jstep.stores.event_files import read_scalars
from jstep.tools.cli import main


def write(path, values, tag="loss", start=None):
    with summary.SummaryWriter(path) as writer:
        if start is not None:
            writer.add_session_log("START", start)
        for step, value in values.items():
            writer.add_summary(summary.scalar(tag, value, collections=()), step)
    return writer.path


@pytest.fixture
def logs(tmp_path):
    for run in ("a", "b"):
        write(tmp_path / "logs" / run, {step: 1.0 / step for step in range(1, 30)})
        write(tmp_path / "logs" / run, {step: float(step) for step in range(30)}, tag="accuracy/test")
    return str(tmp_path / "logs")


def svg(tmp_path, *arguments):
    out = tmp_path / "plot.svg"
    assert main(["plot", *arguments, "-o", str(out)]) == 0
    return out.read_text()


def test_plot_names_tags_runs_and_axes(logs, tmp_path):
    text = svg(tmp_path, logs)
    for word in ("loss", "accuracy/test", "global step", "<!-- a -->", "<!-- b -->"):
        assert word in text
    text = svg(tmp_path, logs, "--tags", "acc*", "-x", "time", "--smoothing", "0.9", "--log-y")
    assert "hours" in text
    assert "accuracy/test" in text
    assert "<!-- loss -->" not in text


BLUE, ORANGE = "#1f77b4", "#ff7f0e"


def test_plot_draws_each_run_and_tag(logs, tmp_path):
    text = svg(tmp_path, logs)
    for color in (BLUE, ORANGE):
        loss, accuracy = map(pictures.shares, pictures.lines(text, color))
        assert loss[0].tolist() == [0, 1]
        assert loss[-1].tolist() == [1, 0]
        np.testing.assert_allclose(accuracy[[0, -1]], [[0, 0], [1, 1]])
    alone = svg(tmp_path, f"{logs}/a", "--tags", "acc*")
    assert len(pictures.lines(alone, BLUE)) == 1
    assert pictures.lines(alone, ORANGE) == []


def test_plot_smooths_with_the_values_behind(tmp_path):
    write(tmp_path / "run", {1: 1.0, 2: 0.0, 3: 1.0})
    plain, smooth = pictures.lines(svg(tmp_path, str(tmp_path / "run"), "-s", "0.5"), BLUE)
    np.testing.assert_allclose(pictures.shares(plain), [[0, 1], [0.5, 0], [1, 1]], atol=1e-3)
    height = np.ptp(plain[:, 1])
    np.testing.assert_allclose((smooth[:, 1] - plain[1, 1]) / height, [1, 1 / 3, 5 / 7], atol=1e-3)


def test_plot_skips_values_that_are_not_finite(tmp_path):
    write(tmp_path / "run", {1: 1.0, 2: float("nan"), 3: float("inf"), 4: 2.0})
    _, smooth = pictures.lines(svg(tmp_path, str(tmp_path / "run"), "-s", "0.5"), BLUE)
    assert len(smooth) == 4
    assert np.ptp(smooth[:3, 1]) == 0 < np.ptp(smooth[2:, 1])
    write(tmp_path / "nan", {1: float("nan")})
    assert "loss" in pictures.words(svg(tmp_path, str(tmp_path / "nan")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plot", "{}/missing", "-o", "x.png"], "no such directory: "),
        (["plot", "{}/empty", "-o", "x.png"], "no event files (events.out.tfevents.*) in "),
        (["plot", "{}/text", "-o", "x.png"], "no scalars in "),
        (["plot", "{}/logs", "-o", "x.png", "-t", "los"], "no scalar's tag matches los; nearest: 'loss'"),
        (
            ["plot", "{}/logs", "-o", "x.png", "-s", "1"],
            "smoothing must be at least 0 and less than 1",
        ),
        (["plot", "{}/logs", "-o", "x.nothing"], "Format 'nothing' is not supported"),
        (["plot", "{}/logs", "-o", "{}/no/where.png"], "No such file or directory"),
        (["events", "{}/missing"], "missing: no such file or directory"),
        (["events", "{}/empty"], "no event files"),
        (["events", "{}/corrupted"], "corrupted record at offset 0"),
    ],
)
def test_errors_are_printed_to_stderr(logs, tmp_path, cli, arguments, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "corrupted").write_bytes(b"x" * 100)
    with summary.SummaryWriter(tmp_path / "text") as writer:
        writer.add_summary(summary.text("t", "x"))
    captured = cli(*(argument.format(tmp_path) for argument in arguments), code=2)
    assert captured.err.startswith(f"jstep {arguments[0]}: ")
    assert message in captured.err
    assert not os.path.exists("x.png")


WRONG = [["plot", "logs"], ["events"], ["other"], ["plot", "x", "-o", "y", "-x", "z"]]


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m jstep" in capsys.readouterr().err


@pytest.fixture
def everything(tmp_path):
    with summary.SummaryWriter(tmp_path / "all", graph=lambda: np.float32(1) + 1) as writer:
        writer.add_session_log("START", 1)
        writer.add_summary(summary.scalar(["loss", "bad"], [0.5, float("nan")]), 1)
        writer.add_summary(summary.histogram("weights", np.arange(4.0)), 2)
        writer.add_summary(summary.image("x", np.zeros((1, 2, 3, 3), np.uint8), max_images=1), 3)
        writer.add_summary(summary.text("notes", "two\nlines"), 4)
        writer.add_hparams({"rate": 0.1})
    return writer.path


def test_events_as_text(everything, cli):
    lines = cli("events", everything).out.splitlines()
    assert len(lines) == 8
    expected = [
        "step 0  file_version brain.Event:2",
        "step 0  graph_def nodes ",
        "step 1  session_log START",
        "step 1  loss = 0.5; bad = nan",
        "step 2  weights = histogram of 4 in [0, 3], mean 1.5",
        "step 3  x/image = image 2×3×3, ",
        "step 4  notes = text [] ['two\\nlines']",
        "step 0  _hparams_/session_start_info = hparams",
    ]
    for line, part in zip(lines, expected, strict=True):
        assert part in line


def test_a_closed_pipe_is_not_an_error(tmp_path):
    path = write(tmp_path / "run", dict.fromkeys(range(5000), 1.0))
    program = [sys.executable, "-m", "jstep", "events", path]
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
    ) as process:
        assert b"file_version" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter in the locale C
def test_characters_that_the_locale_lacks_are_escaped(tmp_path, monkeypatch, errors):
    path = write(tmp_path, {1: 1.0}, tag="precisión/日")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1", errors))
    monkeypatch.setattr(sys, "argv", ["jstep", "events", path])
    assert main() == 0
    assert "precisión/\\u65e5 = 1" in sys.stdout.buffer.getvalue().decode("latin-1")


def test_a_closed_stdout_is_not_an_error(tmp_path, monkeypatch):
    path = write(tmp_path, {1: 1.0})
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["events", path]) == 0


def test_a_resumed_session_supersedes_later_points(tmp_path):
    write(tmp_path, {10: 1.0, 20: 1.0, 30: 1.0}, start=1)
    write(tmp_path, {10: 5.0, 30: 5.0}, tag="other")
    write(tmp_path, {30: 2.0, 40: 2.0}, start=21)
    series = read_scalars(tmp_path)
    assert [(p.step, p.value) for p in series["loss"]] == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]
    assert [p.step for p in series["other"]] == [10]  # later points belong to the superseded session
    write(tmp_path, {25: 3.0})  # without a session log, decreasing steps mark a restart
    assert [p.step for p in read_scalars(tmp_path)["loss"]] == [10, 20, 25]


def test_an_exact_tag_comes_before_a_pattern(tmp_path, capsys):
    path = write(tmp_path / "run", {1: 1.0}, tag="val[top1]")
    write(tmp_path / "run", {1: 2.0}, tag="valt")
    for pattern, tags in {"val[top1]": ["val[top1]"], "val[t]": ["valt"], "val*": ["val[top1]", "valt"]}.items():
        assert main(["events", str(tmp_path / "run"), "--tags", pattern]) == 0
        assert [line.split()[3] for line in capsys.readouterr().out.splitlines()] == tags
    assert main(["plot", str(tmp_path / "run"), "--tags", "val[top1]", "-o", str(tmp_path / "plot.svg")]) == 0
    assert capsys.readouterr().out.endswith(": val[top1]\n")
    assert main(["events", path, "--tags", "val*", "--tags", "lss"]) == 2
    assert "--tags lss: must be a tag, or a pattern that matches some; there are val[top1]" in capsys.readouterr().err
