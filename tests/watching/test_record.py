"""The record of a run: what the file of a start holds, who writes it, and when."""

import errno
import json
import logging
import os
import time

import jax.numpy as jnp
import numpy as np
import processes
import pytest
from doubles import raising
from points import mean
from waiting import wait_until

import jstep
from jstep.record import starts
from jstep.record.starts import load_setup, read_starts
from jstep.stores.owners import this_process
from jstep.watching import recorder
from jstep.watching.record_numbers import RecordNumbers

optimizer, train_step = mean(0.1)


def train(where, last_step, batches=None, **options):
    state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
    batches = [np.ones(3, np.float32)] * 20 if batches is None else batches
    return jstep.train(
        train_step, state, batches, last_step, checkpoint_dir=where, progress=False, **options
    )


def record(where, prefix="model"):
    return read_starts(str(where))[prefix]


def test_a_start_says_what_it_was_and_did(tmp_path):
    hook = jstep.EvaluationHook(lambda state: {"accuracy": 0.5}, every_n_steps=4, callbacks=[
        jstep.KeepBest(tmp_path / "best", "accuracy", mode="max")
    ])  # fmt: skip
    train(
        tmp_path,
        8,
        config={"lr": 0.1},
        hooks=[hook],
        save_checkpoint_steps=4,
        logdir=tmp_path / "logs",
    )
    (start,) = record(tmp_path)
    assert (start["prefix"], start["number"], start["step"], start["examples"]) == (
        "model",
        1,
        [0, 8],
        24,
    )
    assert (start["process"], start["directory"]) == (this_process(), str(tmp_path))
    assert (start["logdir"], start["last_step"], start["config"]) == (
        str(tmp_path / "logs"),
        8,
        {"lr": 0.1},
    )
    assert (start["devices"], start["parameters"], start["end"]) == ("1×cpu", 3, ["finished", ""])
    assert (start["parent"], start["copied"], start["stalls"], start["exception"]) == (
        None,
        False,
        [],
        None,
    )
    assert start["values"]["eval/accuracy"] == 0.5
    assert start["values"]["learning_rate"] == pytest.approx(0.1)
    assert [best[:2] for best in start["best"].values()] == [[0.5, 4]]
    assert [saved[0] for saved in start["saved"]] == [4, 8]
    assert [saved[2] for saved in start["saved"]] == [12, 24]
    assert start["saved"][0][3] == pytest.approx(0.1)
    assert abs(start["began"] + sum(start["seconds"].values()) - start["now"]) < 1
    setup = load_setup(str(tmp_path), start)["setup"]
    assert (setup["step"], setup["state"]["params"], setup["batches"]["length"]) == (0, 3, 20)
    (program,) = setup["programs"]
    assert (program["stage"], len(program["hash"])) == (0, 32)
    assert program["hyperparameters"] == {"learning_rate": 0.1}
    extra = jstep.Saver(tmp_path).extra(8)
    assert (extra["config"], extra["run"]) == ({"lr": 0.1}, start["run"])


def test_later_starts_add_up(tmp_path):
    for last_step in (4, 6, 6):
        train(tmp_path, last_step)
    first, second, idle = record(tmp_path)
    assert [start["step"] for start in (first, second, idle)] == [[0, 4], [4, 6], [6, 6]]
    assert first["run"] == second["run"] == idle["run"]
    assert idle["values"] == second["values"] != {}


def test_a_start_that_is_refused_has_no_file_and_one_whose_first_batch_fails_has(tmp_path):
    with pytest.raises(TypeError):
        train(tmp_path / "a", 2, config=3)
    with pytest.raises(FileNotFoundError):
        train(tmp_path / "b", 2, start_from=tmp_path / "missing")
    assert not (tmp_path / "a").exists()
    assert read_starts(str(tmp_path / "b")) == {}
    with pytest.raises(KeyError, match="no batch"):
        train(tmp_path / "c", 2, batches=raising(KeyError("no batch")))
    (start,) = record(tmp_path / "c")
    assert (start["end"], start["exception"]) == (["failed", "KeyError: 'no batch'"], "KeyError")
    assert start["step"] == [0, 0]


def test_the_record_of_a_run_without_checkpoints_is_in_its_logdir(tmp_path):
    train(None, 3, logdir=tmp_path)
    assert record(tmp_path)[0]["step"] == [0, 3]
    assert len(load_setup(str(tmp_path), record(tmp_path)[0])["setup"]["programs"]) == 1
    train(None, 3)


