"""A restart notices that it reads another batch than the one that was read before, and says so
once."""

import json
import logging
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.look.cli import main
from jstep.record.starts import read_starts
from jstep.watching.batch_watch import BatchWatch

DATA = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
OPTIMIZER = jstep.gradient_descent(0.1)
STEP = jstep.minimize(
    lambda params, x: jnp.mean((params["w"][None] - x.reshape(-1, 4)) ** 2), OPTIMIZER
)


class Loader:
    """Random batches in one buffer, whose position may lack the state of their generator."""

    def __init__(self, *, is_whole=True, seed=0):
        self.count, self.is_whole, self.rng = 0, is_whole, np.random.default_rng(seed)
        self.buffer = np.zeros(4, np.float32)

    def __iter__(self):
        return self

    def __next__(self):
        self.count += 1
        self.buffer[:] = self.rng.normal(size=4)
        return self.buffer

    def get_state(self):
        return {
            "count": self.count,
            **({"rng": self.rng.bit_generator.state} if self.is_whole else {}),
        }

    def set_state(self, state):
        self.count = state["count"]
        if self.is_whole:
            self.rng.bit_generator.state = state["rng"]


def train(where, batches, last_step, **options):
    state = jstep.TrainState.create({"w": jnp.zeros(4)}, OPTIMIZER)
    options = {"save_checkpoint_steps": 4, "progress": False, "log_steps": None} | options
    return jstep.train(STEP, state, batches, last_step, checkpoint_dir=where, **options)


def lose(where, step):
    """Leave the directory of a run that was killed before it saved a step."""
    shutil.rmtree(where / f"model-{step}")


def said(caplog):
    found = [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if "read before" in record.getMessage()
    ]
    caplog.clear()
    return found


def warning(step):
    what = "the loader's state is incomplete, or the dataset changed"
    return [("WARNING", f"batch {step} does not match the one read before the restart: {what}")]


@pytest.fixture(autouse=True)
def informed(caplog):
    caplog.set_level(logging.INFO, "jstep")


@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.parametrize("is_whole", [True, False])
def test_the_state_of_a_loader_lacks_its_generator(
    is_whole, steps_per_call, tmp_path, caplog, capsys
):
    train(tmp_path, Loader(is_whole=is_whole), 8)
    lose(tmp_path, 8)
    train(tmp_path, Loader(is_whole=is_whole), 8, steps_per_call=steps_per_call)
    assert said(caplog) == ([] if is_whole else warning(4))
    for command in (["diff", str(tmp_path)], ["runs", str(tmp_path), "--starts"]):
        assert main(command) == 0
        assert (
            "batch 4 does not match the one read before the restart" in capsys.readouterr().out
        ) != is_whole
    assert (
        "batch 4 does not match the one read before the restart" in jstep.report(tmp_path).html
    ) != is_whole


def starts(where, capsys):
    """The texts of the starts of a run, and of each whether its first batch is the one that was
    read before."""
    assert main(["diff", str(where)]) == 0
    text = capsys.readouterr().out
    assert main(["diff", str(where), "--json"]) == 0
    return text, [start["first_batch"] for start in json.loads(capsys.readouterr().out)["starts"]]


def test_each_restart_says_whether_its_first_batch_was_compared(tmp_path, capsys):
    train(tmp_path, Loader(), 8)
    lose(tmp_path, 8)
    train(tmp_path, Loader(), 8)
    train(tmp_path, Loader(), 12)  # nobody had read batch 8
    lose(tmp_path, 12)
    train(tmp_path, Loader(is_whole=False, seed=1), 12)
    text, found = starts(tmp_path, capsys)
    assert found == [None, "equal", "not compared", "differs"]
    assert "  batch 4 is the one read before the restart\n" in text
    assert "  batch 8 was not compared with the one before the restart\n" in text
    assert "  batch 8 does not match the one read before the restart\n" in text
    assert "not compared: files and data\n" in text
    assert main(["runs", str(tmp_path), "--starts"]) == 0
    assert "start 3: batch 8 was not compared" in capsys.readouterr().out


