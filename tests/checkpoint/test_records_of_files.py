"""The records of the files of a checkpoint: how files differ from them, and how several processes collect them."""

import json
import os
import pathlib
import types
import zlib
from typing import Any

import pytest

from jstep.checkpoint import checksums
from jstep.checkpoint.directory import DirectoryStore
from jstep.checkpoint.listing import UNUSED
from jstep.checkpoint.manifest import CorruptedError
from jstep.stores.objects import ReadResult, TruncatedError


def crc(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: Any) -> None:
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
def test_a_difference_in_words(expected: Any, actual: Any, problem: str) -> None:
    assert checksums.describe_mismatch(expected, actual) == problem


def test_processes_record_the_files_that_they_wrote(tmp_path: Any, monkeypatch: Any) -> None:
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


def test_a_file_is_read_with_its_checksums() -> None:
    files = {
        "a": {"bytes": 5, "crc32": [crc(b"0123"), crc(b"4")]},
        "b": {"bytes": 5, "crc32": ["x", "y"]},
        "c": {"bytes": 1},
    }
    manifest: Any = types.SimpleNamespace(files=files | {"d": {"bytes": 0, "crc32": []}, "e": {"bytes": 1}})
    data: dict[str, Any] = {"a": b"01234", "b": b"01234", "c": None, "d": b"", "e": ValueError("a link"), "f": b"0"}

    def start_read(name: str) -> Any:
        def read() -> ReadResult:
            if isinstance(data[name], Exception):
                raise data[name]
            return ReadResult(data[name], b"")

        return types.SimpleNamespace(read=read)

    assert [checksums.read_file(start_read, manifest, name) for name in "ad"] == [b"01234", b""]
    problems = {"b": "the checksum of bytes [0, 4), [4, 5) differs", "c": "missing", "e": "a link", "f": "missing"}
    for name, problem in problems.items():
        with pytest.raises(CorruptedError) as caught:
            checksums.read_file(start_read, manifest, name)
        assert caught.value.problems == [f"{name}: {problem}"]


def test_problems_of_files_that_nothing_reads_are_warnings(caplog: Any, tmp_path: Any, monkeypatch: Any) -> None:
    one, *others = sorted(UNUSED)
    found = {"a": "missing", "b": "", one: "3 bytes instead of 4"}
    store, manifest = DirectoryStore(str(tmp_path), "model"), types.SimpleNamespace(is_packed=False, files={})
    monkeypatch.setattr(checksums, "process_share", lambda manifest, share: {})

    def problems(found: Any, process: int = 0, now: Any = manifest, **options: bool) -> list[str]:
        caplog.clear()
        monkeypatch.setattr(checksums, "differences", lambda path, expected: found)
        monkeypatch.setattr(store, "manifest", lambda path: now or pathlib.Path("/nowhere").stat())
        return store.find_corruption("model-1", manifest, (process, 2), **options)  # type: ignore[arg-type]

    assert problems(found) == ["model-1/a: missing"]
    assert caplog.messages == [
        f"model-1: {one} (3 bytes instead of 4): nothing reads this file, and the checkpoint restores without"
    ]
    assert problems(found | dict.fromkeys(others, "missing")) == ["model-1/a: missing"]
    also = "".join(f" and {name} (missing)" for name in others)
    assert caplog.messages == [
        f"model-1: {one} (3 bytes instead of 4){also}: nothing reads these files, and the checkpoint restores without"
    ]
    assert problems(found, process=1) == ["model-1/a: missing"]
    assert not caplog.messages
    assert problems(found, every=True) == ["model-1/a: missing", f"model-1/{one}: 3 bytes instead of 4"]
    assert not caplog.messages
    for now in (None, types.SimpleNamespace(files={"a": 1})):  # it was deleted, or replaced, meanwhile
        assert problems(found, now=now) == ["model-1/a: missing"]
        assert not caplog.messages


def test_objects_are_compared_with_their_records_in_blocks() -> None:
    contents = {"whole": b"0123456789", "full": b"01234567", "empty": b"", "longer": b"0123456", "changed": b"0123x567"}
    contents |= {"shorter": b"01234", "torn": b"0123456789"}
    sizes = {"longer": 5, "shorter": 8, "gone": 3}
    records = {}
    for path in [*contents, "gone"]:
        data = b"0123456789"[: sizes.get(path, len(contents.get(path, b"")))]
        sums = [crc(data[at : at + 4]) for at in range(0, len(data), 4)]
        records[path] = {"bytes": len(data), "crc32": sums}
    asked = []

    def start_read(path: str, start: int, stop: int | None) -> Any:
        asked.append((path, start, stop))

        def read() -> ReadResult:
            if path == "torn" and start == 8:
                raise TruncatedError("it ends early")
            data = contents.get(path)
            return ReadResult(None if data is None else data[start:stop], b"")

        return types.SimpleNamespace(read=read, give_up=lambda: None)

    assert checksums.differences_of_objects(start_read, records) == {
        "whole": "",
        "full": "",
        "empty": "",
        "longer": "7 bytes instead of 5",
        "changed": "the checksum of bytes [4, 8) differs",
        "shorter": "5 bytes instead of 8",
        "torn": "8 bytes instead of 10",
        "gone": "missing",
    }
    assert asked[:6] == [
        ("whole", 0, 4),
        ("whole", 4, 8),
        ("whole", 8, None),
        ("full", 0, 4),
        ("full", 4, None),
        ("empty", 0, None),
    ]
