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
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jstep.checkpoint.format.manifest import NAME, Manifest
from jstep.checkpoint.store.listing import UNUSED
from jstep.stores.files import may_be_file, sync_files
from jstep.stores.objects import Objects, Pending, TruncatedError, at_once

BLOCK = 64 * 2**20  # bytes per checksum: large files are read by several threads
_PIECE = 2**20  # bytes that fit the cache of a core
_PART = "checksums.process_"
_AT_ONCE = 4
"""Concurrent reads of objects: 256 MB at most."""
_logger = logging.getLogger("jstep")


def files_below(checkpoint: str) -> list[str]:
    """Return the sorted paths, relative to the checkpoint, of all its files except the manifest."""
    found = [
        os.path.relpath(os.path.join(folder, name), checkpoint).replace(os.sep, "/")
        for folder, _, names in os.walk(checkpoint)
        for name in names
    ]
    return sorted(path for path in found if path != NAME)


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


def _checksum(path: str, at: int) -> str:
    value, left = 0, BLOCK
    buffer = memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        file.seek(at)
        while left and (count := file.readinto(buffer[: min(left, _PIECE)])):
            value, left = zlib.crc32(buffer[:count], value), left - count
    return f"{value:08x}"


def find_corruption(
    checkpoint: str, manifest: Manifest, share: tuple[int, int] = (0, 1), threads: int = 8, *, every: bool = False
) -> list[str]:
    """Return descriptions of what is wrong with the files of a checkpoint; an empty list if it is intact.

    Wrong sizes are found without reading, and then no checksum is computed. A corrupted file that nothing
    reads is a warning.

    Args:
        checkpoint: The path of the checkpoint.
        manifest: Its manifest.
        share: (i, n) to check only every n-th of the large files, starting at the i-th.
        threads: The number of threads that read.
        every: Whether a corrupted file that nothing reads is a problem, too.
    """
    large = [path for path in sorted(manifest.files) if manifest.files[path]["bytes"] > _PIECE]
    others = set(large) - set(large[share[0] :: share[1]])
    expected = {path: record for path, record in manifest.files.items() if path not in others}
    root = os.path.realpath(checkpoint)
    outside = {path for path in expected if not is_below(root, path)}
    found = dict.fromkeys(outside, "a link out of the checkpoint")
    found |= _differences(checkpoint, {path: expected[path] for path in expected.keys() - outside - UNUSED}, threads)
    for path in expected.keys() & UNUSED - outside:
        try:
            found |= _differences(checkpoint, {path: expected[path]}, threads)
        except OSError as error:
            found[path] = error.strerror or "it cannot be read"
    found = {path: found[path] for path in expected}
    return _problems(checkpoint, found, is_first=share[0] == 0, every=every)


def _differences(checkpoint: str, expected: Mapping[str, Mapping[str, Any]], threads: int) -> dict[str, str]:
    """Return how each file differs from its record; "" if it does not."""
    there = [path for path in expected if may_be_file(os.path.join(checkpoint, path))]
    sizes = {path: os.path.getsize(os.path.join(checkpoint, path)) for path in there}
    found = {path: _difference_of_size(record, sizes.get(path)) for path, record in expected.items()}
    if any(found.values()):
        return found
    actual = records(checkpoint, expected, threads)
    return {path: difference(record, actual[path]) for path, record in expected.items()}


def _problems(checkpoint: str, found: Mapping[str, str], *, is_first: bool, every: bool) -> list[str]:
    """Return the problems of the files that are read; the first process warns of those of other files.

    Args:
        checkpoint: The path or URL of the checkpoint.
        found: Path of a file → its problem; "" if it has none.
        is_first: Whether this is the first of the processes that share the work.
        every: Whether to return the problems of all files, and warn of none.
    """
    passed_over = frozenset[str]() if every else UNUSED
    unused = [f"{path} ({problem})" for path, problem in found.items() if problem and path in passed_over]
    if unused and is_first:
        _logger.warning(
            "%s: %s: nothing reads %s, and the checkpoint restores without",
            checkpoint,
            " and ".join(unused),
            "this file" if len(unused) == 1 else "these files",
        )
    return [f"{checkpoint}/{path}: {problem}" for path, problem in found.items() if problem and path not in passed_over]


