"""What `runs` says of runs that were started several times: what was trained, what was refused,
copies, lineage."""

import contextlib
import json
import os
import re
import shutil
import signal
import time

import forked
import jax.numpy as jnp
import numpy as np
import pytest
from trained_runs import evaluation, only, train
from written_runs import TIME, start, starts_of, write_start

import jstep
from jstep.core import threads
from jstep.look import cli, run_folder
from jstep.record.stall_files import exit_reason
from jstep.watching import recorder


def shown(capsys, *arguments):
    code = cli.main(["runs", *map(str, arguments)])
    return code, capsys.readouterr().out


def as_json(capsys, *arguments):
    code = cli.main(["runs", *map(str, arguments), "--json"])
    assert code == 0
    return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))


def raising(step):
    raise OSError(f"no batch {step}: " + "word " * 300)


def test_stalls_are_read_only_for_starts_that_were_killed(tmp_path, monkeypatch):
    """Below a URL, each reading is a request for a list."""
    asked = list[float]()

    def counting(where, prefix, since):
        asked.append(since)
        return exit_reason(where, prefix, since)

    monkeypatch.setattr(run_folder, "exit_reason", counting)
    for number in range(1, 5):
        end = {"end": None} if number == 3 else {}
        write_start(
            tmp_path, start(tmp_path, number, began=TIME + number, step=[number, number + 1], **end)
        )
    assert [one["status"] for one in only(tmp_path).starts] == [
        "finished",
        "finished",
        "killed",
        "finished",
    ]
    assert {*asked} == {TIME + 3}


def test_a_start_that_is_refused_changes_nothing_but_refused(tmp_path, capsys):
    train(tmp_path, 10, config={"lr": 0.1})
    before = only(tmp_path)
    assert (before.refused, before.starts_count) == (None, 1)
    assert (before.starts[0]["first"], before.starts[0]["last"]) == (0, 10)
    began = time.time()
    with pytest.raises(OSError, match="no batch"):
        train(tmp_path, 20, config={"lr": 0.2}, batches=raising)
    after = only(tmp_path)
    same = vars(before).keys() - {
        "refused",
        "starts",
        "starts_count",
        "ended",
        "wall_seconds",
        "goodput",
    }
    assert {name: getattr(after, name) for name in same} == {
        name: getattr(before, name) for name in same
    }
    refused = after.refused
    assert refused.keys() == {"time", "status", "reason", "exception", "config"}
    assert (refused["status"], refused["exception"], refused["config"]) == (
        "failed",
        "OSError",
        {"lr": 0.2},
    )
    assert refused["reason"].startswith("OSError: no batch 10: word word")
    assert refused["reason"].endswith("…")
    assert 900 < len(refused["reason"]) <= 1000
    assert began < refused["time"] <= time.time()
    code, out = shown(capsys, tmp_path)
    assert code == 0
    assert re.search("finished; refused at [-0-9]+ [:0-9]+: OSError: no batch 10", out)
    assert after.wall_seconds > before.wall_seconds
    page = jstep.report(tmp_path).html
    assert "start 2: no step, failed: OSError: no batch 10" in page
    assert "lr = 0.1" in page
    assert "lr = 0.2" not in page.partition("Warnings")[0]


@pytest.mark.thorough(except_for=["another width"])
@pytest.mark.parametrize("kind", ["another width", "nothing is left", "a signal"])
def test_what_else_is_refused(kind, tmp_path):
    train(tmp_path, 10)
    if kind == "another width":
        with pytest.raises(ValueError, match="w"):
            train(tmp_path, 20, width=3)
        expected = "failed", "ValueError"
    elif kind == "nothing is left":
        train(tmp_path, 5)
        expected = "finished", None
    else:

        def interrupted(step):
            os.kill(os.getpid(), signal.SIGINT)
            return jnp.ones(4)

        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, 20, batches=interrupted)
        expected = "interrupted", None
    run = only(tmp_path)
    assert len({start["commit"] for start in run.starts}) == 1
    assert (run.status, run.step, run.last_step, run.exception) == ("finished", 10, 10, None)
    assert (run.refused["status"], run.refused["exception"]) == expected
    train(tmp_path, 20)
    assert only(tmp_path).refused is None
    assert [(start["first"], start["last"]) for start in only(tmp_path).starts] == [
        (0, 10),
        (None, None),
        (10, 20),
    ]


