"""What the records of somebody else's run name elsewhere, in buckets and in other directories, is
not asked for."""

import dataclasses
import json
import os

import pytest
from file_operations import before
from written_runs import ELSEWHERE, change, write_checkpoint, write_run

import jstep
from jstep.look import cli
from jstep.stores.owners import this_process

COMMANDS = ["runs", "report", "stalls", "events", "goodput", "diff"]
BUCKETS = ["s3://stranger/x", "gs://stranger/x"]


@pytest.fixture
def asked(monkeypatch):
    """The URLs of the buckets that were asked."""
    urls = []
    monkeypatch.setattr(
        "jstep.stores.objects.Objects._begin",
        lambda self, *_, **__: urls.append(self.url) or pytest.fail("asked"),
    )
    return urls


def names_elsewhere(where, place, **fields):
    """A run that names a place as that of its best checkpoint, its parent, its logs."""
    best = {"accuracy": [0.9, 5, f"{place}/best-5"]}
    write_run(
        where,
        best=best,
        parent={"path": f"{place}/model-3", "step": 3},
        parent_run="p",
        logdir=place,
        **fields,
    )


@pytest.mark.thorough(except_for=["s3"])
@pytest.mark.parametrize("place", [*BUCKETS, "/net/stranger/x"], ids=["s3", "gs", "mounted"])
def test_no_command_asks_elsewhere(tmp_path, place, asked, capsys, monkeypatch):
    names_elsewhere(tmp_path / "a", place, process=ELSEWHERE)
    write_run(tmp_path / "b")
    followed = []
    real = os.path.realpath
    monkeypatch.setattr(
        "os.path.realpath", lambda path, **kw: followed.append(str(path)) or real(path, **kw)
    )
    call_commands(tmp_path / "a", tmp_path / "b")
    assert not asked
    assert not [path for path in followed if path.startswith(place)]


def call_commands(run, other):
    for command in COMMANDS:
        paths = [str(run), str(other)][: 2 if command == "diff" else 1]
        options = ["-o", str(other / "page.html")] if command == "report" else []
        cli.main([command, *paths, *options])


def in_another_directory(run, place):
    names_elsewhere(run, place, directory=str(run.parent / "elsewhere"))


def in_no_directory(run, place):
    names_elsewhere(run, place, directory=None)


def in_the_directory_of_the_reader(run, place):
    names_elsewhere(run, place, directory="/proc/self/cwd")


def in_a_copy(run, place):
    names_elsewhere(run, place, run="mine", directory=str(run.parent / "mine"))


def in_a_copy_of_which_another_start_has_the_best(run, place):
    """Below what that start calls its directory."""
    names_elsewhere(run, place, run="mine", directory=place)
    write_run(run, 2, run="mine", directory=str(run.parent / "mine"), step=[10, 10])


def in_a_copy_beside_it(run, place):
    """A parent in the record of the newest start, while that of the best one is an earlier
    start's."""
    in_a_copy(run, place)
    write_run(
        run,
        2,
        run="mine",
        directory=str(run.parent / "mine"),
        parent={"path": f"{place}/model-3", "step": 3},
    )


IN_PLACES = [
    in_another_directory,
    in_no_directory,
    in_the_directory_of_the_reader,
    in_a_copy,
    in_a_copy_of_which_another_start_has_the_best,
    in_a_copy_beside_it,
]


@pytest.mark.parametrize("kind", ["bucket", "disk"])
@pytest.mark.parametrize("write", IN_PLACES)
def test_the_host_alone_does_not_make_a_record_the_readers(
    tmp_path, write, kind, asked, monkeypatch
):
    """Its directory is another one, or it looks like a copy of the reader's run."""
    elsewhere = tmp_path / "elsewhere"
    write_run(elsewhere)
    (elsewhere / "best").mkdir()
    (elsewhere / "events.out.tfevents.1700000000.h").write_bytes(b"")
    write_checkpoint(elsewhere / "best")
    for number in (1, 2):
        write_run(tmp_path / "mine", number, run="mine")
    run = tmp_path / "theirs/deep/run"
    write(tmp_path / "run", "s3://stranger/x" if kind == "bucket" else str(elsewhere))
    run.parent.mkdir(parents=True)
    (tmp_path / "run").rename(run)
    write_run(tmp_path / "theirs/other/run")
    monkeypatch.chdir(run)
    with before(("open", "os.listdir", "os.scandir"), f"{elsewhere}*", lambda path: None) as opened:
        call_commands(run, tmp_path / "theirs/other/run")
        jstep.runs(tmp_path / "theirs")
    assert not asked
    # Whether it is the original of a copy.
    assert {*opened.paths} <= {f"{elsewhere}/starts/model.000001.json"}


