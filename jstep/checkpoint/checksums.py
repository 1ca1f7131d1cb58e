"""Checksums of the files of a checkpoint that was written to a disk; it may have been copied below a URL since.

Files are checksummed rather than arrays, so that a process that wrote only its shards can compute its part, and a
process on another mesh, or with other shards, can verify them.
"""

import concurrent.futures
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jstep.checkpoint.listing import UNUSED
from jstep.checkpoint.manifest import MANIFEST_FILE, CorruptedError, Manifest
from jstep.stores.files import may_be_file, new_file, open_regular, sync_files
from jstep.stores.objects import PendingOperation, TruncatedError, pipelined

_logger = logging.getLogger("jstep")

BLOCK = 64 * 2**20  # bytes per checksum: large files are read by several threads
_PIECE = 2**20  # bytes that fit the cache of a core
_PART = "checksums.process_"
_AT_ONCE = 4
"""Concurrent reads of objects: 256 MB at most."""


Record = Mapping[str, Any]
"""The size of a file in bytes, and its checksums, as in `Manifest.files`."""
StartRead = Callable[..., Any]
"""`start_read(key, start=0, stop=None)` starts to read a file: a `PendingOperation`, on a disk a `LocalRead`."""


def files_below(checkpoint: str) -> list[str]:
    paths = {
        os.path.relpath(os.path.join(folder, name), checkpoint).replace(os.sep, "/")
        for folder, _, names in os.walk(checkpoint)
        for name in names
    }
    return sorted(paths - {MANIFEST_FILE})


def records(checkpoint: str, paths: Iterable[str], threads: int = 2) -> dict[str, dict[str, Any]]:
    sizes = {path: os.path.getsize(os.path.join(checkpoint, path)) for path in paths}
    blocks = [(path, at) for path, size in sizes.items() for at in range(0, size, BLOCK)]
    with concurrent.futures.ThreadPoolExecutor(threads, "jstep-checksum") as pool:
        sums = pool.map(lambda block: _checksum(os.path.join(checkpoint, block[0]), block[1]), blocks)
        results: dict[str, dict[str, Any]] = {path: {"bytes": size, "crc32": []} for path, size in sizes.items()}
        for (path, _), value in zip(blocks, sums, strict=True):
            results[path]["crc32"].append(value)
    return results


def _flushed_records(checkpoint: str, paths: Sequence[str]) -> dict[str, dict[str, Any]]:
    # tensorstore flushes some of Orbax's files; nothing flushes the rest.
    sync_files(os.path.join(checkpoint, path) for path in paths)
    return records(checkpoint, paths)


def _checksum(path: str, at: int) -> str:
    value, left = 0, BLOCK
    buffer = memoryview(bytearray(_PIECE))
    with open_regular(path, buffering=0) as file:
        file.seek(at)
        while left and (count := file.readinto(buffer[: min(left, _PIECE)])):
            value, left = zlib.crc32(buffer[:count], value), left - count
    return f"{value:08x}"


def process_share(manifest: Manifest, share: tuple[int, int]) -> dict[str, Record]:
    """Return the records for the i-th of n processes: every n-th large file, and all small ones."""
    large = [path for path in sorted(manifest.files) if manifest.files[path]["bytes"] > _PIECE]
    others = set(large) - set(large[share[0] :: share[1]])
    return {path: record for path, record in manifest.files.items() if path not in others}


def differences(checkpoint: str, expected: Mapping[str, Record]) -> dict[str, str]:
    """Return how each file differs from its record, or "". If a size differs, no checksum is computed."""
    results = size_differences(checkpoint, expected)
    if not any(why for path, why in results.items() if path not in UNUSED):
        same = [path for path in expected if not results[path]]
        actual = records(checkpoint, [path for path in same if path not in UNUSED], threads=8)
        for path in UNUSED.intersection(same):
            try:
                actual |= records(checkpoint, [path])
            except OSError as error:
                results[path] = f"cannot be read: {error.strerror}"
        results |= {path: describe_mismatch(expected[path], record) for path, record in actual.items()}
    return results


def size_differences(checkpoint: str, expected: Mapping[str, Record]) -> dict[str, str]:
    """Return how the size of each file differs from its record, or ""; no file is read."""
    results = {}
    for path, record in expected.items():
        whole = os.path.join(checkpoint, path)
        results[path] = describe_mismatch(record, {"bytes": os.path.getsize(whole)} if may_be_file(whole) else None)
    return results


