"""The starts of a run as a table, as lines and as JSON: `runs --starts`, `diff RUN`, `goodput` and
the page."""

import json
import os
import re
import shutil

import jax.numpy as jnp
import pytest
from points import mean
from written_runs import change, write_run

import jstep
from jstep.look import cli
from jstep.record.starts import read_starts

optimizer, train_step = mean(0.25)


def train(where, last_step, batches=lambda step: jnp.ones(4), **options):
    state = jstep.TrainState.create({"w": jnp.zeros(1)}, optimizer)
    options = {"checkpoint_dir": where, "save_checkpoint_steps": 5, "progress": False} | options
    return jstep.train(train_step, state, batches, last_step, **options)


@pytest.fixture
def moved(tmp_path):
    """A run with a start that failed before a step, one in another directory, and two that cannot
    be read."""
    train(tmp_path / "base", 10, config={"lr": 0.1})
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "base", 20, batches=lambda step: 1 / 0, config={"lr": 0.2})
    os.rename(tmp_path / "base", tmp_path / "mix")
    train(tmp_path / "mix", 20, config={"lr": 0.3})
    (tmp_path / "mix/starts/model.000004.json").touch()
    (tmp_path / "mix/starts/model.000005.json").write_text("{")
    return tmp_path / "mix"


def shown(capsys, *arguments, code=0):
    assert cli.main([str(word) for word in arguments]) == code
    return capsys.readouterr().out


def test_each_start_is_a_row(moved, capsys):
    rows = json.loads(shown(capsys, "runs", moved, "--starts", "--json"))
    columns = ("number", "first", "last", "status", "saved")
    assert [tuple(row[name] for name in columns) for row in rows] == [
        (1, 0, 10, "finished", 10), (2, None, None, "failed", None), (3, 10, 20, "finished", 20),
        (4, None, None, "unreadable", None), (5, None, None, "unreadable", None),
    ]  # fmt: skip
    assert [os.path.basename(row["directory"] or "") for row in rows] == [
        "base",
        "base",
        "mix",
        "",
        "",
    ]
    assert "config: lr: 0.1 before, 0.2 now" in rows[1]["changes"]
    assert "config: lr: 0.2 before, 0.3 now" in rows[2]["changes"]
    assert rows[2]["milliseconds"]["stepping"] > 0
    assert rows[0]["host_peak_bytes"] >= rows[0]["host_bytes"] > 10**7
    out = shown(capsys, "runs", moved, "--starts")
    assert "start 4 could not be written, as on a full disk" in out
    assert "start 5 cannot be read: it is no JSON" in out
    assert f"it was in {moved.parent}/base, then in {moved}" in out
    assert out.count("lr: 0.1 before, 0.2 now") == 1


def test_no_command_leaves_a_start_out(moved, capsys):
    """The same starts, changes and problems in all of them."""
    for text in (
        shown(capsys, "diff", moved),
        shown(capsys, "goodput", moved),
        jstep.report(moved).html,
    ):
        assert "start 4 could not be written, as on a full disk" in text
        assert "start 5 cannot be read: it is no JSON" in text
    rows = json.loads(shown(capsys, "runs", moved, "--starts", "--json"))
    of_diff = json.loads(shown(capsys, "diff", moved, "--json"))["starts"]
    assert [{"version": 1, **row, "run": "mix"} for row in of_diff] == rows


def test_the_table_of_runs_names_the_newest_checkpoint_and_former_names(moved, capsys):
    (run,) = jstep.runs(moved)
    assert (run.newest_checkpoint, run.former_paths) == (
        f"{moved}/model-20",
        [f"{moved.parent}/base"],
    )
    head, row, *below = shown(capsys, "runs", moved).splitlines()
    assert head.split()[:4] == ["run", "status", "step", "saved"]
    assert row.split()[:6] == ["mix", "(was", "base)", "finished", "20/20", "20"]
    assert below == ["mix: finished: its newest start cannot be read: it is no JSON"]


def test_a_newest_checkpoint_that_is_corrupted_is_not_saved(tmp_path, capsys):
    write_run(tmp_path)
    with jstep.Saver(tmp_path, max_to_keep=None) as saver:
        for step in (1, 2, 3, 4):
            saver.save({"global_step": step})
    os.truncate(tmp_path / "model-3/manifest.json", 50)
    os.remove(tmp_path / "model-4/manifest.ocdbt")
    _, row, note = shown(capsys, "runs", tmp_path).splitlines()
    assert row.split()[3] == "2"
    assert note.endswith(
        "finished: model-3 is corrupted; model-4 is corrupted: manifest.ocdbt is missing"
    )
    (run,) = jstep.runs(tmp_path)
    assert (run.status, run.newest_checkpoint) == ("finished", f"{tmp_path}/model-2")
    assert "<li>model-3 is corrupted</li>" in jstep.report(tmp_path).html
    shutil.copytree(tmp_path / "model-2", tmp_path / "model-5")
    (run,) = jstep.runs(tmp_path)
    assert run.newest_checkpoint == f"{tmp_path}/model-2"
    assert "model-5: its name says step 5, and it holds step 2" in run.reason


def test_a_start_that_was_killed_took_at_least_the_steps_of_its_last_second(tmp_path, capsys):
    write_run(tmp_path, 1, step=[0, 394], end=None)
    write_run(tmp_path, 2, step=[390, 500])
    out = shown(capsys, "runs", tmp_path, "--starts")
    assert re.findall(r"to ([a-z ]*\d+)", out) == ["at least 394", "500"]
    assert "steps 0 to at least 394, killed" in jstep.report(tmp_path).html


def test_parts_of_a_step_that_became_slower(tmp_path, capsys):
    for number, waiting in ((1, 1.2), (2, 1.3), (3, 61.0)):
        span, seconds = (
            [500 * number - 500, 500 * number],
            {"stepping": 5.0, "waiting": waiting / 2, "hooks": 1e-4},
        )
        write_run(tmp_path, number, step=span, seconds=seconds)
    line = "waiting: 1.3 → 61 ms a step from step 1000 (start 3) on"
    assert jstep.goodput(tmp_path).notes == [line]
    assert line in shown(capsys, "goodput", tmp_path)
    assert line in jstep.report(tmp_path).html
    change(tmp_path, 3, seconds={"stepping": 5.0, "waiting": 1.0})
    assert jstep.goodput(tmp_path).notes == []


def test_hooks_beside_which_the_device_computes(tmp_path):
    write_run(tmp_path, 1, seconds={"stepping": 6.0, "hooks": 4.0}, computing=3.0)
    assert "    computing  3.000 s   30.0 %" in str(jstep.goodput(tmp_path))


def test_a_save_that_fails_is_not_saved(tmp_path, monkeypatch):
    save = jstep.Saver.save

    def failing(saver, state, *args, **kwargs):
        if int(state.global_step) == 10:
            raise OSError("No space left on device")
        return save(saver, state, *args, **kwargs)

    monkeypatch.setattr(jstep.Saver, "save", failing)
    with pytest.raises(OSError, match="No space"):
        train(tmp_path, 20)
    (run,) = jstep.runs(tmp_path)
    assert run.newest_checkpoint == f"{tmp_path}/model-5"
    assert [saved[0] for saved in read_starts(str(tmp_path))["model"][0]["saved"]] == [5]
