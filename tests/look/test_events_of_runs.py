"""Which event files are a run's: on its page are those of its own starts, and what their processes
wrote there."""

import contextlib
import json
import math
import os
import pathlib
import re
import shutil

import jax.numpy as jnp
import pytest
from points import norm
from written_runs import change, starts_of, write_start

import jstep
from jstep import summary

optimizer, train_step = norm()


def train(logdir, checkpoints, last=20, stop=None, **options):
    """A run of a summary a step, which ends with an error at a step."""

    def hook(step, state, metrics):
        if step == stop:
            raise KeyError("killed")

    with contextlib.suppress(KeyError):
        jstep.train(
            train_step, jstep.TrainState.create({"w": jnp.ones(2)}, optimizer), lambda step: (),
            last, checkpoint_dir=checkpoints, logdir=logdir, save_summaries_steps=1, log_steps=None,
            hooks=[jstep.every(1, hook)], **options,
        )  # fmt: skip


def points(page, label="loss", title="loss"):
    """The numbers of points of the curve with a label, in the picture of a metric."""
    figure = re.search(rf"<figcaption>{title}</figcaption>.*?</figure>", page, re.DOTALL)
    if figure is None:
        return []
    labels = re.findall(r'class="key" data-i="(\d+)".*?</svg> ([^<]*)<', figure[0]) or [
        ("0", label)
    ]
    keys = [key for key, name in labels if name == label]
    paths = [
        re.findall(rf'class="(?:line|dot) s\d(?: d\d)?" data-i="{key}" d="([^"]*)"', figure[0])
        for key in keys
    ]
    return [str(sum(len(re.findall(r",", path)) for path in some)) for some in paths]


def write(folder, tag, *, pid=None):
    """A user's writer, perhaps of another process."""
    with summary.SummaryWriter(folder) as writer:
        writer.add_summary(summary.scalar(tag, 1.0, collections=()), 3)
    path = pathlib.Path(writer.path or "")
    return path if pid is None else path.rename(str(path).replace(f".{os.getpid()}.", f".{pid}."))


def test_two_runs_with_one_logdir(tmp_path):
    """One after the other, in one process."""
    train(tmp_path / "logs", tmp_path / "a")
    train(tmp_path / "logs", tmp_path / "b", last=5)
    a, b = jstep.report(tmp_path / "a").html, jstep.report(tmp_path / "b").html
    assert (points(a), points(b)) == (["20"], ["5"])
    assert "made again" not in a + b
    assert "event files of other runs are not shown: events.out" in a


def test_two_runs_at_once(tmp_path):
    """A run that begins while another one trains, and ends first."""
    at_7 = jstep.every(7, lambda *_: train(tmp_path / "logs", tmp_path / "b", last=5))
    jstep.train(
        train_step, jstep.TrainState.create({"w": jnp.ones(2)}, optimizer), lambda step: (), 10,
        checkpoint_dir=tmp_path / "a", logdir=tmp_path / "logs", save_summaries_steps=1,
        log_steps=None, hooks=[at_7],
    )  # fmt: skip
    assert points(jstep.report(tmp_path / "a").html) == ["10"]
    assert points(jstep.report(tmp_path / "b").html) == ["5"]


def test_all_starts_of_a_run_are_its_own(tmp_path):
    """Also those before its first checkpoint, which had other names, and below a directory that was
    moved."""
    for stop in (3, 7):
        train(tmp_path / "x/logs", tmp_path / "x/run", stop=stop)
    train(tmp_path / "x/logs", tmp_path / "x/run")
    page = jstep.report(tmp_path / "x/run").html
    assert points(page) == ["20"]
    assert page.count('class="line s0 pale d0"') >= 2, "steps that were made again"
    (tmp_path / "x").rename(tmp_path / "y")
    assert points(jstep.report(tmp_path / "y/run").html) == ["20"]


# Where they are read.


def recorded(run, **fields):
    for start in starts_of(run):
        change(run, start["number"], **fields)


def of_another_host(run):
    recorded(run, process=starts_of(run)[0]["process"] | {"host": "another"})


@pytest.mark.thorough(except_for=["moved-elsewhere", "of another host-s3://bucket/logs"])
@pytest.mark.parametrize("logdir", ["elsewhere", "s3://bucket/logs", "gs://bucket/logs"])
@pytest.mark.parametrize("how", ["moved", "of another host"])
def test_a_logdir_elsewhere_is_not_read(tmp_path, how, logdir, monkeypatch):
    train(tmp_path / "a/logs", tmp_path / "a/run")
    shutil.copytree(tmp_path / "a/logs", tmp_path / "elsewhere")
    place = logdir if "://" in logdir else str(tmp_path / logdir)
    recorded(tmp_path / "a/run", logdir=place)
    if how == "moved":
        (tmp_path / "a").rename(tmp_path / "b")
    else:
        of_another_host(tmp_path / "a/run")
    monkeypatch.setattr(
        "jstep.stores.objects.Objects.__init__", lambda *_: pytest.fail("a bucket was asked")
    )
    page = jstep.report(tmp_path / ("b" if how == "moved" else "a") / "run").html
    assert "<figure" not in page
    assert f"its logdir {place} is not read" in page


