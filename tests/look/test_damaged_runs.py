"""A page of many runs, of which one has files that hold anything: the others are whole, and this
one says why not."""

import os
import re
import shutil
import struct

import jax.numpy as jnp
import pytest
from points import norm
from written_runs import change

import jstep
from jstep.stores.event_files import frame, proto

optimizer, train_step = norm()


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run with two starts, an evaluation, a best checkpoint, and a config."""
    where = tmp_path_factory.mktemp("sound") / "run"
    best = jstep.KeepBest(where / "best", "loss")
    evaluation = jstep.EvaluationHook(
        lambda state: {"loss": 0.5}, every_n_steps=2, callbacks=[best]
    )
    for last in (4, 8):
        jstep.train(
            train_step, jstep.TrainState.create({"w": jnp.ones(2)}, optimizer), lambda step: (),
            last, hooks=[evaluation], checkpoint_dir=where, logdir=where, save_summaries_steps=1,
            log_steps=None, config={"rate": 0.1},
        )  # fmt: skip
    return where


def copied(sound, path):
    shutil.copytree(sound, path, ignore=shutil.ignore_patterns("model-*"))
    return path


def check(sound, bad):
    """Check that the page of both has all of the sound one, and return what it says about the bad
    one."""
    page = jstep.report([sound, bad]).html
    (row,) = re.findall(rf'<tr data-r="\d"[^>]*><td>{sound.name}.*?</tr>', page)
    assert ">finished<" in row
    assert ">0.5<" in row
    (color,) = re.findall(r'class="line (s\d)', row) or re.findall(r'<path class="(s\d)', row)
    assert f'<path class="line {color} ' in page, "its curve"
    said = re.search(rf"<li><b>{bad.name}</b>: (.*?)</li>", page)
    return "" if said is None else said[1]


@pytest.mark.parametrize("number", [1, 2])
def test_a_damaged_start(sound, tmp_path, number):
    """It takes itself, not its run."""
    good, bad = copied(sound, tmp_path / "good"), copied(sound, tmp_path / "bad")
    change(bad, number, parameters="many")
    assert f"its start {number} " in check(good, bad)
    _, run = sorted(jstep.runs(tmp_path), key=lambda run: run.path, reverse=True)
    assert run.error is None
    assert [start["status"] for start in run.starts].count("unreadable") == 1
    assert ("its newest start " in run.reason) == (number == 2)
    assert run.step == 8 if number == 1 else run.step == 4


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 99, b"{", b"[]", b"\xff", b"[" * 10**5, b"9" * 5000, b" " * 2**21]
)
def test_a_file_that_is_no_start(sound, tmp_path, data):
    good, bad = copied(sound, tmp_path / "good"), copied(sound, tmp_path / "bad")
    for file in (bad / "starts").iterdir():
        file.write_bytes(data)
    assert "its newest start " in check(good, bad)
    is_empty = not data.strip(b"\0")
    errors = [run.error for run in jstep.runs(tmp_path) if run.error]
    assert [("could not be written" in error) for error in errors] == [is_empty]


def test_a_damaged_card_is_none(sound, tmp_path):
    good, bad = copied(sound, tmp_path / "good"), copied(sound, tmp_path / "bad")
    for file in (bad / "starts").glob("*.card.json"):
        file.write_bytes(b'{"version": 1, "card": {"programs": 7, "stages": [1]}}')
    check(good, bad)
    assert [run.status for run in jstep.runs(tmp_path)] == ["finished", "finished"]


# Event files.


def record(length, data):
    """A record that claims a length."""
    from jstep.stores.event_files import masked_crc

    claimed = struct.pack("<Q", length)
    return claimed + struct.pack("<I", masked_crc(claimed)) + data


def scalar(tag, step, value):
    part = proto("Summary").Value(tag=tag, simple_value=value)
    return frame(
        proto("Event")(
            step=step, wall_time=1e9, summary=proto("Summary")(value=[part])
        ).SerializeToString()
    )


DAMAGES = {
    "a length of 2⁶⁴ − 1": record(2**64 - 1, b""),
    "a length of 2 GB": record(2**31 - 1, b"x" * 100),
    "no Event": frame(b"\xff" * 20),
    "steps at the ends of int64": scalar("loss", 2**63 - 1, 1.0) + scalar("loss", -(2**63), 2.0),
    "values at the ends of float32": scalar("loss", 20, 3.4e38) + scalar("loss", 21, -3.4e38),
    "a step ten thousand times": scalar("same", 0, 1.0) * 10_000,
    "many tags": b"".join(scalar(f"tag{i}", 1, 1.0) for i in range(1100)),
    "tags that are markup": scalar("<script>\x1b[31m\u202ex", 1, 1.0),
}


@pytest.mark.parametrize(
    "damage",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name == "many tags")) for name in DAMAGES],
)
def test_a_damaged_event_file(sound, tmp_path, damage):
    good, bad = copied(sound, tmp_path / "good"), copied(sound, tmp_path / "bad")
    newest = max(path for path in bad.iterdir() if "tfevents" in path.name)
    newest.write_bytes(newest.read_bytes() + DAMAGES[damage])
    check(good, bad)
    page = jstep.report(bad).html
    assert len(page) < 5_000_000
    assert page.count("<script>") == 1
    assert not re.search("[\x1b\u202a-\u202e\u2066-\u2069]", page)
    is_corrupted = damage in ("a length of 2⁶⁴ − 1", "no Event")
    assert ("corrupted record" in page) == is_corrupted
    assert ("what follows is not shown" in page) == is_corrupted


def test_what_is_no_regular_file_is_not_opened(sound, tmp_path):
    """A FIFO would be waited for, and a device may do anything; a link to one, too."""
    bad = copied(sound, tmp_path / "bad")
    newest = max(path for path in bad.iterdir() if "tfevents" in path.name)
    os.mkfifo(tmp_path / "fifo")
    for name in ("events.out.tfevents.9.fifo", newest.name):
        (bad / name).unlink(missing_ok=True)
        os.mkfifo(bad / name)
        (bad / f"{name}.0").symlink_to(tmp_path / "fifo")
    check(copied(sound, tmp_path / "good"), bad)
