"""Checksums of the files of a checkpoint that was written to a disk, there or copied below a URL.

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
from jstep.checkpoint.manifest import NAME, CorruptedError, Manifest
from jstep.stores.files import may_be_file, sync_files
from jstep.stores.objects import Pending, TruncatedError, at_once

_logger = logging.getLogger("jstep")

BLOCK = 64 * 2**20  # bytes per checksum: large files are read by several threads
_PIECE = 2**20  # bytes that fit the cache of a core
_PART = "checksums.process_"
_AT_ONCE = 4
"""Concurrent reads of objects: 256 MB at most."""


Record = Mapping[str, Any]
"""The size of a file in bytes, and its checksums, as in `Manifest.files`."""
StartRead = Callable[..., Any]
"""`start_read(key, start=0, stop=None)` starts to read a file of a checkpoint: a `Pending`, on a disk a `LocalRead`."""


def files_below(checkpoint: str) -> list[str]:
    """Return the sorted paths, relative to the checkpoint, of all its files except the manifest."""
    found = {
        os.path.relpath(os.path.join(folder, name), checkpoint).replace(os.sep, "/")
        for folder, _, names in os.walk(checkpoint)
        for name in names
    }
    return sorted(found - {NAME})


def records(checkpoint: str, paths: Iterable[str], threads: int = 2) -> dict[str, dict[str, Any]]:
    """Return the sizes and checksums of some files of a checkpoint, for `Manifest.files`."""
    sizes = {path: os.path.getsize(os.path.join(checkpoint, path)) for path in paths}
    blocks = [(path, at) for path, size in sizes.items() for at in range(0, size, BLOCK)]
    with concurrent.futures.ThreadPoolExecutor(threads, "jstep-checksum") as pool:
        sums = pool.map(lambda block: _checksum(os.path.join(checkpoint, block[0]), block[1]), blocks)
        found: dict[str, dict[str, Any]] = {path: {"bytes": size, "crc32": []} for path, size in sizes.items()}
        for (path, _), value in zip(blocks, sums, strict=True):
            found[path]["crc32"].append(value)
    return found


def _flushed_records(checkpoint: str, paths: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Flush files to disk, and return their records: of those of Orbax, tensorstore flushes some, and nobody others."""
    sync_files(os.path.join(checkpoint, path) for path in paths)
    return records(checkpoint, paths)


def _checksum(path: str, at: int) -> str:
    value, left = 0, BLOCK
    buffer = memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        file.seek(at)
        while left and (count := file.readinto(buffer[: min(left, _PIECE)])):
            value, left = zlib.crc32(buffer[:count], value), left - count
    return f"{value:08x}"


def share_of(manifest: Manifest, share: tuple[int, int]) -> dict[str, Record]:
    """Return the records of the files that the i-th of n processes verifies: of the large ones, every n-th."""
    large = [path for path in sorted(manifest.files) if manifest.files[path]["bytes"] > _PIECE]
    others = set(large) - set(large[share[0] :: share[1]])
    return {path: record for path, record in manifest.files.items() if path not in others}


def differences(checkpoint: str, expected: Mapping[str, Record]) -> dict[str, str]:
    """Return how each file differs from its record; "" if it does not.

    Wrong sizes are found without reading, and then no checksum is computed.
    """
    root = os.path.realpath(checkpoint)
    found = {path: "a link out of the checkpoint" for path in expected if not is_below(root, path)}
    for path in [path for path in expected if path in UNUSED and path not in found]:
        try:
            found |= _differences(checkpoint, {path: expected[path]})
        except OSError as error:
            found[path] = error.strerror or "it cannot be read"
    found |= _differences(checkpoint, {path: record for path, record in expected.items() if path not in found})
    return {path: found[path] for path in expected}


def _differences(checkpoint: str, expected: Mapping[str, Record]) -> dict[str, str]:
    found = {}
    for path, record in expected.items():
        whole = os.path.join(checkpoint, path)
        found[path] = difference(record, {"bytes": os.path.getsize(whole)} if may_be_file(whole) else None)
    if not any(found.values()):
        for path, actual in records(checkpoint, expected, threads=8).items():
            found[path] = difference(expected[path], actual)
    return found


def problems_of(checkpoint: str, found: Mapping[str, str], *, every: bool) -> tuple[list[str], list[str]]:
    """Return the problems of the files that are read, and those of files that nothing reads.

    Args:
        checkpoint: The path or URL of the checkpoint.
        found: Path of a file → its problem; "" if it has none.
        every: Whether all files count as read.
    """
    passed_over = frozenset[str]() if every else UNUSED
    bad = {path: problem for path, problem in found.items() if problem}
    read = [f"{checkpoint}/{path}: {problem}" for path, problem in bad.items() if path not in passed_over]
    return read, [f"{path} ({problem})" for path, problem in bad.items() if path in passed_over]