@pytest.mark.thorough
def test_a_run_of_which_no_start_took_a_step(tmp_path):
    for message in ("first", "second"):

        def broken(step, message=message):
            raise ValueError(message)

        with pytest.raises(ValueError, match=message):
            train(tmp_path, 10, batches=broken, config={"of": message})
    run = only(tmp_path)
    assert (run.status, run.reason, run.exception) == ("failed", "ValueError: second", "ValueError")
    assert (run.refused, run.step, run.config) == (None, 0, {"of": "second"})


def test_examples(tmp_path):
    data = np.ones(64, np.float32)
    train(tmp_path / "a", 12, batches=jstep.batches(data, 4, seed=0))
    assert only(tmp_path / "a").examples == 48
    shutil.rmtree(tmp_path / "a" / "model-12")
    train(tmp_path / "a", 15, batches=jstep.batches(data, 8, seed=0))
    assert only(tmp_path / "a").examples == 40 + 40
    train(tmp_path / "b", 5, batches=lambda step: jnp.ones(()))
    assert only(tmp_path / "b").examples is None


def test_the_best_is_what_is_on_the_disk(tmp_path):
    train(tmp_path / "run", 15, evaluation(tmp_path / "run" / "best", {5: 1.0, 10: 3.0, 15: 2.0}))
    run = only(tmp_path / "run")
    assert run.best == {"eval/score": (3.0, 10)}
    assert run.best_checkpoints == {"eval/score": str(tmp_path / "run/best/best-10")}
    branch = train(tmp_path / "branch", 12, start_from=run.best_checkpoints["eval/score"])
    assert int(branch.global_step) == 12
    assert only(tmp_path / "branch").parent_run == run.run_id
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert only(tmp_path / "moved").best_checkpoints == {
        "eval/score": str(tmp_path / "moved/best/best-10")
    }
    # Another run takes its place.
    train(tmp_path / "run", 10, evaluation(tmp_path / "run" / "best", {5: 1.0, 10: 9.0}))
    assert only(tmp_path / "moved").best == {"eval/score": (3.0, 10)}
    assert only(tmp_path / "moved").best_checkpoints == {
        "eval/score": str(tmp_path / "moved/best/best-10")
    }
    shutil.rmtree(tmp_path / "moved/best/best-10")
    run = only(tmp_path / "moved")
    assert run.best == run.best_checkpoints == {}


@pytest.mark.thorough
def test_a_save_of_the_best_that_fails_is_not_the_best(tmp_path, monkeypatch):
    hook = evaluation(tmp_path / "best", {5: 1.0, 10: 3.0})
    save = jstep.Saver.save

    def failing(saver, state, *args, **kwargs):
        if saver.prefix == "best" and int(state.global_step) == 10:
            raise OSError("full")
        return save(saver, state, *args, **kwargs)

    monkeypatch.setattr(jstep.Saver, "save", failing)
    with pytest.raises(OSError, match="full"):
        train(tmp_path / "run", 10, hook)
    run = only(tmp_path / "run")
    assert run.best == {"eval/score": (1.0, 5)}


def test_differences_as_json(tmp_path, capsys):
    for name, lr in (("a", 0.1), ("b", 0.2)):
        train(tmp_path / name, 5, config={"lr": lr, "dir": str(tmp_path / name), "seed": 1})
    first, second = as_json(capsys, tmp_path, "--differences")
    assert first["differences"] == {"config: lr": 0.1}
    assert second["differences"] == {"config: lr": 0.2}
    assert "differences" not in as_json(capsys, tmp_path)[0]
    with pytest.raises(OSError, match="no batch"):
        train(tmp_path / "a", 10, config={"lr": 0.9, "dir": "x", "seed": 1}, batches=raising)
    assert as_json(capsys, tmp_path, "--differences")[0]["differences"] == {"config: lr": 0.1}, (
        "what was trained"
    )


