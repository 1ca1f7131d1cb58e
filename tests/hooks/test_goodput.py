"""`goodput`: timelines with several starts and lost steps, and invalid files."""

import json
import os

import pytest

import jstep
from jstep.tools.cli import main


def write(folder, *lines, prefix="model"):
    with open(folder / "timeline.jsonl", "a") as file:
        for start, time, step, seconds in lines:
            known = file.tell() and f'"{start}"' in (folder / "timeline.jsonl").read_text()
            kind = {"kind": "parts"} if known else {"kind": "start", "version": 1}
            fields = {**kind, "start": start, "prefix": prefix, "time": time, "step": step, "seconds": seconds}
            file.write(json.dumps(fields) + "\n")
            file.flush()


# The first start begins at 1000 and runs 137 steps, of which the second start repeats 37. The third start was killed
# while it restored.
TIMELINE = [
    ("a", 1010.0, None, {"starting": 10.0}),
    ("a", 1110.0, [0, 100], {"starting": 10.0, "stepping": 90.0, "waiting": 10.0}),
    ("a", 1150.0, [0, 137], {"starting": 10.0, "stepping": 120.0, "waiting": 11.0, "saving": 9.0}),
    ("b", 1180.0, None, {"starting": 5.0}),
    ("b", 1230.0, [100, 150], {"starting": 10.0, "stepping": 40.0, "hooks": 2.0, "evaluating": 3.0}),
    ("c", 1240.0, None, {"starting": 1.0}),
    ("d", 1300.0, [150, 200], {"starting": 10.0, "stepping": 40.0}),
]


