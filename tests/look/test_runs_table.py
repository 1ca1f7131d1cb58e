"""The table of runs: links, repeated runs, long chains, chosen metrics, times and zones, hosts with
other clocks."""

import json
import os
import time
from collections import Counter

import pytest
from written_runs import ELSEWHERE, make_setup, start, write_checkpoint, write_run, write_start

import jstep
from jstep.array_store import listing
from jstep.look import cli
from jstep.look.runs import find_runs
from jstep.record import starts
from jstep.stores import files


def paths_of(where):
    return [os.path.relpath(run.path, where) for run in jstep.runs(where)]


def test_links_are_followed_and_each_directory_is_listed_once(tmp_path):
    top, elsewhere = tmp_path / "top", tmp_path / "elsewhere"
    write_run(elsewhere / "exp1")
    write_run(top / "real" / "exp2")
    write_run(tmp_path / "beside")
    for name, target in {
        "exp1": elsewhere / "exp1",
        "exp1-again": elsewhere,
        "again": top / "real",  # before its target in the order of names
        "real/loop": top,
        "up": tmp_path,  # contains the directory itself
        "root": "/",
        "dangling": tmp_path / "nothing",
        "circle": "circle",
        "file": elsewhere / "exp1" / "starts" / "model.000001.json",
    }.items():
        (top / name).symlink_to(target)
    assert paths_of(top) == ["exp1", "real/exp2"]
    (tmp_path / "link").symlink_to(top)
    assert [run.path for run in jstep.runs(tmp_path / "link")] == [
        f"{tmp_path}/link/{name}" for name in paths_of(top)
    ]


def test_a_link_gives_no_name_to_what_has_one_and_leads_to_no_run_above(tmp_path):
    for name in ("top/z/run", "beside"):
        write_run(tmp_path / name)
    (tmp_path / "top/a").symlink_to("z/run")
    (tmp_path / "top/z/up").symlink_to(tmp_path)
    (tmp_path / "top/z/run/here").symlink_to("..")
    assert paths_of(tmp_path / "top") == ["z/run"]


def test_only_a_checkpoint_is_not_searched(tmp_path):
    for name in ("page/run", "page", "page/model-7"):
        write_run(tmp_path / name)
        (tmp_path / name / "manifest.json").write_text('{"name": "a web page"}')
    (tmp_path / "page/model-7/manifest.ocdbt").touch()
    assert paths_of(tmp_path) == ["page", "page/run"]
    assert paths_of(tmp_path / "page/run") == ["."]


def test_branches_are_found_behind_links(tmp_path):
    write_run(tmp_path / "disk" / "trunk")
    parent = {"path": f"{tmp_path}/disk/trunk/model-5", "step": 5}
    write_run(tmp_path / "top" / "branch", parent=parent, parent_run=f"{tmp_path}/disk/trunk")
    (tmp_path / "top" / "a-trunk").symlink_to(tmp_path / "disk" / "trunk")
    assert str(jstep.runs(tmp_path / "top")).splitlines()[2].startswith("└─ branch @5")


def write_branched(top):
    """A trunk with two branches, one of them from its best checkpoints, and another run."""
    write_run(top / "trunk", run="t")
    for name, folder in (("best", "trunk/best/best-5"), ("branch", "trunk/model-5")):
        write_run(
            top / name, run=name, parent={"path": f"{top}/{folder}", "step": 5}, parent_run="t"
        )
    write_run(top / "another", run="o")


def test_a_parent_that_was_moved_alone_has_its_new_path(tmp_path):
    write_branched(tmp_path)
    (tmp_path / "trunk" / "best").mkdir()
    os.rename(tmp_path / "trunk", tmp_path / "moved")
    os.rename(tmp_path / "another", tmp_path / "trunk")  # what is at the old path is another run
    found = {os.path.basename(run.path): run for run in jstep.runs(tmp_path)}
    assert found["branch"].parent == (f"{tmp_path}/trunk/model-5", 5), "its folder is there"
    os.rename(tmp_path / "trunk", tmp_path / "another")
    for given in ([tmp_path], [tmp_path / "moved", tmp_path / "best", tmp_path / "branch"]):
        found = {os.path.basename(run.path): run for run in find_runs(given)}
        assert found["branch"].parent == (f"{tmp_path}/moved/model-5", 5)
        assert found["best"].parent == (f"{tmp_path}/moved/best/best-5", 5)
    names = [line.split()[:2] for line in str(jstep.runs(tmp_path)).splitlines()[1:]]
    assert names == [["another", "finished"], ["moved", "(was"], ["├─", "best"], ["└─", "branch"]]


