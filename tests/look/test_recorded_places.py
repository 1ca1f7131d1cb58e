"""What the records of somebody else's run name elsewhere, in buckets and in other directories, is not asked for."""

import dataclasses
import json

import pytest
from written_runs import ELSEWHERE, change, write_run

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
        "jstep.stores.objects.Objects._begin", lambda self, *_, **__: urls.append(self.url) or pytest.fail("asked")
    )
    return urls


def names_elsewhere(where, place, **fields):
    """A run that names a place as that of its best checkpoint, its parent, its logs."""
    best = {"accuracy": [0.9, 5, f"{place}/best-5"]}
    write_run(where, best=best, parent={"path": f"{place}/model-3", "step": 3}, parent_run="p", logdir=place, **fields)


@pytest.mark.thorough(except_for=["s3"])
@pytest.mark.parametrize("place", [*BUCKETS, "/net/stranger/x"], ids=["s3", "gs", "mounted"])
def test_no_command_asks_elsewhere(tmp_path, place, asked, capsys, monkeypatch):
    names_elsewhere(tmp_path / "a", place, process=ELSEWHERE)
    write_run(tmp_path / "b")
    followed = []
    real = __import__("os").path.realpath
    monkeypatch.setattr("os.path.realpath", lambda path, **kw: followed.append(str(path)) or real(path, **kw))
    for command in COMMANDS:
        paths = [str(tmp_path / name) for name in ("a", "b")][: 2 if command == "diff" else 1]
        options = ["-o", str(tmp_path / "page.html")] if command == "report" else []
        cli.main([command, *paths, *options])
        capsys.readouterr()
    assert not asked
    assert not [path for path in followed if path.startswith(place)]


def test_the_best_of_somebody_else_is_as_recorded_and_says_so(tmp_path, asked):
    names_elsewhere(tmp_path / "a", "s3://stranger/x", process=ELSEWHERE)
    (run,) = jstep.runs(tmp_path)
    assert (run.best, run.best_checkpoints) == ({"accuracy": (0.9, 5)}, {"accuracy": "s3://stranger/x/best-5"})
    assert run.best_notes == {"accuracy": "as recorded: its checkpoint is elsewhere, and was not looked for"}
    assert run.parent == ("s3://stranger/x/model-3", 3)
    assert "best 0.9 at 5, as recorded" in str(jstep.runs(tmp_path))


def test_the_reader_sees_the_places_of_a_run_of_their_own(tmp_path, monkeypatch):
    """The best checkpoints are in another directory, and are looked for: this one is gone."""
    names_elsewhere(tmp_path / "runs/a", str(tmp_path / "bests"))
    (run,) = jstep.runs(tmp_path / "runs")
    assert (run.best, run.best_notes) == ({}, {})
    urls = []
    monkeypatch.setattr("jstep.stores.objects.Objects._begin", lambda self, *_, **__: urls.append(self.url) or 1 / 0)
    names_elsewhere(tmp_path / "runs/b", "s3://mine/bests")
    jstep.runs(tmp_path / "runs/b")
    assert "s3://mine/bests" in urls


def test_a_copy_of_a_run_elsewhere_is_one_only_on_its_host(tmp_path):
    write_run(tmp_path / "disk/a")
    for name, process in (("mine", this_process() | {"pid": 2**30}), ("theirs", ELSEWHERE)):
        write_run(tmp_path / name / "x/a", run=str(tmp_path / "disk/a"), directory=str(tmp_path / "disk/a"))
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