def is_below(root: str, path: str) -> bool:
    """Return whether a file is below a folder, links resolved."""
    return os.path.realpath(os.path.join(root, path)).startswith(root + os.sep)


def _difference_of_size(expected: Mapping[str, Any], size: int | None) -> str:
    if size is None:
        return "missing"
    return f"{size} bytes instead of {expected['bytes']}" if size != expected["bytes"] else ""


def difference(expected: Mapping[str, Any], actual: Mapping[str, Any] | None) -> str:
    """Describe how the record of a file differs from the one in the manifest; "" if it does not."""
    if wrong := _difference_of_size(expected, None if actual is None else actual["bytes"]):
        return wrong
    assert actual is not None
    sums = expected.get("crc32")
    if not isinstance(sums, list) or len(sums) != len(actual["crc32"]):
        return "the manifest has no checksums for it"
    bad = [i for i, pair in enumerate(zip(actual["crc32"], sums, strict=True)) if pair[0] != pair[1]]
    ranges = ", ".join(f"[{i * BLOCK}, {min((i + 1) * BLOCK, expected['bytes'])})" for i in bad)
    return f"the checksum of bytes {ranges} differs" if bad else ""


def find_corruption_of_copy(
    objects: Objects, above: str, manifest: Manifest, share: tuple[int, int], *, every: bool
) -> list[str]:
    """Return descriptions of what is wrong with the objects of a checkpoint that was copied from a disk; see above."""
    paths = sorted(manifest.files)[share[0] :: share[1]]
    actual = _records_of_objects(objects, above, {path: manifest.files[path]["bytes"] for path in paths})
    found = {path: difference(manifest.files[path], actual.get(path)) for path in paths}
    return _problems(objects.at(above.rstrip("/")), found, is_first=True, every=every)


def _records_of_objects(objects: Objects, above: str, sizes: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return the sizes and checksums of objects, as `records` does for files; missing ones are left out."""
    found: dict[str, dict[str, Any]] = {path: {"bytes": 0, "crc32": []} for path in sizes}
    missing = set()

    def started() -> Iterator[tuple[str, Pending]]:
        for path, size in sizes.items():
            for at in range(0, max(size, 1), BLOCK):
                stop = at + BLOCK if at + BLOCK < size else None  # the last read shows whether the object is longer
                yield path, objects.start_read(above + path, at, stop)

    for path, pending in at_once(started(), _AT_ONCE):
        try:
            data = objects.read_result(pending).data
        except TruncatedError:
            continue  # the size that was read until here differs
        if data is None:
            missing.add(path)
        else:
            found[path]["bytes"] += len(data)
            found[path]["crc32"] += [f"{zlib.crc32(data):08x}"] if data else []

    return {path: record for path, record in found.items() if path not in missing}


def write_part(checkpoint: str, process: int) -> None:
    """Flush the files that one process wrote to disk, and store their checksums for `collect`."""
    paths = [path for path in files_below(checkpoint) if _is_of(path, process)]
    _sync(checkpoint, paths)
    part = records(checkpoint, paths)
    with open(os.path.join(checkpoint, f"{_PART}{process}"), "w") as file:
        json.dump(part, file)


def _is_of(path: str, process: int) -> bool:
    # Orbax names its folders ocdbt.process_3, with a suffix for replicas.
    name = path.split("/")[0].removeprefix("ocdbt.process_")
    return name != path.split("/")[0] and re.match(r"[0-9]*", name)[0] == str(process)  # type: ignore[index]


def _sync(checkpoint: str, paths: Iterable[str]) -> None:
    """Flush files to disk: of those that Orbax writes, tensorstore flushes some, and no program the others."""
    sync_files(os.path.join(checkpoint, path) for path in paths)


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
    _sync(checkpoint, rest)
    found |= records(checkpoint, rest)
    return dict(sorted(found.items()))