def test_a_branch_of_best_checkpoints_that_were_deleted_keeps_their_path(tmp_path):
    write_branched(tmp_path)
    (best,) = [run for run in jstep.runs(tmp_path) if os.path.basename(run.path) == "best"]
    assert best.parent == (f"{tmp_path}/trunk/best/best-5", 5)


def test_two_directories_with_one_run_id(tmp_path, capsys):
    write_branched(tmp_path)
    write_run(tmp_path / "copy", run="t")
    below = ["another", "copy", "trunk", "best", "branch"]
    assert paths_of(tmp_path) == below, "the one at the recorded path"
    said = (
        "copy, trunk have the run ID t: all but one are copies; "
        "a branch is below the one at the path"
    )
    for more in ((), ("--json",)):
        assert cli.main(["runs", str(tmp_path), *more]) == 0
        assert said in capsys.readouterr().err
    assert jstep.report(tmp_path).html.count(said) == 1
    os.rename(tmp_path / "trunk", tmp_path / "renamed")
    assert paths_of(tmp_path) == ["another", "best", "branch", "copy", "renamed"], (
        "below none of them"
    )
    assert jstep.runs(tmp_path)[2].parent == (f"{tmp_path}/trunk/model-5", 5)
    os.rename(tmp_path / "copy", tmp_path.parent / "elsewhere")
    cli.main(["runs", str(tmp_path)])
    assert capsys.readouterr().err == ""


