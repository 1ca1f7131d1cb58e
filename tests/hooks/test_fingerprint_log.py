"""Logs of fingerprints: lines that are read, and differences in words."""

import json

from jstep.hooks import fingerprint_log
from jstep.hooks.fingerprint_log import Difference, Entry, compare_logs

A, B = "0" * 15 + "a", "0" * 15 + "b"


def test_lines_of_a_log_are_read_or_reported(tmp_path):
    bad = [
        {"step": -1, "state": A},
        {"step": True, "state": A},
        {"step": 1.0, "state": A},
        {"step": 1, "state": A + "0"},
        {"step": 1, "state": 3},
        {"step": 1, "state": A, "leaves": [A]},
        {"step": 1, "state": A, "leaves": {"w": "x"}},
        {"step": 1},
        [1],
    ]
    good = [Entry(0, A), Entry(3, B, {"w": A}), Entry(0, B, {})]
    lines = [one.line() for one in good] + [json.dumps(one) + "\n" for one in bad] + ["\n", '{"step": 4, "st']
    assert lines[:2] == [
        f'{{"step": 0, "state": "{A}"}}\n',
        f'{{"step": 3, "state": "{B}", "leaves": {{"w": "{A}"}}}}\n',
    ]
    (tmp_path / "log").write_text("".join(lines))
    found = fingerprint_log.read_log(str(tmp_path / "log"))
    assert found.entries == {0: good[2], 3: good[1]}
    assert [text.partition(": ")[0] for text in found.corrupted] == [
        f"line {number} is not a fingerprint" for number in range(4, 13)
    ]
    assert found.corrupted[0].endswith(repr(json.dumps(bad[0])))


def test_differences_of_two_fingerprints():
    one, other = {"a": A, "b": A, "c": A}, {"a": B, "b": A, "d": A}
    assert compare_logs(Entry(3, A, one), Entry(3, A, other)) is None
    unknown = Difference(3, None)
    for pair in ((None, other), (one, None), (None, None)):
        assert compare_logs(Entry(3, A, pair[0]), Entry(3, B, pair[1])) == unknown
    assert unknown.text() == "which leaves differ is not known (a log without leaves)"
    found = compare_logs(Entry(3, A, one), Entry(3, B, other))
    assert found == Difference(3, ("a", "c", "d"), ("c",), ("d",))
    assert found.text() == "3 leaves differ: a, c, d; 2 of them in only one of the two: fingerprints of another model"
    assert Difference(3, ("a",)).text() == "1 leaf differs: a"
