"""What a start reads of its checkpoints and of the starts before it: each once, behind the lock."""

import os
import shutil

import pytest
from loop_runs import same, train

import jstep
from jstep.array_store import listing
from jstep.compiling.programs import ProgramTable
from jstep.record import starts
from jstep.stores.files import ForeignFileError


@pytest.fixture
def reads(monkeypatch):
    """The manifests and the starts that were read, as their paths."""
    found = {"manifests": [], "starts": []}
    decode = listing.decode_manifest
    load = starts._load

    def counted_decode(data, path):
        found["manifests"].append(os.path.basename(os.path.dirname(path)))
        return decode(data, path)

    def counted_load(path):
        found["starts"].append(os.path.basename(path))
        return load(path)

    monkeypatch.setattr(listing, "decode_manifest", counted_decode)
    monkeypatch.setattr(starts, "_load", counted_load)
    return found


class FirstStep(jstep.Hook):
    """What was read until the first step began."""

    def __init__(self, reads):
        self.reads, self.seen = reads, None

    def before_step(self, step, state):
        self.seen = self.seen or {kind: list(paths) for kind, paths in self.reads.items()}


def test_a_restart_reads_its_manifest_three_times_and_each_earlier_start_once(tmp_path, reads):
    for last_step in range(1, 6):
        train(last_step, checkpoint_dir=tmp_path)
    for paths in reads.values():
        paths.clear()
    first = FirstStep(reads)
    train(6, checkpoint_dir=tmp_path, hooks=[first])
    # To list it as complete, to open it, and to see that it is not replaced while its arrays are
    # read.
    assert len(first.seen["manifests"]) <= 3
    assert set(first.seen["manifests"]) == {"model-5"}
    records = [name for name in first.seen["starts"] if ".card." not in name]
    assert len(records) == len(set(records)) == 5


def test_a_checkpoint_without_extra_is_read_beside_the_compilation(tmp_path, monkeypatch):
    with jstep.Saver(tmp_path) as saver:
        saver.save(train(3))
    threads = []
    compile_program = ProgramTable.compile

    def noted(self, *args):
        threads.append(True)
        return compile_program(self, *args)

    monkeypatch.setattr(ProgramTable, "compile", noted)
    state = train(6, checkpoint_dir=tmp_path)
    assert threads
    assert same(state, train(6))


def test_a_save_that_ends_before_the_claim_gives_the_run_its_name(tmp_path, monkeypatch):
    """A save of an earlier start may end after the look for the newest step. Its process has ended,
    too."""
    train(3, checkpoint_dir=tmp_path / "a")
    name = jstep.Saver(tmp_path / "a").extra()["run"]
    claim = jstep.Saver.claim

    def late(self, *args):
        if not os.path.exists(tmp_path / "b" / "model-3"):
            shutil.copytree(tmp_path / "a" / "model-3", tmp_path / "b" / "model-3")
        return claim(self, *args)

    monkeypatch.setattr(jstep.Saver, "claim", late)
    train(6, checkpoint_dir=tmp_path / "b")
    assert jstep.Saver(tmp_path / "b").extra()["run"] == name


@pytest.mark.parametrize("is_ended", [True, False])
def test_a_run_with_nothing_left_to_do_claims_nothing(is_ended, tmp_path, monkeypatch):
    """Its claim of a bucket would wait for a writer that was killed. One that owes its end will
    save, and claims."""
    train(3, checkpoint_dir=tmp_path)
    claimed = []
    claim = jstep.Saver.claim

    def noted(self, *args):
        claimed.append(True)
        return claim(self, *args)

    monkeypatch.setattr(jstep.Saver, "claim", noted)
    if not is_ended:
        state = train(3)
        with jstep.Saver(tmp_path, prefix="owed") as saver:
            saver.save(state)  # by hand: without the mark of an end
    prefix = "model" if is_ended else "owed"
    state = train(3, checkpoint_dir=tmp_path, checkpoint_prefix=prefix)
    assert same(state, train(3))
    assert bool(claimed) != is_ended


def test_a_tilde_in_logdir_is_the_directory_that_it_stands_for(tmp_path, monkeypatch):
    """Also for the check that nothing is written through a link below the directory of the run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    for directory in (elsewhere, tmp_path / "run"):
        directory.mkdir()
    (tmp_path / "run" / "events").symlink_to(elsewhere)
    with pytest.raises(ForeignFileError, match="is a link below"):
        train(3, checkpoint_dir="~/run", logdir="~/run/events")
    assert os.listdir(elsewhere) == []


def test_a_branch_of_its_own_logdir_is_refused_whatever_the_spelling(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    train(3, checkpoint_dir=tmp_path / "run")
    with pytest.raises(ValueError, match="got the logdir of this one"):
        train(6, logdir="~/run", start_from=tmp_path / "run", checkpoint_dir=tmp_path / "other")


def test_a_broken_checkpoint_of_the_run_is_raised_once_its_start_is_recorded(tmp_path):
    train(3, checkpoint_dir=tmp_path)
    train(3, checkpoint_dir=tmp_path / "parent")
    (tmp_path / "model-3" / "manifest.json").write_text("{")
    for options in ({}, {"start_from": tmp_path / "parent"}):
        with pytest.raises(jstep.CheckpointError, match="model-3 is corrupted"):
            train(6, checkpoint_dir=tmp_path, **options)
        newest = starts.read_starts(str(tmp_path))["model"][-1]
        assert newest["end"][0] == "failed"
