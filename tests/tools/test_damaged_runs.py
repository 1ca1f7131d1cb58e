"""A page of many runs, of which one has files that hold anything: the others are whole, and this one says why not."""

import json
import os
import pathlib
import random
import re
import shutil
import struct
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest

import jstep
from jstep.stores.event_files import frame, proto

optimizer = jstep.sgd(0.1)
train_step = jstep.minimize(lambda p: jnp.sum(p["w"] ** 2), optimizer)
HOSTILE = ["many", 5, -7, [], [[]], {}, {"a": {"b": []}}, None, True, float("nan"), float("inf"), 10**400, 1e308, "\0"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run with all kinds of lines: two starts, an evaluation, a best checkpoint, a config, a stall."""
    where = tmp_path_factory.mktemp("sound") / "run"
    best = jstep.KeepBest(where / "best", "loss")
    evaluation = jstep.EvaluationHook(lambda state: {"loss": 0.5}, every_n_steps=2, callbacks=[best])
    for last in (4, 8):
        jstep.train(
            train_step, jstep.TrainState.create({"w": jnp.ones(2)}, optimizer), lambda step: (), last,
            hooks=[evaluation], checkpoint_dir=where, logdir=where, save_summaries_steps=1, log_steps=None,
            config={"rate": 0.1},
        )  # fmt: skip
    lines = [json.loads(line) for line in (where / "timeline.jsonl").read_text().splitlines()]
    stall = {"kind": "stall", "start": lines[-1]["start"], "prefix": "model", "process": 0, "stalled": 9.5, "step": 4}
    lines.append(stall | {"part": "waiting", "time": lines[-1]["time"], "what": "the batch"})
    (where / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return where


def copied(sound: pathlib.Path, path: pathlib.Path, lines: list[Any] | None = None) -> pathlib.Path:
    shutil.copytree(sound, path, ignore=shutil.ignore_patterns("best", "model-*"))
    if lines is not None:
        (path / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def lines_of(run: pathlib.Path) -> list[Any]:
    return [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all fields in lines, each kind of line once for each set of fields."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in entries:
        yield (*path, key)
        yield from places(below, (*path, key))


def changed(lines: list[Any], path: tuple[Any, ...], value: Any) -> list[Any]:
    lines = json.loads(json.dumps(lines))
    above: Any = lines
    for key in path[:-1]:
        above = above[key]
    above[path[-1]] = value
    return lines


def check(sound: pathlib.Path, bad: pathlib.Path) -> str:
    """Check that the page of both has all of the sound one, and return what it says about the bad one."""
    page = jstep.report([sound, bad]).html
    for part in ("<dt>best eval/loss</dt><dd>0.5 at step 2</dd>", "<figcaption>loss</figcaption>"):
        assert part in page
    assert re.search(rf"<td>{sound.name}</td><td>8</td>", page), "the row of its curve"
    odd = page.partition("<h2>What is odd</h2>")[2]
    return odd.partition(f"<h3>{bad.name}</h3>")[2]


@pytest.mark.thorough(
    except_for=["start-parameters-many", "card-arguments-5", "card-config-x", "start-version-99", "parts-best-value7"]
)
@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("start", "parameters", "many"),
        ("card", "arguments", 5),
        ("card", "programs", 7),
        ("card", "stages", [1]),
        ("card", "config", "x"),
        ("card", "batches", {"definition": [[]], "kind": {}}),
        ("start", "version", 99),
        ("parts", "best", {"eval/loss": 3}),
        ("parts", "mfu", "high"),
        ("parts", "peak_bytes", "much"),
    ],
)
def test_one_of_four_runs(sound: pathlib.Path, tmp_path: pathlib.Path, kind: str, field: str, value: Any) -> None:
    for i in range(3):
        copied(sound, tmp_path / f"run{i}")
    lines = lines_of(sound)
    for line in lines:
        if line["kind"] == kind and (kind != "card" or "card" in line):
            line[field] = value
    copied(sound, tmp_path / "bad", lines)
    page = jstep.report(tmp_path).html
    for i in range(3):
        assert f"<td>run{i}</td><td>8</td>" in page
        assert f"<dt>directory</dt><dd>{tmp_path}/run{i}</dd>" in page
    assert "<h3>bad</h3>" in page.partition("<h2>What is odd</h2>")[2], "it says why not"


@pytest.mark.thorough
def test_any_field_of_a_timeline_may_hold_anything(sound: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """One field at a time, of one line of each kind; the report raises nothing, and the other run is whole."""
    lines, random_ = lines_of(sound), random.Random(0)
    seen, cases = set(), []
    for path in places(lines):
        what = (lines[path[0]]["kind"], *path[1:])
        if len(path) > 1 and what not in seen:
            seen.add(what)
            cases += [(path, value) for value in random_.sample(HOSTILE, 2)]
    assert len(cases) > 200
    good = copied(sound, tmp_path / "good")
    for path, value in random_.sample(cases, min(len(cases), 300)):
        bad = copied(sound, tmp_path / "bad", changed(lines, path, value))
        check(good, bad)
        shutil.rmtree(bad)


# Event files.


def record(length: int, data: bytes) -> bytes:
    """A record that claims a length."""
    from jstep.stores.event_files import masked_crc

    claimed = struct.pack("<Q", length)
    return claimed + struct.pack("<I", masked_crc(claimed)) + data


def scalar(tag: str, step: int, value: float) -> bytes:
    part = proto("Summary").Value(tag=tag, simple_value=value)
    return frame(proto("Event")(step=step, wall_time=1e9, summary=proto("Summary")(value=[part])).SerializeToString())


DAMAGES: dict[str, bytes] = {
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
    "damage", [pytest.param(name, marks=[pytest.mark.thorough] * (name == "many tags")) for name in DAMAGES]
)
def test_a_damaged_event_file(sound: pathlib.Path, tmp_path: pathlib.Path, damage: str) -> None:
    good, bad = copied(sound, tmp_path / "good"), copied(sound, tmp_path / "bad")
    newest = max(path for path in bad.iterdir() if "tfevents" in path.name)
    newest.write_bytes(newest.read_bytes() + DAMAGES[damage])
    check(good, bad)
    page = jstep.report(bad).html
    assert len(page) < 5_000_000
    assert page.count("<script>") == 1
    assert not re.search("[\x1b\u202a-\u202e\u2066-\u2069]", page)
    assert ("corrupted record" in page) == (damage in ("a length of 2⁶⁴ − 1", "no Event"))


@pytest.mark.thorough
def test_bytes_of_an_event_file_may_be_anything(sound: pathlib.Path, tmp_path: pathlib.Path) -> None:
    random_, good, bad = random.Random(0), copied(sound, tmp_path / "good"), copied(sound, tmp_path / "bad")
    newest = max(path for path in bad.iterdir() if "tfevents" in path.name)
    data = newest.read_bytes()
    for _ in range(60):
        at, size = random_.randrange(len(data)), random_.randrange(1, 40)
        newest.write_bytes(data[:at] + random_.randbytes(size) + data[at + size * random_.randrange(2) :])
        check(good, bad)


def test_what_is_no_regular_file_is_not_opened(sound: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A FIFO would be waited for, and a device may do anything; a link to one, too."""
    bad = copied(sound, tmp_path / "bad")
    newest = max(path for path in bad.iterdir() if "tfevents" in path.name)
    os.mkfifo(tmp_path / "fifo")
    for name in ("events.out.tfevents.9.fifo", newest.name):
        (bad / name).unlink(missing_ok=True)
        os.mkfifo(bad / name)
        (bad / f"{name}.0").symlink_to(tmp_path / "fifo")
    check(copied(sound, tmp_path / "good"), bad)
