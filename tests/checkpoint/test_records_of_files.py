"""The records of the files of a checkpoint: how files differ from them, and how several processes collect them."""

import json
import os
import zlib

import pytest

from jstep.checkpoint import checksums


def crc(data):
    return f"{zlib.crc32(data):08x}"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK", 4)
    monkeypatch.setattr(checksums, "_PIECE", 3)


TEN = {"bytes": 10, "crc32": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("expected", "actual", "problem"),
    [
        (TEN, None, "missing"),
        (TEN, TEN, ""),
        (TEN, {"bytes": 10}, ""),
        (TEN, {"bytes": 9}, "9 bytes instead of 10"),
        (TEN, TEN | {"bytes": 11}, "11 bytes instead of 10"),
        ({"bytes": 10}, TEN, "the manifest has no checksums for it"),
        ({"bytes": 10, "crc32": "abc"}, TEN, "the manifest has no checksums for it"),
        ({"bytes": 10, "crc32": ["a", "b"]}, TEN, "the manifest has no checksums for it"),
        (TEN, TEN | {"crc32": ["a", "x", "c"]}, "the checksum of bytes [4, 8) differs"),
        (TEN, TEN | {"crc32": ["x", "b", "x"]}, "the checksum of bytes [0, 4), [8, 10) differs"),
    ],
)
def test_a_difference_in_words(expected, actual, problem):
    assert checksums.describe_mismatch(expected, actual) == problem


def test_processes_record_the_files_that_they_wrote(tmp_path, monkeypatch):
    contents = {
        "ocdbt.process_0/d/a": b"0123456789",
        "ocdbt.process_1/b": b"01234567",
        "ocdbt.process_10/c": b"012",
        "manifest.ocdbt": b"",
        "mine": b"abcde",
        "manifest.json": b"not recorded",
    }
    for path, data in contents.items():
        os.makedirs(os.path.dirname(tmp_path / path), exist_ok=True)
        (tmp_path / path).write_bytes(data)
    del contents["manifest.json"]
    flushed = []
    monkeypatch.setattr(checksums, "sync_files", lambda paths: flushed.append(sorted(paths)))
    checksums.write_part(str(tmp_path), 1, ["mine"])
    with pytest.raises(OSError, match="process 0 did not write its part; see its error"):
        checksums.collect(str(tmp_path), 2)
    checksums.write_part(str(tmp_path), 0, [])
    parts = [json.loads((tmp_path / f"checksums.process_{i}").read_text()) for i in range(2)]
    assert [sorted(part) for part in parts] == [["ocdbt.process_0/d/a"], ["mine", "ocdbt.process_1/b"]]
    found = checksums.collect(str(tmp_path), 2)
    assert list(found) == sorted(contents)
    mine = {"ocdbt.process_0/d/a"}, {"mine", "ocdbt.process_1/b"}, {"manifest.ocdbt", "ocdbt.process_10/c"}
    assert flushed == [sorted(str(tmp_path / path) for path in mine[i]) for i in (1, 0, 2)]
    assert found == {
        path: {"bytes": len(data), "crc32": [crc(data[at : at + 4]) for at in range(0, len(data), 4)]}
        for path, data in contents.items()
    }
    assert checksums.files_below(str(tmp_path)) == sorted(contents)
    assert checksums.collect(str(tmp_path)) == found
    (tmp_path / "mine").write_bytes(b"abcdE")
    problems = checksums.differences(str(tmp_path), found)
    assert {path: problem for path, problem in problems.items() if problem} == {
        "mine": "the checksum of bytes [4, 5) differs"
    }