def test_a_directory_that_cannot_be_opened_is_a_row(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "good")
    (tmp_path / "locked").mkdir()
    scan = os.scandir

    def scandir(path):
        if os.fspath(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    good, locked = jstep.runs(tmp_path)
    assert (good.status, locked.status, locked.path) == (
        "finished",
        "unreadable",
        str(tmp_path / "locked"),
    )
    assert "Permission denied" in locked.error
    assert cli.main(["runs", str(tmp_path)]) == 1
    assert "Permission denied" in capsys.readouterr().out


def test_a_run_that_is_given_twice_is_one_row(tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        write_run(tmp_path / "top" / name, values={"loss": "nan"})
    (tmp_path / "link").symlink_to(tmp_path / "top")
    monkeypatch.chdir(tmp_path)
    for given in (
        ["top", "top/a"],
        ["top/a", f"{tmp_path}/top/"],
        ["link", "top"],
        ["top/", "link/a", "top"],
    ):
        assert cli.main(["runs", *given, "--sort", "loss"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 3, given
        assert cli.main(["runs", *given, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)) == 2


def chain(where, count, *, closed=False):
    """Each run a branch of the one before; of a closed chain the first one of the last."""
    for n in range(count):
        above = where / f"r{(n - 1) % count}" / "model-5"
        parent = {"path": str(above), "step": 5} if n or closed else None
        write_run(
            where / f"r{n}", parent=parent, parent_run=parent and os.path.dirname(parent["path"])
        )


@pytest.mark.parametrize("closed", [False, True])
def test_chains_of_any_length(closed, tmp_path):
    chain(tmp_path, 100, closed=closed)
    found = jstep.runs(tmp_path)
    assert [os.path.basename(run.path) for run in found] == [f"r{n}" for n in range(100)]
    lines = str(found).splitlines()
    assert lines[3].startswith("   └─ r2 @5")
    assert lines[-1].startswith(f"{' ' * 48}└─ r99 @5")
    assert max(map(len, lines)) < 200


def best_at(folder):
    return {"norm": [2.0, 8, write_checkpoint(folder / "best")]}


def test_metrics_are_chosen_by_name_and_by_pattern(tmp_path, capsys):
    write_run(
        tmp_path,
        values={"val[top1]": 1.5, "valt": 2.5, "loss": 3.5, "a,b": 4.5},
        best=best_at(tmp_path),
    )

    def heads(*options):
        assert cli.main(["runs", str(tmp_path), *options]) == 0
        return capsys.readouterr().out.splitlines()[0].partition(" since")[0].split()[4:]

    assert heads() == ["loss", "norm"]
    assert heads("--metrics", "val[top1]") == ["val[top1]"], (
        "the name comes before the pattern, which is valt"
    )
    assert heads("--metrics", "val[t]") == ["valt"]
    assert heads("--metrics", "loss,l*,val*") == ["loss", "val[top1]", "valt"]
    assert heads("--metrics", "a,b") == ["a,b"]
    assert cli.main(["runs", str(tmp_path), "--metrics", "loss,lss"]) == 2
    assert "--metrics lss: must be a metric, or a pattern that matches some; there are" in (
        err := capsys.readouterr().err
    )
    assert all(name in err for name in ("val[top1]", "valt", "loss", "norm"))


def test_the_metric_of_which_the_best_is_kept_is_shown(tmp_path):
    for values in ({"norm": 3.0}, {}, {f"{n}/loss": 1.0 for n in range(9)}):
        write_run(tmp_path, values=values, best=best_at(tmp_path))
        assert " norm" in str(jstep.runs(tmp_path)).splitlines()[0]
        assert "(best 2 at 8)" in str(jstep.runs(tmp_path))


@pytest.fixture
def zone(monkeypatch):
    """A function that sets the time zone of this process."""

    def change(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield change
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("name", "shown", "head"),
    [
        ("JST-9", "2023-11-15 07:13", "since (UTC+09:00)"),
        ("XYZ3:30", "2023-11-14 18:43", "since (UTC-03:30)"),
        ("UTC", "2023-11-14 22:13", "since (UTC)"),
        ("<+0545>-5:45", "2023-11-15 03:58", "since (UTC+05:45)"),
        ("nonsense", "2023-11-14 22:13", "since (UTC)"),
    ],
)
def test_times_are_those_of_the_readers_zone(name, shown, head, zone, tmp_path):
    zone(name)
    write_run(tmp_path)
    text = str(jstep.runs(tmp_path))
    assert shown in text
    assert head in text.splitlines()[0]


@pytest.mark.parametrize("at", [2.9e10, 0.0])
def test_the_first_and_the_last_times_are_no_error(at, tmp_path):
    write_run(tmp_path, began=at)
    (run,) = jstep.runs(tmp_path)
    assert run.started == at
    assert run.status in str(jstep.runs(tmp_path))


@pytest.mark.parametrize(("age", "status"), [(0.0, "running"), (600.0, "killed")])
@pytest.mark.parametrize("offset", [-180.0, 864000.0, 0.0])
def test_a_run_of_another_host_is_judged_by_the_clock_of_the_file_system(
    age, status, offset, tmp_path
):
    write_run(tmp_path, process=ELSEWHERE, now=time.time() + offset - age, end=None)
    written = time.time() - age
    os.utime(tmp_path / "starts" / "model.000001.json", (written, written))
    (run,) = jstep.runs(tmp_path)
    assert run.status == status
    assert len(os.listdir(tmp_path / "starts")) == 2, "the start and its setup"


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="files without a name")
def test_the_clock_of_this_host_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    before = os.stat(tmp_path).st_mtime_ns
    monkeypatch.setattr(files.time, "time", lambda: 0.0)
    assert abs(files.seconds_since_write(str(tmp_path / "file"))) < 60.0
    assert os.stat(tmp_path).st_mtime_ns == before
    monkeypatch.delattr(os, "O_TMPFILE")
    assert files.seconds_since_write(str(tmp_path / "file")) < -1e9, "where it cannot be asked"


def test_a_branch_is_below_the_copy_whose_path_it_recorded(tmp_path):
    """Not below one whose name is the beginning of that one's."""
    for name in ("a", "ab"):
        write_run(tmp_path / name, run="p")
    parent = {"path": str(tmp_path / "ab" / "best" / "best-3"), "step": 3}
    write_run(tmp_path / "branch", run="c", parent=parent, parent_run="p")
    rows = [line.split()[:2] for line in str(jstep.runs(tmp_path)).splitlines()]
    assert rows.index(["└─", "branch"]) == rows.index(["ab", "finished"]) + 1


@pytest.mark.parametrize("arguments", [[], ["--starts"], ["--differences"]])
def test_the_prefixes_of_a_directory_are_read_together(arguments, tmp_path, monkeypatch):
    """A list of the directory and all its starts, once for each prefix, would be the square of
    their number."""
    prefixes = [f"m{i}" for i in range(5)]
    for i, prefix in enumerate(prefixes):
        write_start(
            tmp_path, start(tmp_path, prefix=prefix, run=prefix, config={"lr": i}), make_setup()
        )
        with jstep.Saver(tmp_path, prefix=prefix) as saver:
            saver.save(jstep.TrainState.create({"w": 1.0}, jstep.gradient_descent(0.1)))
    lists, opened = [], Counter()
    list_names, load = listing.list_names, starts._load
    monkeypatch.setattr(listing, "list_names", lambda path: lists.append(path) or list_names(path))
    monkeypatch.setattr(starts, "_load", lambda path: opened.update([path]) or load(path))
    assert cli.main(["runs", str(tmp_path), *arguments]) == 0
    assert lists.count(str(tmp_path)) == 1
    assert len(opened) >= len(prefixes)
    assert max(opened.values()) <= 2
    found = {run.prefix: run.newest_checkpoint for run in jstep.runs(tmp_path)}
    assert found == {prefix: str(tmp_path / f"{prefix}-0") for prefix in prefixes}
