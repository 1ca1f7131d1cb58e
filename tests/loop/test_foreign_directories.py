"""Runs in a directory that somebody else prepared: nothing beside it changes, and no step is taken
on its files."""

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time

import jax.numpy as jnp
import pytest
from foreign_files import KINDS, contents, put
from points import number
from waiting import wait_until

import jstep
from jstep.stores import owners
from jstep.stores.files import ForeignFileError

FILES = (".model.jstep-writer", ".best.jstep-writer", "fingerprints.jsonl")
"""What a run opens for writing: an error before its first step."""
FOLDERS = ("model-2.orbax-checkpoint-tmp", "model-2.jstep-deleted", "model-2.jstep-replaced")
"""What a run makes, or removes: a link is removed, and anything else that is no folder is an
error."""
OTHERS = ("stalls", "stalls/model.0.json", "compile_cache", "manifest.json")
"""What a run replaces, sets aside or reads."""


class Steps(jstep.Hook):
    """The steps that a run has taken."""

    def __init__(self):
        self.taken = []

    def after_step(self, step, state, metrics):
        self.taken.append(step)


OPTIMIZER, STEP = number()


def train(directory, last_step=4, more=(), **options):
    state = jstep.TrainState.create({"w": 1.0}, OPTIMIZER)
    best = jstep.KeepBest(directory, "loss", mode="min")
    hooks = [
        jstep.FingerprintHook(every_n_steps=1, path=f"{directory}/"),
        jstep.EvaluationHook(
            lambda state: {"loss": float(state.params["w"])}, every_n_steps=2, callbacks=[best]
        ),
        *more,
    ]
    return jstep.train(
        STEP,
        state,
        lambda step: jnp.ones(()),
        last_step,
        hooks=hooks,
        checkpoint_dir=directory,
        save_checkpoint_steps=2,
        progress=False,
        **options,
    )


def attempt(tmp_path, name, kind):
    """Run in a directory where something of a kind has a name; return the error, and check what has
    changed."""
    run, path = tmp_path / "run", tmp_path / "run" / name
    victims = put(kind, path, tmp_path / "victims")
    before, steps, error = (contents(path), contents(victims)), Steps(), None
    began = time.monotonic()
    try:
        train(run, more=[steps])
    except (OSError, ValueError) as caught:
        error = caught
        assert not steps.taken
        assert str(path) in str(error)
        assert contents(path) == before[0]
    if not (kind == "hard_linked" and error is None):  # its other name may go
        assert contents(victims) == before[1]
    assert (victims / "notes").read_bytes() == b"what somebody wrote\n"
    assert os.listdir(victims) == ["notes"]
    assert time.monotonic() - began < 60
    return error


@pytest.mark.thorough(except_for="each value once")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["linked", "other_json"])
def test_a_file_of_somebody_else_is_an_error_before_the_first_step(tmp_path, name, kind):
    assert isinstance(attempt(tmp_path, name, kind), ForeignFileError)


@pytest.mark.thorough(except_for=["linked_to_a_folder"])
@pytest.mark.parametrize("kind", ["linked_to_a_folder", "fifo"])
def test_a_temporary_folder_of_somebody_else(tmp_path, kind):
    error = attempt(tmp_path, FOLDERS[0], kind)
    assert (error is None) == (kind == "linked_to_a_folder")


@pytest.mark.thorough(except_for=["stalls-linked", "manifest.json-other_json"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "linked_to_a_folder"])
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_replaced_or_left_alone(tmp_path, name, kind):
    is_link = name == "stalls" and kind.startswith("linked")  # behind which are files of others
    assert (attempt(tmp_path, name, kind) is None) == (not is_link)