def test_records_without_that_field_do_not_say_it(tmp_path, capsys):
    train(tmp_path, Loader(), 4)
    train(tmp_path, Loader(), 8)
    path = tmp_path / "starts/model.000002.json"
    recorded = json.loads(path.read_text())
    assert recorded.pop("compared_batch") is False
    path.write_text(json.dumps(recorded))
    text, found = starts(tmp_path, capsys)
    assert found == [None, None]
    assert "batch 4" not in text


def test_the_newest_twenty_are_kept(tmp_path, monkeypatch):
    watches = []
    make = BatchWatch.__init__
    monkeypatch.setattr(
        BatchWatch, "__init__", lambda watch, run: watches.append(watch) or make(watch, run)
    )
    train(tmp_path, Loader(), 26, save_checkpoint_steps=1)
    kept = list(read_starts(str(tmp_path))["model"][0]["batches"])
    assert kept == list(watches[0]._hashes) == [str(step) for step in range(6, 26)]


def test_data_that_were_rewritten_after_the_last_step(tmp_path, caplog):
    train(tmp_path, jstep.batches(DATA, 4, seed=0), 8)
    train(tmp_path, jstep.batches(DATA, 4, seed=0), 10)
    assert said(caplog) == []
    train(tmp_path, jstep.batches(DATA + 1, 4, seed=0), 12)
    assert said(caplog) == warning(10)
    train(tmp_path, jstep.batches(DATA + 1, 4, seed=0), 14)
    assert said(caplog) == [], "it is said once"


@pytest.mark.parametrize("name", ["config", "definition", "shapes"])
def test_what_was_changed_on_purpose_is_no_warning(name, tmp_path, caplog):
    before, after = {
        "config": (Loader(), Loader(is_whole=False, seed=1)),
        "definition": (jstep.batches(DATA, 4, seed=0), jstep.batches(DATA, 4, seed=1)),
        "shapes": (jstep.batches(DATA, 4, seed=0), jstep.batches(DATA, 8, seed=0)),
    }[name]
    train(tmp_path, before, 8, config={"seed": 0})
    lose(tmp_path, 8)
    train(tmp_path, after, 8, config={"seed": int(name == "config")})
    assert [level for level, _ in said(caplog)] == ["INFO"] * (name != "shapes")


def test_a_branch_may_read_other_data(tmp_path, caplog):
    train(tmp_path / "trunk", jstep.batches(DATA, 4, seed=0), 8)
    trunk = tmp_path / "trunk/model-4"
    train(tmp_path / "branch", jstep.batches(DATA + 1, 4, seed=0), 8, start_from=trunk)
    lose(tmp_path / "branch", 8)
    assert said(caplog) == []
    train(tmp_path / "branch", jstep.batches(DATA + 1, 4, seed=0), 8)
    assert said(caplog) == []


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_body_that_makes_its_batches(is_kept, tmp_path, caplog):
    def play(last_step):
        rng, state = (
            np.random.default_rng(0),
            jstep.TrainState.create({"w": jnp.zeros(4)}, OPTIMIZER),
        )
        batches = jstep.from_loop(**({"rng": rng} if is_kept else {}))
        options = {"save_checkpoint_steps": 4, "progress": False, "log_steps": None}
        with jstep.Run(STEP, state, batches, last_step, checkpoint_dir=tmp_path, **options) as run:
            for _ in run:
                run.train_step(rng.normal(size=4).astype(np.float32))

    play(8)
    lose(tmp_path, 8)
    play(8)
    assert said(caplog) == ([] if is_kept else warning(4))


def test_a_step_of_an_earlier_start_that_is_run_again_counts(tmp_path, caplog):
    """The hashes are those of the start that saved the checkpoint, and of those that resumed from
    it."""
    train(tmp_path, Loader(), 12)
    for step in (8, 12):
        lose(tmp_path, step)
    train(tmp_path, Loader(is_whole=False, seed=1), 8)
    assert said(caplog) == warning(4)
    recorded = json.loads((tmp_path / "starts/model.000002.json").read_text())
    assert (recorded["other_batch"], list(recorded["batches"])) == (4, ["4"])
    train(tmp_path, Loader(is_whole=False, seed=1), 12)
    assert said(caplog) == [], "batch 8 was read by the first start only"