def test_after_a_hundred_starts(tmp_path):
    train(tmp_path / "a", 5, config={"width": 3})
    train(tmp_path / "b", 5, config={"width": 3})
    (first,) = starts_of(tmp_path / "a")
    for number in range(2, 112):
        later = {"config": {"width": number}, "step": None, "end": ["failed", ""], "seconds": {}}
        write_start(tmp_path / "a", first | later | {"number": number})
    first, _second = jstep.runs(tmp_path)
    assert (first.status, first.step, first.starts_count, len(first.starts)) == (
        "finished",
        5,
        111,
        100,
    )
    assert (first.config, first.refused["status"]) == ({"width": 3}, "failed")
    assert first.wall_seconds == pytest.approx(jstep.goodput(tmp_path / "a").total, abs=1e-3)


def test_a_start_that_is_stopped_while_it_opens_is_recorded(tmp_path):
    """Whenever the signal comes."""
    # A signal while JAX reads a compiled program would leave its file open.
    train(tmp_path / "before", 5)
    for n in range(12):
        with contextlib.suppress(jstep.Preempted):
            train(tmp_path / f"{n}", 5, stop_secs=0.004 * n + 0.001)
    for run in jstep.runs(tmp_path):
        assert run.error is None
        assert run.status in ("interrupted", "finished")
        assert run.exception is None


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_signal_while_the_thread_that_opens_the_record_starts(tmp_path, monkeypatch, has_begun):
    start, read = threads.Thread.start, recorder.read_starts

    def slow(*args):
        time.sleep(0.1)
        return read(*args)

    def interrupted(thread):
        is_opening = thread.name == "jstep-record-open"
        if has_begun or not is_opening:
            start(thread)
        if is_opening:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(threads.Thread, "start", interrupted)
    monkeypatch.setattr(recorder, "read_starts", slow)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 5)
    assert [run.status for run in jstep.runs(tmp_path)] == ["interrupted"] * has_begun


# Copies and moves.


def test_a_copy_that_is_continued_is_a_run_of_its_own(tmp_path):
    original, copy = tmp_path / "original", tmp_path / "copy"
    train(original, 10)
    shutil.copytree(original, copy)
    found = {os.path.basename(run.path): run for run in jstep.runs(tmp_path)}
    assert [(run.status, run.step) for run in found.values()] == [("finished", 10)] * 2
    began = time.time()
    train(copy, 15)
    train(copy, 20)
    found = {os.path.basename(run.path): run for run in jstep.runs(tmp_path)}
    assert found["copy"].parent == (str(original / "model-10"), 10)
    assert found["copy"].parent_run == found["original"].run_id != found["copy"].run_id
    assert [(start["first"], start["last"]) for start in found["copy"].starts] == [
        (10, 15),
        (15, 20),
    ]
    assert found["copy"].starts_count == 2
    assert (found["original"].step, found["original"].starts_count) == (10, 1)
    assert found["copy"].goodput == pytest.approx(jstep.goodput(copy).fraction)
    assert jstep.goodput(copy).starts == 2
    own = sum(start["ended"] - start["began"] for start in found["copy"].starts)
    assert found["copy"].wall_seconds == pytest.approx(own, abs=0.1)
    assert found["copy"].starts[-1]["ended"] > began
    assert str(jstep.runs(tmp_path)).count("└─ copy @10") == 1


@pytest.mark.thorough
def test_a_copy_whose_first_start_saved_nothing(tmp_path):
    train(tmp_path / "original", 10)
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    with pytest.raises(OSError, match="no batch"):
        train(tmp_path / "copy", 20, batches=raising)
    (first,) = jstep.runs(tmp_path / "copy")
    train(tmp_path / "copy", 20)
    (second,) = jstep.runs(tmp_path / "copy")
    assert first.run_id == second.run_id
    assert second.parent == (str(tmp_path / "original/model-10"), 10)
    assert [(start["first"], start["last"]) for start in second.starts] == [(None, None), (10, 20)]