def test_a_run_may_change_its_folder(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)  # which is undone after the test
    (tmp_path / "b").mkdir()
    hook = jstep.every(1, lambda *_: os.chdir(tmp_path / "b"))
    train("a", 4, hooks=[hook], save_checkpoint_steps=2)
    (start,) = record(tmp_path / "a")
    assert (start["end"][0], start["step"]) == ("finished", [0, 4])
    assert "moved or deleted" not in caplog.text


def test_it_is_replaced_every_second_and_before_a_checkpoint(tmp_path, monkeypatch):
    seen, flushed = [], []
    replace = starts.replace_file

    def noting(path, data, *, flush):
        if path.endswith(".000001.json"):
            flushed.append((flush, json.loads(data)["step"], os.path.exists(tmp_path / "model-4")))
        replace(path, data, flush=flush)

    monkeypatch.setattr(starts, "replace_file", noting)

    def slow(step, state, metrics):
        if step == 6:
            time.sleep(1.6)
            seen.append(record(tmp_path)[0])

    train(tmp_path, 8, hooks=[jstep.every(1, slow)], save_checkpoint_steps=4)
    assert (seen[0]["step"], seen[0]["end"]) == ([0, 6], None)
    assert seen[0]["saved"][-1][0] == 4
    before_first = [step for flush, step, is_there in flushed if flush and not is_there]
    assert before_first
    assert before_first[-1][1] >= 4
    assert len([flush for flush, *_ in flushed if flush]) == 3  # two checkpoints, and the end
    assert flushed[-1][0]


def test_one_failure_in_the_thread_that_writes_does_not_end_the_record(
    tmp_path, monkeypatch, caplog
):
    calls = []

    def failing(self):
        calls.append(time.monotonic())
        if len(calls) < 3:
            raise RuntimeError("once")

    monkeypatch.setattr(RecordNumbers, "sample", failing)

    def slow(step, state, metrics):
        wait_until(lambda: len(calls) > 3 and record(tmp_path)[0]["step"] == [0, 2])

    train(tmp_path, 2, hooks=[jstep.every(2, slow)])
    messages = [one.getMessage() for one in caplog.records]
    assert [message for message in messages if "once" in message] == [
        "the record of this run could not be written at one second, at least: RuntimeError: once"
    ]


PROGRAM = """
import os, signal, sys, time
import jax.numpy as jnp, numpy as np
import jstep

optimizer = jstep.gradient_descent(0.1)
step = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer)
state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)

def batch(at):
    if at == 5:
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return np.ones(3, np.float32)

jstep.train(step, state, batch, 9, checkpoint_dir=sys.argv[1], save_checkpoint_steps=3, progress=False)
"""  # noqa: E501


def test_a_killed_start_has_all_but_its_last_second_and_gets_its_end_from_the_next(tmp_path):
    assert processes.run_program(PROGRAM, tmp_path)[0] == -9
    (start,) = record(tmp_path)
    assert (start["end"], start["step"]) == (None, [0, 5])
    assert start["values"]["loss"] < 1
    (tmp_path / "starts" / ".model.000001.json.left.tmp").touch()
    train(tmp_path, 6)
    killed, later = record(tmp_path)
    assert killed == {**start, "end": ["killed", ""]}
    assert (later["step"], later["number"]) == ([3, 6], 2)


def test_the_temporary_files_of_a_killed_start_go_at_the_next(tmp_path):
    program = "from jstep.stores.owners import new_token; print(new_token())"
    dead = processes.run_program(program)[1].split()[-1]
    (tmp_path / "starts").mkdir()
    for name in (f".model.000001.json.{dead}.tmp", f".model.000001.card.json.{dead}.tmp"):
        (tmp_path / "starts" / name).write_text("{")
    train(tmp_path, 2)
    names = ["model.000001.card.json", "model.000001.json", "model.000001.programs"]
    assert sorted(os.listdir(tmp_path / "starts")) == names


def test_two_living_starts_in_one_logdir_have_a_file_each(tmp_path):
    def nested(step, state, metrics):
        if step == 2:
            train(None, 3, logdir=tmp_path)

    train(None, 4, logdir=tmp_path, hooks=[jstep.every(1, nested)])
    outer, inner = record(tmp_path)
    assert (outer["step"], inner["step"], outer["end"], inner["end"][0]) == (
        [0, 4],
        [0, 3],
        ["finished", ""],
        "finished",
    )
    assert outer["run"] != inner["run"]


