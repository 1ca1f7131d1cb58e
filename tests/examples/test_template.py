"""examples/template: the Hydra template trains, is killed and resumes; a multirun and a study of
Optuna do, too."""

import csv
import shutil
import signal
import time

import numpy as np
import pytest
from comparisons import same
from processes import free_address, wait_for
from programs import finished, run, start

import jstep

for needed in ("hydra", "sklearn", "tensorboard"):
    pytest.importorskip(needed)

LONG = ("trainer.max_epochs=40", "trainer.patience=1000")  # some seconds


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def state_of(directory, prefix="model"):
    with jstep.Saver(directory, prefix=prefix) as saver:
        return saver.restore(None)


def stop(program, directory, number):
    """Send a signal to a program after the first evaluation of the run in a directory."""
    until = time.monotonic() + 120
    try:
        while not [*directory.glob("best-*")]:
            assert program.poll() is None, program.communicate(10)[1]
            assert time.monotonic() < until
            time.sleep(0.02)
        program.send_signal(number)
    except BaseException:
        program.kill()
        raise


def ended(program):
    """Wait for a program, and return what it wrote to stderr."""
    try:
        return program.communicate(120)[1]
    finally:
        program.kill()


def test_fast_dev_run_passes_through_everything_and_saves_nothing(tmp_path):
    out = run(
        "template/train.py",
        "debug=fast",
        "predict=true",
        "model.widths=[8]",
        "hydra.run.dir=runs/fast",
    )
    assert "test/acc" in out
    assert {path.name for path in (tmp_path / "runs/fast").iterdir()} == {".hydra", "train.log"}


@pytest.mark.thorough
def test_a_run_that_is_stopped_resumes_by_the_same_command(tmp_path):
    runs = tmp_path / "runs"
    program = start("template/train.py", "name=stopped", *LONG)
    stop(program, runs / "stopped", signal.SIGTERM)
    ended(program)
    assert program.returncode == 143
    first = jstep.latest_checkpoint(runs / "stopped", "model")
    out = run("template/train.py", "name=stopped", "predict=true", *LONG)
    assert f"restored {first.rpartition('/')[2]}" in (runs / "stopped/train.log").read_text()
    assert run("template/train.py", "name=whole", *LONG).splitlines()[-1] == out.splitlines()[-1]
    assert same(state_of(runs / "stopped"), state_of(runs / "whole"))

    tables = [
        (runs / name / "metrics.csv").read_text().splitlines() for name in ("stopped", "whole")
    ]
    rows = [list(csv.DictReader(table)) for table in tables]
    assert rows[0] == rows[1]
    assert [int(row["step"]) for row in rows[0]] == list(range(18, 18 * 40 + 1, 18))
    predictions = np.load(runs / "stopped/predictions.npy")
    np.testing.assert_allclose(predictions.sum(axis=1), 1.0, rtol=1e-5)
    assert len(predictions) == 297


@pytest.mark.thorough
def test_fine_tuning_begins_with_the_best_weights_and_trains_the_head_alone(tmp_path):
    runs = tmp_path / "runs"
    run("template/train.py", "trainer.max_epochs=3")
    best = state_of(runs / "digits", "best")["params"]
    for name, epochs in (("head", 1), ("all", 3)):
        run(
            "template/train.py",
            "experiment=finetune",
            f"name={name}",
            f"trainer.max_epochs={epochs}",
        )
    head, whole = (state_of(runs / name)["params"] for name in ("head", "all"))
    assert same(head["body"], best["body"])
    assert not same(head["head"], best["head"])
    assert not same(whole["body"], best["body"])


@pytest.mark.thorough
def test_two_batches_are_learned_by_heart():
    lines = run("template/train.py", "debug=overfit").splitlines()
    assert float(lines[-1].partition("'val/loss': ")[2].rstrip("}")) < 0.1


@pytest.mark.thorough
def test_two_processes_train_as_one_does(tmp_path):
    options = ("trainer.max_epochs=2", "model.dropout=0", "trainer.limit_train_batches=0.5")
    alone = run("template/train.py", "name=one", *options)
    address = free_address()
    variables = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    both = [
        start("template/train.py", "name=two", *options, env=variables | {"JAX_PROCESS_ID": str(i)})
        for i in range(2)
    ]
    one, two = wait_for(both)
    assert (one.code, two.code) == (0, 0), one.err
    numbers = [
        [float(word.strip("{},")) for word in out.splitlines()[-1].split()[1::2]]
        for out in (alone, one.out)
    ]
    np.testing.assert_allclose(*numbers, rtol=1e-3)


@pytest.mark.thorough
def test_a_multirun_that_is_stopped_resumes_by_the_same_command(tmp_path):
    sweep = ("-m", "seed=0,1", "hydra.sweep.subdir=seed-${seed}", *LONG)
    runs = tmp_path / "runs/digits-sweep"
    program = start("template/train.py", *sweep)
    stop(program, runs / "seed-1", signal.SIGTERM)
    ended(program)
    assert program.returncode == 143
    run("template/train.py", *sweep)
    found = {run.path.rpartition("/")[2]: run for run in jstep.runs(runs)}
    assert {name: (one.status, one.step) for name, one in found.items()} == {
        f"seed-{i}": ("finished", 720) for i in range(2)
    }
    run("template/train.py", "seed=1", *LONG)
    assert same(state_of(tmp_path / "runs/digits"), state_of(runs / "seed-1"))


@pytest.mark.thorough
def test_a_study_that_is_killed_resumes_its_trial_and_a_signal_ends_one_trial_alone(tmp_path):
    optuna = pytest.importorskip("optuna")
    directory, options = tmp_path / "runs/study", ("trials=3", *LONG)
    program = start("template/sweep.py", *options)
    stop(program, directory / "trial-0000", signal.SIGUSR1)
    stop(program, directory / "trial-0001", signal.SIGKILL)
    ended(program)
    assert program.returncode == -signal.SIGKILL

    done = finished("template/sweep.py", *options)
    assert done.returncode == 0, done.stderr
    storage = optuna.storages.RDBStorage(f"sqlite:///{directory}/study.db")
    trials = optuna.load_study(study_name="study", storage=storage).trials
    storage.engine.dispose()  # an open database is a warning in whichever test is next
    pruned, killed, resumed, last = trials
    assert [trial.state.name for trial in trials] == ["PRUNED", "FAIL", "COMPLETE", last.state.name]
    assert last.state.name in ("COMPLETE", "PRUNED")
    assert resumed.params == killed.params
    assert resumed.user_attrs["run"] == killed.number
    assert len({trial.params["dropout"] for trial in trials}) == 3, "no trial is suggested twice"
    assert pruned.intermediate_values
    # The number of the last trial is 3.
    assert sorted(path.name for path in directory.glob("trial-*")) == [
        "trial-0000",
        "trial-0001",
        "trial-0003",
    ]
    (second,) = (run for run in jstep.runs(directory) if run.path.endswith("trial-0001"))
    assert second.starts_count == 2
    assert second.config["model/dropout"] == killed.params["dropout"]

    shutil.rmtree(directory / "trial-0000")
    again = finished("template/sweep.py", *options)
    assert again.returncode == 0
    assert not (directory / "trial-0000").exists(), "a study that is complete runs no trial"