@pytest.mark.thorough(except_for=["best-2-text"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["model-2", "best-2"])
def test_what_has_the_name_of_a_checkpoint_stays(tmp_path, name, kind):
    path = tmp_path / "run" / name
    victims = put(kind, path, tmp_path / "victims")
    before = contents(path), contents(victims)
    with pytest.raises(
        jstep.CheckpointError,
        match=f"{name}: jstep writes a file of this name, but it is not a check",
    ):
        train(tmp_path / "run")
    assert (contents(path), contents(victims)) == before


def leave(directory):
    """Leave in a directory what a process leaves that is killed: claims, temporary files, and a
    hidden checkpoint."""
    code = """
    import json, os, sys
    from jstep.array_store.claims import FileClaim
    from jstep.stores import owners
    directory = sys.argv[1]
    os.makedirs(f"{directory}/stalls")
    os.makedirs(f"{directory}/model-55.jstep-deleted/d")
    claims = [FileClaim(directory, prefix) for prefix in ("model", "best", "worse")]
    for path in ("report.html", "stalls/model.0.json"):
        open(owners.temporary_path(f"{directory}/{path}", owners.new_token()), "x").close()
    os._exit(0)
    """
    lines = "\n".join(line[4:] for line in code.splitlines())
    subprocess.run([sys.executable, "-c", lines, str(directory)], timeout=60, check=True)


def test_files_of_a_start_are_as_private_as_the_umask_says(tmp_path):
    """Whatever has the name of the next one, which anybody can foresee."""
    before = os.umask(0o077)
    try:
        train(tmp_path, 2)
        names = [f"starts/model.000002.{kind}" for kind in ("card.json", "programs")]
        for name in names:
            (tmp_path / name).write_text("{}")
            (tmp_path / name).chmod(0o4666)
        train(tmp_path, config={"long": "x" * 5000})
    finally:
        os.umask(before)
    for name in (*names, "starts/model.000002.json"):
        assert (tmp_path / name).read_bytes() != b"{}"
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_leftovers_go_at_the_next_start_that_saves(tmp_path):
    run = tmp_path / "run"
    train(run)
    expected = sorted(os.listdir(run))
    leave(tmp_path / "dead")
    other = json.dumps({"host": "elsewhere", "space": "", "pid": 1, "started": "1"})
    for last_step in (5, 6):
        shutil.copytree(tmp_path / "dead", run, dirs_exist_ok=True)
        (run / ".elsewhere.jstep-writer").write_text(other)
        (run / ".mine.jstep-writer").write_text(json.dumps(owners.this_process()))
        assert {".model.jstep-writer", "model-55.jstep-deleted"} <= set(os.listdir(run))
        train(run, last_step)
        kept = {
            ".elsewhere.jstep-writer",
            ".mine.jstep-writer",
            ".worse.jstep-writer",
            "stalls",
            "model-5",
            "model-6",
        }
        assert set(os.listdir(run)) - kept == set(expected)
        assert os.listdir(run / "stalls") == []


def test_nothing_to_do_while_another_writer_is_alive(tmp_path):
    """Its claim and temporary folders stay, and the run ends as it did."""
    train(tmp_path)
    with jstep.Saver(tmp_path) as writer:
        writer.claim()
        (tmp_path / "model-9.orbax-checkpoint-tmp").mkdir()
        with contextlib.suppress(jstep.CheckpointError):
            train(tmp_path)
        assert (tmp_path / "model-9.orbax-checkpoint-tmp").exists()
        with open(tmp_path / ".model.jstep-writer") as claim:
            assert json.load(claim) == owners.this_process()


def test_a_file_of_rows_without_end_is_an_error(tmp_path):
    with (tmp_path / "rows.jsonl").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=r"rows\.jsonl: has more than 2147483648 bytes"):
        jstep.History.read(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match="more than"):
        train(tmp_path / "run", more=[jstep.History(tmp_path / "rows.jsonl")])


def links_elsewhere(run, elsewhere, name):
    """A folder of a run that leads to that of another one."""
    (elsewhere / name).mkdir(parents=True, exist_ok=True)
    if (run / name).exists():
        shutil.rmtree(run / name)
    (run / name).symlink_to(elsewhere / name)


@pytest.mark.parametrize("name", ["best", "logs"])
def test_nothing_is_written_through_a_link_below_the_directory_of_a_run(tmp_path, name):
    run, mine = tmp_path / "theirs", tmp_path / "mine"
    for where in (run, mine):
        train_with_best(where, 4)
    links_elsewhere(run, mine, name)
    before = contents(mine)
    with pytest.raises(
        ValueError,
        match=rf"theirs/{name}: is a link below .*theirs, and nothing is written through it",
    ):
        train_with_best(run, 8)
    assert contents(mine) == before


def hooks_that_write_below(directory):
    """Hooks by name, each of which writes to `directory` or to a file in it."""
    keeps = jstep.KeepBest(directory, "loss", mode="min")
    return {
        "KeepBest": jstep.EvaluationHook(
            lambda state: {"loss": 1.0}, every_n_steps=1, callbacks=[keeps]
        ),
        "History": jstep.History(directory / "rows.jsonl", every_n_steps=1),
        "FingerprintHook": jstep.FingerprintHook(
            every_n_steps=1, path=directory / "fingerprints.jsonl"
        ),
        "CheckpointSaverHook": jstep.CheckpointSaverHook(directory, save_steps=1),
        "ProfilerHook": jstep.ProfilerHook(directory, start_step=0, stop_step=1),
    }