def test_a_logdir_elsewhere_is_read_where_the_run_was_made(tmp_path):
    train(tmp_path / "tensorboard/a/x", tmp_path / "checkpoints/a/x")
    assert points(jstep.report(tmp_path / "checkpoints/a/x").html) == ["20"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere/checkpoints")
    page = jstep.report(tmp_path / "elsewhere/checkpoints/a/x").html
    assert "<figure" not in page
    assert "is not read" in page


@pytest.mark.parametrize("saver", [False, True])
def test_paths_that_were_relative(tmp_path, saver, monkeypatch):
    """Also beside a Saver, whose directory is absolute."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with jstep.Saver("run") as checkpoints:
        train("logs", checkpoints if saver else "run")
    monkeypatch.chdir(tmp_path)
    assert points(jstep.report("work/run").html) == ["20"]
    (tmp_path / "work").rename(tmp_path / "moved")
    assert points(jstep.report("moved/run").html) == ["20"]


def test_no_link_leads_out_of_a_run_of_others(tmp_path):
    train(tmp_path / "a/run/logs", tmp_path / "a/run")
    logs, elsewhere = tmp_path / "a/run/logs", tmp_path / "elsewhere"
    logs.rename(elsewhere)
    logs.symlink_to(elsewhere)
    assert points(jstep.report(tmp_path / "a/run").html) == ["20"], "a link of the reader's own"
    of_another_host(tmp_path / "a/run")
    assert "<figure" not in jstep.report(tmp_path / "a/run").html


# `events` of the command line.


def scalars(cli, *arguments, code=0):
    found = json.loads(
        cli("events", *arguments, "--json", code=code).out, parse_constant=pytest.fail
    )
    assert all(list(row) == ["version", "run", "name", "step", "value"] for row in found)
    assert all(row.pop("version") == 1 for row in found)
    return [tuple(row.values()) for row in found]


def test_the_scalars_of_a_directory_without_runs(tmp_path, cli):
    """A later start replaces what it repeats, and a value that is not finite is null."""
    for start, values in {1: [1.0, 2.0, 3.0, 4.0], 3: [math.nan, 6.0]}.items():
        with summary.SummaryWriter(tmp_path / "logs") as writer:
            writer.add_session_log("START", start)
            for step, value in enumerate(values, start):
                writer.add_summary(
                    summary.scalar(["val/loss", "val/x"], [value, 0.0], collections=()), step
                )
    logs = tmp_path / "logs"
    expected = [
        ("logs", "val/loss", step, value)
        for step, value in {1: 1.0, 2: 2.0, 3: None, 4: 6.0}.items()
    ]
    assert scalars(cli, logs, "--name", "*loss") == expected
    assert scalars(cli, tmp_path, "--name", "val/loss", "--from", 2, "--to", 3) == expected[1:3]
    assert len(scalars(cli, tmp_path)) == 8, "without event files in it"
    assert scalars(cli, logs, "--from", 9) == []
    assert "no values at these steps" in cli("events", logs, "--from", 9).out
    assert "logs  val/loss     3    nan" in cli("events", logs, "--name", "val/loss").out
    assert (
        "--name los: must be a scalar, or a pattern that"
        in cli("events", logs, "--name", "los", code=2).err
    )
    # What exists is printed.
    some = cli("events", logs, "--name", "los", "--name", "val/loss", code=2)
    assert "val/loss" in some.out
    assert "--name los: must be" in some.err
    for options in ([], ["--name", "val/loss"]):  # what could be read is printed
        found = cli("events", logs, tmp_path / "missing", *options, code=2)
        assert ("val/loss" in found.out, found.err) == (
            True,
            f"jstep events: {tmp_path}/missing: no such file or directory\n",
        )
    assert (
        "--from 3 --to 2: A must not be" in cli("events", logs, "--from", 3, "--to", 2, code=2).err
    )


@pytest.mark.thorough
def test_the_scalars_of_runs(tmp_path, cli):
    """Each has its own, wherever its logdir is, and each step once."""
    # The error of a hook leaves no checkpoint, so that the next start repeats the steps.
    train(tmp_path / "tensorboard", tmp_path / "runs/a", stop=7)
    train(tmp_path / "tensorboard", tmp_path / "runs/a", last=5)
    train(tmp_path / "tensorboard", tmp_path / "runs/b", last=3)
    train(None, tmp_path / "runs/c", last=2)
    write_start(tmp_path / "runs/bad", b"{}")
    found = scalars(cli, tmp_path / "runs", "--name", "loss", code=2)
    assert [row[:3] for row in found] == [
        *(("a", "loss", step) for step in range(1, 6)),
        *(("b", "loss", step) for step in range(1, 4)),
    ]
    assert "bad: " in cli("events", tmp_path / "runs", "--name", "loss", code=2).err
    others = cli("events", tmp_path / "runs/b", "--name", "loss")
    assert "event files of other runs are not shown" in others.err
    assert "no event files (" in cli("events", tmp_path / "runs/c", code=2).err
