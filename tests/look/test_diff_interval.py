"""Between which steps two runs diverge: checkpoints, fingerprints and scalars together."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.look import cli
from jstep.look.diff import _TIMED
from jstep.stores.event_files import read_series

OPTIMIZER = jstep.gradient_descent(0.1)
STEP = jstep.minimize(lambda params, x: jnp.mean((params["w"] - x) ** 2), OPTIMIZER)


def train(where, changed_at, last_step=40, **options):
    def batches(step):
        return np.full(2, 1.0 + step + (step >= changed_at), np.float32)

    state = jstep.TrainState.create({"w": jnp.zeros(2)}, OPTIMIZER)
    options = {"checkpoint_dir": where, "save_checkpoint_steps": 20, "progress": False} | options
    return jstep.train(STEP, state, batches, last_step, **options)


def diff(capsys, a, b, code=1):
    assert cli.main(["diff", str(a), str(b)]) == code
    text = " ".join(capsys.readouterr().out.split())
    assert cli.main(["diff", str(a), str(b), "--json"]) == code
    return text, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("hooks", "logs", "expected"),
    [
        (False, False, (None, 20, ["checkpoints"])),
        (True, False, (10, 15, ["checkpoints", "fingerprints"])),
        (True, True, (12, 14, ["checkpoints", "fingerprints", "scalars"])),
    ],
)
def test_every_source_counts(hooks, logs, expected, tmp_path, capsys):
    for name, changed_at in (("a", 99), ("b", 12)):
        own = [jstep.FingerprintHook(every_n_steps=5, path=tmp_path / name)] if hooks else []
        more = {"logdir": tmp_path / name, "save_summaries_steps": 2} if logs else {}
        train(tmp_path / name, changed_at, hooks=own, **more)
    text, found = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert (found["equal_at"], found["differ_at"], found["compared_by"]) == expected
    between = f"equal at {expected[0]}, " if expected[0] is not None else ""
    assert f"{between}differ at {expected[1]} (by {', '.join(expected[2])})" in text
    page = jstep.report([tmp_path / "a", tmp_path / "b"]).html
    without = ", ".join(expected[2][1:])
    assert (f"{between}differ at {expected[1]} (by {without})" in page) == bool(without)


def test_scalars_of_every_prefix_of_a_directory_are_compared(tmp_path, capsys):
    for name, changed_at in (("a", 99), ("b", 12)):
        for prefix, first in (("early", 99), ("model", changed_at)):
            options = {
                "checkpoint_prefix": prefix,
                "logdir": tmp_path / name,
                "save_summaries_steps": 2,
            }
            train(tmp_path / name, first, **options)
    _, found = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert (found["equal_at"], found["differ_at"], found["compared_by"]) == (
        12,
        14,
        ["checkpoints", "scalars"],
    )
    page = jstep.report(tmp_path / "b").html
    assert "equal at 12, differ at 14 (by scalars)" in page, "two runs in one directory"


def test_a_start_in_between_is_named(tmp_path, capsys):
    train(tmp_path / "a", 99, 60)
    train(tmp_path / "b", 99, 20)
    train(tmp_path / "b", 20, 60)
    text, found = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert (found["equal_at"], found["differ_at"]) == (20, 40)
    assert f"equal at 20, differ at 40 (by checkpoints); {tmp_path}/b was started at 20" in text


def test_equal_runs(tmp_path, capsys):
    """Rates differ in each run, and are not compared."""
    for name in "ab":
        train(tmp_path / name, 99, logdir=tmp_path / name, log_steps=5, save_summaries_steps=10)
    tags = set(read_series([str(file) for file in (tmp_path / "a").glob("events*")], print))
    assert "global_step/sec" in tags
    text, found = diff(capsys, tmp_path / "a", tmp_path / "b", code=0)
    assert (found["equal_at"], found["differ_at"]) == (40, None)
    assert "differ at" not in text


@pytest.mark.parametrize(
    "tag", ["tokens/s", "data_secs", "time/step", "train/examples_per_second", "hfu"]
)
def test_tags_that_measure_time(tag):
    assert _TIMED.search(tag)
    assert not any(
        _TIMED.search(name) for name in ("loss", "eval/loss", "timestep_loss", "grad/s2", "rms")
    )