def test_a_copy_has_the_best_checkpoints_of_its_original_and_no_others(tmp_path):
    (tmp_path / "disk/a/best").mkdir(parents=True)
    best = {"x": [0.9, 10, write_checkpoint(tmp_path / "disk/a/best")]}
    (tmp_path / "disk/b").mkdir()
    best |= {"y": [0.9, 10, write_checkpoint(tmp_path / "disk/b")]}
    for where in (tmp_path / "disk/a", tmp_path / "copies/x/a"):
        write_run(where, run="a", directory=str(tmp_path / "disk/a"), best=best)
    (copy,) = jstep.runs(tmp_path / "copies")
    assert copy.best_checkpoints == {name: path for name, (_, _, path) in best.items()}
    assert copy.best_notes == {
        "y": "as recorded: its checkpoint is elsewhere, and was not looked for"
    }
    (tmp_path / "disk/a/best").rename(tmp_path / "disk/c")
    assert list(jstep.runs(tmp_path / "copies")[0].best) == ["y"]


@pytest.mark.parametrize("field", ["directory", "logdir", "parent"])
def test_a_recorded_path_is_not_relative(tmp_path, field):
    write_run(tmp_path / "a")
    change(
        tmp_path / "a",
        **{field: {"path": "../b/model-3", "step": 3} if field == "parent" else "../b"},
    )
    (run,) = jstep.runs(tmp_path)
    assert run.status == "unreadable"
    assert f"start has {field}=" in run.error
    change(
        tmp_path / "a",
        **{field: None},
        best={"x": [0.9, 5, "best/best-5"], "y": [0.9, 5, "s3://a/best-5"]},
    )
    assert list(jstep.runs(tmp_path)[0].best_checkpoints) == (["y"] if field == "directory" else [])


def test_the_best_of_somebody_else_is_as_recorded_and_says_so(tmp_path, asked):
    names_elsewhere(tmp_path / "a", "s3://stranger/x", process=ELSEWHERE)
    (run,) = jstep.runs(tmp_path)
    assert (run.best, run.best_checkpoints) == (
        {"accuracy": (0.9, 5)},
        {"accuracy": "s3://stranger/x/best-5"},
    )
    assert run.best_notes == {
        "accuracy": "as recorded: its checkpoint is elsewhere, and was not looked for"
    }
    assert run.parent == ("s3://stranger/x/model-3", 3)
    assert "best 0.9 at 5, as recorded" in str(jstep.runs(tmp_path))


def test_the_reader_sees_the_places_of_a_run_of_their_own(tmp_path, monkeypatch):
    """The best checkpoints are in another directory, and are looked for: this one is gone."""
    names_elsewhere(tmp_path / "runs/a", str(tmp_path / "bests"))
    (run,) = jstep.runs(tmp_path / "runs")
    assert (run.best, run.best_notes) == ({}, {})
    urls = []
    monkeypatch.setattr(
        "jstep.stores.objects.Objects._begin", lambda self, *_, **__: urls.append(self.url) or 1 / 0
    )
    names_elsewhere(tmp_path / "runs/b", "s3://mine/bests")
    jstep.runs(tmp_path / "runs/b")
    assert "s3://mine/bests" in urls


def test_a_copy_of_a_run_elsewhere_is_one_only_on_its_host(tmp_path):
    write_run(tmp_path / "disk/a")
    for name, process in (("mine", this_process() | {"pid": 2**30}), ("theirs", ELSEWHERE)):
        write_run(
            tmp_path / name / "x/a",
            run=str(tmp_path / "disk/a"),
            directory=str(tmp_path / "disk/a"),
        )
        change(tmp_path / name / "x/a", process=process, end=None)
    mine, theirs = (jstep.runs(tmp_path / name)[0] for name in ("mine", "theirs"))
    assert mine.reason == f"a copy of {tmp_path}/disk/a"
    assert theirs.reason == ""


def test_a_step_of_5000_digits_is_none(tmp_path):
    best = {"accuracy": [0.9, 5, f"{tmp_path}/a/best/best-{'9' * 5000}"]}
    write_run(tmp_path / "a", best=best)
    (run,) = jstep.runs(tmp_path)
    assert run.error is None
    assert run.best == {}
    json.dumps(dataclasses.asdict(run))