def test_a_timeline_of_several_starts(tmp_path, capsys):
    write(tmp_path, *TIMELINE)
    found = jstep.goodput(tmp_path)
    assert found.parts == {
        "productive": 90.0 + 40.0 + 40.0,
        "rewound": 30.0,
        "before": 0.0,
        "starting": 10.0 + 10.0 + 1.0 + 10.0,
        "waiting": 11.0,
        "saving": 9.0,
        "evaluating": 3.0,
        "hooks": 2.0,
        "down": 25.0 + 9.0 + 10.0,
    }
    assert (found.total, found.starts, found.steps) == (300.0, 4, 200)
    assert found.fraction == 170.0 / 300.0
    assert hash(found) == hash(jstep.goodput(tmp_path))
    text = str(found).splitlines()
    assert text[:3] == [
        "goodput 56.7 %: 200 steps in 300 s, 4 starts",
        "  productive  170.000 s   56.7 %",
        "  rewound      30.000 s   10.0 %",
    ]
    assert main(["goodput", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == text
    assert main(["goodput", str(tmp_path / "timeline.jsonl"), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {**found.parts, "starts": 4, "steps": 200, "total": 300.0, "fraction": found.fraction}


# As after copies from a bucket to a disk and back: "timeline.jsonl" sorts after the names of objects.
COPIES = {
    "the objects of all starts": {"20261122T1": "ab", "20261122T2": "c", "20261122T3": "d"},
    "a file, and later starts in a bucket": {"jsonl": "ab", "20261122T2": "c", "20261122T3": "d"},
    "starts in a bucket, and later ones on a disk": {"20261122T1": "a", "20261122T2": "b", "jsonl": "cd"},
    "a file that was resumed in a bucket and on a disk": {"jsonl": "abd", "20261122T2": "c"},
}


@pytest.mark.parametrize("copy", COPIES)
def test_copied_timelines_are_read_in_the_order_of_their_starts(tmp_path, copy):
    for name in ("copy", "original"):
        (tmp_path / name).mkdir()
    write(tmp_path / "original", *TIMELINE)
    for name, starts in COPIES[copy].items():
        write(tmp_path / "copy", *[line for line in TIMELINE if line[0] in starts])
        os.rename(tmp_path / "copy" / "timeline.jsonl", tmp_path / "copy" / f"part.{name}")
    for name in COPIES[copy]:
        to = "timeline.jsonl" if name == "jsonl" else f"timeline.{name}-0.jsonl"
        os.rename(tmp_path / "copy" / f"part.{name}", tmp_path / "copy" / to)
    assert jstep.goodput(tmp_path / "copy") == jstep.goodput(tmp_path / "original")


def test_a_step_between_two_lines_is_interpolated(tmp_path):
    write(tmp_path, ("a", 50.0, [0, 10], {"stepping": 10.0}), ("a", 90.0, [0, 30], {"stepping": 50.0}))
    write(tmp_path, ("b", 91.0, [20, 20], {"starting": 1.0}), ("c", 92.0, [15, 15], {"starting": 1.0}))
    found = jstep.goodput(tmp_path)
    assert (found.productive, found.rewound, found.steps) == (20.0, 30.0, 15)


def test_the_line_of_a_checkpoint_replaces_an_earlier_line(tmp_path):
    """The first line is early, as the host was ahead of the device; the checkpoint's line came after all 10 steps."""
    write(tmp_path, ("a", 50.0, [0, 10], {"stepping": 10.0}), ("a", 90.0, [0, 10], {"stepping": 30.0}))
    path = tmp_path / "timeline.jsonl"
    path.write_text(path.read_text().rstrip()[:-1] + ', "checkpoint": 10}\n')
    write(tmp_path, ("a", 95.0, [0, 10], {"stepping": 33.0}), ("a", 99.0, [0, 12], {"stepping": 35.0}))
    write(tmp_path, ("b", 100.0, [10, 11], {"stepping": 1.0}))
    found = jstep.goodput(tmp_path)
    assert (found.productive, found.rewound, found.steps) == (31.0, 5.0, 11)


def test_idle_time_before_a_start_is_counted_once(tmp_path):
    write(
        tmp_path,
        ("a", 100.0, [0, 10], {"stepping": 50.0}),
        ("b", 150.0, [10, 20], {"starting": 80.0, "stepping": 10.0}),
        ("c", 200.0, [20, 30], {"before": 60.0, "starting": 10.0, "stepping": 10.0}),
    )
    found = jstep.goodput(tmp_path)
    assert (found.down, found.before, found.starting, found.total) == (0.0, 30.0, 50.0, 150.0)


def test_runs_that_share_a_directory(tmp_path):
    a, b = ("a", 10.0, [0, 1], {"stepping": 1.0}), ("b", 20.0, [0, 2], {"stepping": 2.0})
    write(tmp_path, a, prefix="net")
    write(tmp_path, b)
    write(tmp_path, ("a", 30.0, [0, 5], {"stepping": 5.0}), prefix="net")
    assert jstep.goodput(tmp_path).steps == 2
    assert jstep.goodput(tmp_path, prefix="net").productive == 5.0
    with pytest.raises(ValueError, match=r"prefix='other': must be the prefix .* which has 'net', 'model'"):
        jstep.goodput(tmp_path, prefix="other")


def test_unknown_truncated_and_corrupted_lines_are_skipped(tmp_path, caplog):
    write(tmp_path, *TIMELINE[:3])
    expected = jstep.goodput(tmp_path)
    for corrupted in ("nonsense", "[1]", '{"kind": "parts", "start": "a", "prefix": "model"}', '{"kind": 3}'):
        with open(tmp_path / "timeline.jsonl", "a") as file:
            file.write(corrupted + "\n")
    bad = {"kind": "parts", "start": "a", "prefix": "model", "time": 9e9, "step": [0, 137], "seconds": {"stepping": -1}}
    with open(tmp_path / "timeline.jsonl", "a") as file:
        file.write(json.dumps(bad) + "\n" + json.dumps({"kind": "card", "start": "a", "prefix": "model"}) + "\n")
        without_step = {name: value for name, value in bad.items() if name != "step"} | {"seconds": {}}
        file.write(json.dumps(without_step) + "\n")
        file.write(json.dumps(bad)[:40])
    assert jstep.goodput(tmp_path) == expected
    (record,) = caplog.records  # one for the file
    skipped = [n for n in range(1, 12) if f"line {n} " in record.getMessage()]
    assert skipped == [4, 5, 6, 7, 8]
    assert record.getMessage().endswith("and 1 more")


def test_unreadable_timelines_are_named(tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match=r"there is no timeline; give the checkpoint_dir"):
        jstep.goodput(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such directory"):
        jstep.goodput(tmp_path / "nope")
    with pytest.raises(TypeError, match="path=3: must be a path or a URL"):
        jstep.goodput(3)
    assert main(["goodput", str(tmp_path)]) == 2
    assert "there is no timeline" in capsys.readouterr().err
    newer = {"kind": "start", "version": 2, "start": "z", "prefix": "model"}
    (tmp_path / "timeline.jsonl").write_text(json.dumps(newer) + "\n")
    with pytest.raises(ValueError, match=r"line 1 is of a newer version \(2\)"):
        jstep.goodput(tmp_path)