@pytest.mark.parametrize("option", ["checkpoint_dir", "logdir"])
@pytest.mark.parametrize(
    "name", ["KeepBest", "History", "FingerprintHook", "CheckpointSaverHook", "ProfilerHook"]
)
def test_no_hook_writes_through_a_link_below_a_directory_of_its_run(tmp_path, name, option):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    (run / "link").symlink_to(elsewhere)
    hook, taken = hooks_that_write_below(run / "link")[name], Steps()
    state = jstep.TrainState.create({"w": 1.0}, OPTIMIZER)
    with pytest.raises(
        ForeignFileError,
        match=r"run/link: is a link below .*run, and nothing is written through it",
    ):
        jstep.train(
            STEP,
            state,
            lambda step: jnp.ones(()),
            2,
            hooks=[hook, taken],
            progress=False,
            **{option: run},
        )
    assert not taken.taken
    assert not os.listdir(elsewhere)


def test_the_trace_of_a_profiler_is_not_written_through_a_link(tmp_path):
    """JAX's profiler makes `plugins/profile` in the directory that it is given."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    (run / "plugins").symlink_to(elsewhere)
    hook = jstep.ProfilerHook(run, start_step=0, stop_step=1)
    state = jstep.TrainState.create({"w": 1.0}, OPTIMIZER)
    with pytest.raises(ForeignFileError, match="run/plugins: is a link"):
        jstep.train(
            STEP, state, lambda step: jnp.ones(()), 2, hooks=[hook], progress=False, logdir=run
        )
    assert not os.listdir(elsewhere)


@pytest.mark.parametrize(
    "places",
    [
        {"checkpoint_dir": "~/run", "logdir": "~/run/link"},
        {"checkpoint_dir": "~/run/link", "logdir": "~/run"},
        {"checkpoint_dir": "~/run/link/model", "logdir": "~/run"},
        {"logdir": "~/run", "compile_cache": "~/run/link"},
    ],
)
def test_no_directory_of_a_run_is_behind_a_link_below_another_one(tmp_path, monkeypatch, places):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    (run / "link").symlink_to(elsewhere)
    monkeypatch.setenv("HOME", str(tmp_path))
    state = jstep.TrainState.create({"w": 1.0}, OPTIMIZER)
    with pytest.raises(ForeignFileError, match="run/link: is a link"):
        jstep.train(STEP, state, lambda step: jnp.ones(()), 2, progress=False, **places)
    assert not os.listdir(elsewhere)


class BecomesLink(jstep.Hook):
    """Somebody replaces a directory by a link after a save, as they may write to the directory
    above it."""

    def __init__(self, directory, elsewhere, saved):
        self.directory, self.elsewhere, self.saved = directory, elsewhere, saved

    def after_step(self, step, state, metrics):
        if step == 3:
            wait_until(lambda: all(path.exists() for path in self.saved))
            shutil.copytree(self.directory, self.elsewhere)
            os.rename(self.directory, self.directory.with_name("moved"))
            self.directory.symlink_to(self.elsewhere)
            self.before = contents(self.elsewhere)


@pytest.mark.parametrize("name", ["run/starts", "run/best", "run/logs", "run"])
def test_nothing_is_written_through_a_link_that_appears_in_mid_run(tmp_path, name):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    swap = BecomesLink(tmp_path / name, elsewhere, [run / "model-2", run / "best" / "best-2"])
    with contextlib.suppress(jstep.CheckpointError):  # for a checkpoint there is nowhere to go
        train_with_best(run, 8, hooks=[swap], save_checkpoint_steps=2)
    assert contents(elsewhere) == swap.before


def test_the_best_checkpoint_of_another_run_stays(tmp_path):
    """Two runs keep their best in one directory, outside of both."""
    train_with_best(tmp_path / "a", 4, best=tmp_path / "bests")
    train_with_best(tmp_path / "b", 12, best=tmp_path / "bests")
    names = sorted(path.name for path in (tmp_path / "bests").iterdir() if path.is_dir())
    assert names == ["best-12", "best-4"]
    train_with_best(tmp_path / "b", 14, best=tmp_path / "bests")
    names = sorted(path.name for path in (tmp_path / "bests").iterdir() if path.is_dir())
    assert "best-4" in names


def train_with_best(run, last, best=None, hooks=(), **changes):
    """A run whose loss falls with the step."""
    keeps = jstep.KeepBest(best or run / "best", "loss", mode="min")
    evaluate = jstep.EvaluationHook(
        lambda state: {"loss": -float(state.global_step)}, every_n_steps=2, callbacks=[keeps]
    )
    state = jstep.TrainState.create({"w": 0.0}, OPTIMIZER)
    options = {
        "checkpoint_dir": run,
        "logdir": run / "logs",
        "log_steps": None,
        "progress": False,
    } | changes
    jstep.train(
        STEP, state, lambda step: jnp.float32(1.0), last, hooks=[evaluate, *hooks], **options
    )