def test_a_copy_without_checkpoints(tmp_path):
    options = {"checkpoint_dir": None, "save_checkpoint_steps": None}
    train(None, 5, logdir=tmp_path / "a", **options)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    train(None, 7, logdir=tmp_path / "b", **options)
    first, second = jstep.runs(tmp_path)
    assert (first.starts_count, second.starts_count) == (1, 1)
    assert second.run_id != first.run_id


@pytest.mark.thorough
def test_a_run_that_was_moved_is_the_same_run(tmp_path):
    train(tmp_path / "a", 10)
    before = only(tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    train(tmp_path / "b", 15)
    run = only(tmp_path / "b")
    assert (run.run_id, run.parent, run.starts_count) == (before.run_id, None, 2)


@pytest.mark.thorough(except_for=["False"])
@pytest.mark.parametrize("together", [True, False])
def test_parents_are_found_by_the_name_of_the_run(together, tmp_path):
    above = tmp_path / "above"
    train(above / "trunk", 10)
    train(above / "deep" / "branch", 15, start_from=above / "trunk")
    if together:
        shutil.move(above, tmp_path / "elsewhere")
    else:
        shutil.move(above / "trunk", above / "renamed")
    found = jstep.runs(tmp_path)
    assert [line.partition(" ")[0] for line in str(found).splitlines()[1:]][1] == "└─"
    assert found[1].parent_run == found[0].run_id


@pytest.mark.thorough
def test_a_new_run_in_the_place_of_the_parent_is_no_parent(tmp_path):
    train(tmp_path / "trunk", 10)
    train(tmp_path / "branch", 15, start_from=tmp_path / "trunk")
    shutil.move(tmp_path / "trunk", tmp_path / "z")
    train(tmp_path / "trunk", 5)
    table = str(jstep.runs(tmp_path)).splitlines()
    names = [row.partition("finished")[0].split(" @")[0].rstrip() for row in table[1:]]
    assert names == ["trunk", "z (was trunk)", "└─ branch"]


# Real processes.

PROGRAM = """
import os, signal, sys, time
import jax.numpy as jnp, jstep
optimizer = jstep.gradient_descent(0.25)
step = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), optimizer)
def batches(n):
    if n == int(sys.argv[2]):
        print("there", flush=True)
        time.sleep(600)
    return jnp.ones(4)
state = jstep.TrainState.create({"w": jnp.zeros(1)}, optimizer)
jstep.train(step, state, batches, 100, checkpoint_dir=sys.argv[1], save_checkpoint_steps=5, config={"at": sys.argv[2]})
"""  # noqa: E501


@pytest.fixture
def waiting(request):
    """A function that starts a program, which waits for a batch when it returns."""
    programs = []

    def start(where, at):
        program = forked.start(PROGRAM, where, at)
        programs.append(program)
        assert program.stdout.readline() == "there\n"
        return program

    yield start
    for program in programs:
        program.kill()
        program.communicate(60)


def test_a_living_start_and_its_copy(waiting, tmp_path):
    """Also where it takes no step yet, after a start that did; it is never refused."""
    original = tmp_path / "original"
    train(original, 10, config={"at": "before"})
    program = waiting(original, 10)
    run = only(original)
    assert (run.status, run.pid, run.ended, run.config) == (
        "running",
        program.pid,
        None,
        {"at": "before"},
    )
    assert run.starts[-1]["config"] == {"at": "10"}
    assert (run.starts[-1]["ended"], run.starts[-1]["first"], run.starts[-1]["status"]) == (
        None,
        None,
        "running",
    )
    assert run.refused is None
    shutil.copytree(original, tmp_path / "copy")
    copy = only(tmp_path / "copy")
    assert (copy.status, copy.step) == ("finished", 10)
    assert copy.refused["reason"] == f"a copy of {original}"
    os.rename(original, tmp_path / "moved")
    assert only(tmp_path / "moved").status == "running"
    program.kill()
    program.communicate(60)
    run = only(tmp_path / "moved")
    assert (run.status, run.refused["status"]) == ("finished", "killed")