@pytest.mark.parametrize("what", ["make_directories", "replace_file"])
def test_a_full_disk_is_one_warning_and_ends_no_run(what, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(starts, what, raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    train(tmp_path, 4, save_checkpoint_steps=2)
    assert jstep.Saver(tmp_path).all_steps() == [2, 4]
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ] == [
        f"{tmp_path}: the record of this run cannot be written: [Errno 28] No space left on device"
    ]


def test_a_directory_that_is_renamed_while_the_run_goes_on_is_not_made_again(tmp_path, caplog):
    def batches(step):
        if step == 7:
            wait_until(lambda: jstep.latest_checkpoint(tmp_path / "a"))
            os.rename(tmp_path / "a", tmp_path / "b")
        return np.ones(3, np.float32)

    with pytest.raises(jstep.CheckpointError, match="renamed"):
        train(tmp_path / "a", 20, batches, save_checkpoint_steps=5, save_checkpoint_secs=None)
    assert not (tmp_path / "a").exists()
    assert f"{tmp_path}/a/starts was moved or deleted" in caplog.text
    train(tmp_path / "b", 20, lambda step: np.ones(3, np.float32))
    first, second = record(tmp_path / "b")
    assert (
        (first["run"], first["copied"])
        == (second["run"], second["copied"])
        == (first["run"], False)
    )


def test_an_error_of_the_setup_ends_no_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recorder, "describe_setup", lambda *args: 1 / 0)
    train(tmp_path, 2)
    assert "this run could not be recorded: ZeroDivisionError" in caplog.text
    assert record(tmp_path)[0]["end"] == ["finished", ""]


def test_an_invalid_newest_start_costs_only_itself(tmp_path):
    train(tmp_path, 2)
    train(tmp_path, 4)
    (tmp_path / "starts" / "model.000002.json").write_text("{")
    train(tmp_path, 6)
    first, invalid, third = record(tmp_path)
    assert invalid["problem"]
    assert third["run"] == first["run"]


def test_a_run_of_which_a_hook_cannot_close_has_failed(tmp_path):
    class Closes(jstep.Hook):
        def close(self):
            raise OSError("the results cannot be written")

    with pytest.raises(OSError, match="the results"):
        train(tmp_path, 4, hooks=[Closes()])
    (start,) = record(tmp_path)
    assert (start["end"], start["exception"]) == (
        ["failed", "OSError: the results cannot be written"],
        "OSError",
    )
    assert (start["step"], start["problem"]) == ([0, 4], "")


SIGNALLED = """
import os, signal, sys, threading, time
import jax.numpy as jnp, numpy as np
import jstep
from jstep.watching import recorder

def slow():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)

recorder.Recorder.on_close = lambda self: self._tasks.add(slow)
optimizer = jstep.gradient_descent(0.1)
step = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer)
state = jstep.TrainState.create({"w": jnp.zeros(3)}, optimizer)
jstep.train(step, state, lambda at: np.ones(3, np.float32), 3, checkpoint_dir=sys.argv[1], progress=False)
"""  # noqa: E501


def test_a_signal_while_the_record_closes_is_143_and_the_run_is_finished(tmp_path):
    assert processes.run_program(SIGNALLED, tmp_path)[0] == 143
    (start,) = record(tmp_path)
    assert (start["end"], start["step"]) == (["finished", ""], [0, 3])


def test_a_secret_is_nowhere(tmp_path, monkeypatch, caplog):
    secret = "hunter2-hunter2-hunter2"
    monkeypatch.setattr("sys.argv", ["p.py", "--password", secret])
    with caplog.at_level(logging.INFO, "jstep"):
        for width in (1, 2):
            config = {"a": {"password": secret + str(width)}, "hf_token": secret, "width": width}
            train(tmp_path, 2 * width, logdir=tmp_path, config=config)

        refused = OSError(f"postgres://me:{secret}@host/db is down, token={secret}")
        with pytest.raises(OSError, match="is down"):
            train(tmp_path, 6, batches=raising(refused))
    caplog.clear()
    assert record(tmp_path)[-1]["end"][1] == (
        "OSError: postgres://host/db is down, token=(not recorded)"
    )
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(paths) > 5
    assert not [path for path in paths if secret.encode() in path.read_bytes()]