def is_below(root: str, path: str) -> bool:
    """Return whether a file is below a folder, links resolved."""
    return os.path.realpath(os.path.join(root, path)).startswith(root + os.sep)


def difference(expected: Mapping[str, Any], actual: Mapping[str, Any] | None) -> str:
    """Describe how the record of a file differs from the one in the manifest; "" if it does not.

    Args:
        expected: The record in the manifest.
        actual: The record of the file; without checksums, sizes are compared. None if there is no file.
    """
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
    """Return how each object of a checkpoint that was copied from a disk differs from its record; see `differences`."""
    actual: dict[str, dict[str, Any]] = {path: {"bytes": 0, "crc32": []} for path in expected}

    def started() -> Iterator[tuple[str, Pending]]:
        for path, record in expected.items():
            size = record["bytes"]
            for at in range(0, max(size, 1), BLOCK):
                stop = at + BLOCK if at + BLOCK < size else None  # the last read shows whether the object is longer
                yield path, start_read(path, at, stop)

    for path, pending in at_once(started(), _AT_ONCE):
        try:
            data = pending.read().data
        except TruncatedError:
            continue  # the size that was read until here differs
        if data is None:
            actual.pop(path, None)
        elif path in actual:
            actual[path]["bytes"] += len(data)
            actual[path]["crc32"] += [f"{zlib.crc32(data):08x}"] if data else []

    return {path: difference(record, actual.get(path)) for path, record in expected.items()}


def read_file(start_read: StartRead, manifest: Manifest, name: str) -> bytes:
    """Read a file of a checkpoint that was written to a disk, and verify its checksums.

    Args:
        start_read: Starts to read a file of the checkpoint.
        manifest: The manifest of the checkpoint.
        name: The name of the file.

    Raises:
        CorruptedError: It is corrupted, or not a file of the checkpoint.
    """
    try:
        data = start_read(name).read().data if name in manifest.files else None
        if data is None:
            raise ValueError("missing")
        sums = [f"{zlib.crc32(data[at : at + BLOCK]):08x}" for at in range(0, len(data), BLOCK)]
        if problem := difference(manifest.files[name], {"bytes": len(data), "crc32": sums}):
            raise ValueError(problem)
    except (ValueError, TruncatedError) as error:
        raise CorruptedError([f"{name}: {error}"]) from error
    return bytes(data)


def write_files(checkpoint: str, files: Mapping[str, Any]) -> None:
    """Write the files of a save (`Extra.files`) and release their memory; `write_part` or `collect` flush them."""
    for name, one in files.items():
        with open(os.path.join(checkpoint, name), "xb") as file:
            file.write(one.read())
        one.written()


def write_part(checkpoint: str, process: int, files: Iterable[str]) -> None:
    """Flush the files that one process wrote to disk, and store their checksums for `collect`.

    Args:
        checkpoint: The path of the checkpoint.
        process: The index of the process.
        files: The names of its files besides those of the arrays.
    """
    # Orbax names its folders ocdbt.process_3, with a suffix for replicas.
    of_arrays = re.compile(rf"ocdbt\.process_{process}(?![0-9])")
    part = _flushed_records(checkpoint, [*files, *filter(of_arrays.match, files_below(checkpoint))])
    with open(os.path.join(checkpoint, f"{_PART}{process}"), "w") as file:
        json.dump(part, file)


def collect(checkpoint: str, processes: int = 1) -> dict[str, dict[str, Any]]:
    """Return the records of all files of a checkpoint, which are on the disk when this returns.

    Several processes flush and record the files that they wrote; the others are flushed and recorded here.

    Raises:
        OSError: A file cannot be flushed or read; or one of several processes stored no records: it has failed.
    """
    found: dict[str, dict[str, Any]] = {}
    paths = files_below(checkpoint)
    for process in range(processes if processes > 1 else 0):
        if f"{_PART}{process}" not in paths:
            raise OSError(f"process {process} did not write its part; see its error")
    for path in [path for path in paths if path.startswith(_PART)]:
        with open(os.path.join(checkpoint, path)) as file:
            found |= json.load(file)
        os.remove(os.path.join(checkpoint, path))
    rest = [path for path in paths if path not in found and not path.startswith(_PART)]
    found |= _flushed_records(checkpoint, rest)
    return dict(sorted(found.items()))