def describe_mismatch(expected: Mapping[str, Any], actual: Mapping[str, Any] | None) -> str:
    """Describe how a file differs from its record, or "". Without checksums, only sizes are compared."""
    if actual is None:
        return "missing"
    if actual["bytes"] != expected["bytes"]:
        return f"{actual['bytes']} bytes instead of {expected['bytes']}"
    if "crc32" not in actual:
        return ""
    sums = expected.get("crc32")
    if not isinstance(sums, list) or len(sums) != len(actual["crc32"]):
        return "the manifest has no checksums for it"
    bad = [i for i, pair in enumerate(zip(actual["crc32"], sums, strict=True)) if pair[0] != pair[1]]
    ranges = ", ".join(f"[{i * BLOCK}, {min((i + 1) * BLOCK, expected['bytes'])})" for i in bad)
    return f"the checksum of bytes {ranges} differs" if bad else ""


def differences_of_objects(start_read: StartRead, expected: Mapping[str, Record]) -> dict[str, str]:
    """Like `differences`, for the objects of a checkpoint that was copied from a disk."""
    actual: dict[str, dict[str, Any]] = {path: {"bytes": 0, "crc32": []} for path in expected}

    def started() -> Iterator[tuple[str, PendingOperation]]:
        for path, record in expected.items():
            size = record["bytes"]
            for at in range(0, max(size, 1), BLOCK):
                stop = at + BLOCK if at + BLOCK < size else None  # the last read shows whether the object is longer
                yield path, start_read(path, at, stop)

    for path, pending in pipelined(started(), _AT_ONCE):
        try:
            data = pending.read().data
        except TruncatedError:
            continue  # the size read so far differs from the record
        if data is None:
            actual.pop(path, None)
        elif path in actual:
            actual[path]["bytes"] += len(data)
            actual[path]["crc32"] += [f"{zlib.crc32(data):08x}"] if data else []

    return {path: describe_mismatch(record, actual.get(path)) for path, record in expected.items()}


def read_file(start_read: StartRead, manifest: Manifest, name: str) -> bytes:
    try:
        data = start_read(name).read().data if name in manifest.files else None
        if data is None:
            raise ValueError("missing")
        sums = [f"{zlib.crc32(data[at : at + BLOCK]):08x}" for at in range(0, len(data), BLOCK)]
        if problem := describe_mismatch(manifest.files[name], {"bytes": len(data), "crc32": sums}):
            raise ValueError(problem)
    except (ValueError, TruncatedError) as error:
        raise CorruptedError([f"{name}: {error}"]) from error
    return bytes(data)


def write_files(checkpoint: str, files: Mapping[str, Any]) -> None:
    """Write `Extra.files` and release their memory. They are not flushed: `write_part` or `collect` does that."""
    for name, content in files.items():
        with new_file(os.path.join(checkpoint, name), flush=False) as file:
            file.write(content.read())
        content.written()


def write_part(checkpoint: str, process: int, files: Iterable[str]) -> None:
    """Flush the arrays' files and `files` of one process to disk, and store their checksums for `collect`."""
    # Orbax names its folders ocdbt.process_3, with a suffix for replicas.
    of_arrays = re.compile(rf"ocdbt\.process_{process}(?![0-9])")
    part = _flushed_records(checkpoint, [*files, *filter(of_arrays.match, files_below(checkpoint))])
    with new_file(os.path.join(checkpoint, f"{_PART}{process}"), flush=False) as file:
        file.write(json.dumps(part).encode())


def collect(checkpoint: str, processes: int = 1) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    paths = files_below(checkpoint)
    for process in range(processes if processes > 1 else 0):
        if f"{_PART}{process}" not in paths:
            raise OSError(f"process {process} did not write its part; see its error")
    for path in [path for path in paths if path.startswith(_PART)]:
        with open_regular(os.path.join(checkpoint, path)) as file:
            results |= json.load(file)
        os.remove(os.path.join(checkpoint, path))
    rest = [path for path in paths if path not in results and not path.startswith(_PART)]
    results |= _flushed_records(checkpoint, rest)
    return dict(sorted(results.items()))
