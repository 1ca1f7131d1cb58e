"""The contents of a directory of checkpoints, and the checksums of their files; does not load JAX."""

import concurrent.futures
import functools
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jstep.checkpoint.manifest import NAME, CheckpointError, Manifest, decode
from jstep.stores.files import is_absent, may_be_file, sync_files
from jstep.stores.objects import Objects, Pending, TruncatedError, at_once

# The `Store` protocol: storage of checkpoints in a directory or an object store.
#
# A Saver handles states, steps and retention; a store handles names and bytes, and makes checkpoints atomic: whatever
# happens, a path holds a complete checkpoint or none.

Files = Mapping[str, Mapping[str, Any]]
"""Path below a checkpoint → record of that file or object: its `bytes`, and checksums or a stamp."""


class CorruptedError(CheckpointError):
    """A checkpoint is corrupted.

    Attributes:
        problems: Descriptions of what is wrong with which file or object.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


class Commit(NamedTuple):
    """The end of a save, on the first process and in the background.

    Attributes:
        saved_at: The start time of the save, by the Saver's clock.
        end: `end(files, publish)` is called with the written files. It calls `publish(manifest)`, when the checkpoint
            begins to exist, and then deletes those that it supersedes, and what `publish` returns for `Store.erase`.
    """

    saved_at: float
    end: Callable[[Files, Callable[[Manifest], Sequence[str]]], None]


class Store(Protocol):
    """Checkpoints of any prefixes below one directory or URL. Savers do not share stores.

    Errors of the storage (permissions, bucket, space, network) are OSErrors that name it and say what to do;
    CheckpointError is for problems of a checkpoint.
    """

    directory: str
    """An absolute path, or a URL without a trailing slash."""

    def path(self, name: str) -> str:
        """Return the path or URL of a checkpoint, as shown to users."""

    # Reading. These methods change nothing, and need no claim.

    def newest_first(self, prefix: str | None, trusted: Collection[int] = frozenset()) -> Iterator[tuple[int, str]]:
        """Yield step and path of every complete checkpoint, highest step first; checkpoints are checked lazily.

        Args:
            prefix: The prefix of the names; None for any prefix.
            trusted: Steps that need not be checked.
        """

    def at(self, prefix: str, step: int) -> str | None:
        """Return the path of the complete checkpoint of a step, or None."""

    def broken(self, prefix: str, above: int) -> list[tuple[str, str]]:
        """Return path and problem of incomplete checkpoints at steps above a given one, highest step first.

        These are only checkpoints that files were removed from; no crash leaves them. Object stores report none.
        """

    def manifest(self, path: str) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointError: The manifest is corrupted (names its path).
            FileNotFoundError: There is no manifest: the checkpoint was deleted meanwhile.
        """

    def find_corruption(
        self, path: str, manifest: Manifest, share: tuple[int, int] = (0, 1), *, every: bool = False
    ) -> list[str]:
        """Return descriptions of what is wrong with the files of a checkpoint. May be called while `restore` reads.

        Args:
            path: The path of the checkpoint.
            manifest: Its manifest.
            share: (i, n) for the i-th of n processes that share the work.
            every: Whether a corrupted file that nothing reads is a problem, too, and not only a warning.
        """

    def read_file(self, path: str, manifest: Manifest, name: str) -> bytes:
        """Read one of the files that were saved with the arrays, and verify its checksums.

        Raises:
            CorruptedError: The file is corrupted, or the checkpoint has no such file.
        """

    def restore(self, path: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """Read arrays by their name in the manifest (`Leaf.array`).

        The stored shapes and dtypes are compared with the manifest (`leaves.stored_kind`) before any byte is decoded.
        Packed arrays (`Manifest.is_packed`) are verified as they are read; others need `find_corruption`.

        Args:
            path: The path of the checkpoint.
            manifest: Its manifest.
            shardings: Name → sharding of the array; None for a NumPy array.

        Raises:
            CorruptedError: The checkpoint is corrupted.
        """

    # Writing.

    def claim(self, prefix: str) -> None:
        """Claim a prefix, so that only this store writes it, and check that it can.

        Creates the directory, checks the required permissions, takes the claim, and removes what an interrupted writer
        left behind. Called before every save, and before the first step of a run; cheap if nothing has changed.
        On several processes only the first one calls it.

        Raises:
            CheckpointError: Another store writes that prefix; names its host and process.
            OSError: The directory cannot be created or written.
        """

    def save(
        self, path: str, arrays: Mapping[str, Any], compress: bool, commit: Commit, files: Mapping[str, Any]
    ) -> None:
        """Start to write arrays, and the files of this process, all processes together.

        It returns when the memory of the arrays may be donated. When everything is written, `commit.end` is called,
        with a function that publishes a manifest atomically.
        """

    def wait(self) -> None:
        """Wait for the write to end, and raise its error if it failed."""

    def abandon(self, path: str) -> None:
        """Remove what a failed save left behind, as far as possible; never raises."""

    def command_to_set_aside(self, path: str) -> str:
        """Return a shell command that gives a checkpoint a name under which nothing finds or deletes it."""

    # Deletion, for `retention`.

    def hide(self, path: str) -> Sequence[str]:
        """Make a checkpoint none, atomically, and return what is left of it, for `erase`; nothing if it was none."""

    def erase(self, remains: Sequence[str]) -> None:
        """Delete what is no part of a checkpoint any more."""

    def log_undeleted(self, path: str, error: Exception) -> None:
        """Log a warning that a checkpoint could not be deleted."""

    def leave(self) -> None:
        """Note that the Saver was not closed and is no longer referenced: the next writer may finish its save."""

    def close(self, wait: bool = True) -> None:
        """End the threads and release the claim. Reading still works.

        Args:
            wait: False to wait for nothing: the user has pressed Ctrl-C twice.
        """


# Listing of checkpoints: their names and manifests, and which of them are complete.
#
# In a directory each is a folder. Below a URL they are objects with these keys:
#
#     model-7/manifest.json               the checkpoint exists when this does
#     model-7/data.1795172888-1f0e2d3c/   the objects of one attempt to save it
#     ~claims/model                       the writer of model-*
#     ~jstep                              the mark: a list without it is incomplete


def read_manifest(checkpoint: str) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: The manifest is corrupted (names its path).
        FileNotFoundError: There is no manifest.
    """
    path = os.path.join(checkpoint, NAME)
    with open(path, "rb") as file:
        data = file.read()
    try:
        return _decoded(data)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from None


# A manifest is decoded three times in a row when a checkpoint is listed, found and read. Callers must not modify it.
_decoded = functools.lru_cache(maxsize=4)(decode)


TEMPORARY = ".orbax-checkpoint-tmp"  # Orbax's suffix for unfinished checkpoints
IN_FLIGHT: dict[str, Any] = {}
"""Path of a temporary folder → the checkpointer that writes it."""
REPLACED = ".jstep-replaced"  # the old checkpoint of a step, while the new one replaces it
DELETED = ".jstep-deleted"
ASIDE = ".aside."  # what the user sets aside, by the command that an error shows; a number follows

UNUSED = frozenset({"_METADATA", "_CHECKPOINT_METADATA"})
"""Files in which Orbax describes a checkpoint. The manifest does that here, so a checkpoint is intact without them."""
OF_ORBAX = UNUSED | {"manifest.ocdbt"}
_STEP = "(0|[1-9][0-9]*)"
_logger = logging.getLogger("jstep")


def name(prefix: str, step: int) -> str:
    """Return the name of a checkpoint, `prefix-step`."""
    return f"{prefix}-{step}"


def misnamed(prefix: str, step: int, held: int) -> str:
    """Return the problem of a checkpoint whose name has another step than its content."""
    return (
        f"its name says step {step}, and it holds step {held}: it was copied or renamed; rename it to {prefix}-{held}"
    )


def entries(directory: str, prefix: str | None) -> list[tuple[int, bool, str]]:
    """Return step, whether it has its final name, and name of every folder that may be a checkpoint, highest first."""
    start = ".+" if prefix is None else re.escape(prefix)
    pattern = re.compile(rf"({start})-{_STEP}({re.escape(REPLACED)})?", re.DOTALL)
    matches = [match for entry in listed(directory) if (match := pattern.fullmatch(entry))]
    # A replaced checkpoint counts only if its successor never took its place.
    return sorted(((int(match[2]), match[3] is None, match[0]) for match in matches), reverse=True)


def listed(directory: str) -> list[str]:
    """Return the names in a directory; an empty list if it is missing."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def found(final: str) -> str | None:
    """Return where the checkpoint of a final path is complete, or None."""
    there, lacks = look(final)
    _warn(final, lacks)
    return there


def look(final: str) -> tuple[str | None, str | None]:
    """Return where the checkpoint of a final path is complete, or None and what it lacks.

    Saving a step again renames its old checkpoint before the new one gets the name.
    """
    lacks: str | None = NAME
    for path in (final, final + REPLACED, final):
        lacks = missing(path)
        if lacks is None:
            return path, None
    return None, lacks


def is_whole(path: str) -> bool:
    """Return whether a checkpoint has its manifest and every file that the manifest names.

    A corrupted manifest counts as present: restoring raises an error, while skipping it would silently return to an
    older step.
    """
    lacks = missing(path)
    _warn(path, lacks)
    return lacks is None


def _warn(path: str, lacks: str | None) -> None:
    if lacks not in (None, NAME):
        _logger.warning("%s is ignored: it is incomplete, %s is missing", path, lacks)


def missing(path: str) -> str | None:
    """Return the first missing file of a checkpoint, of those that are read; None if it is complete.

    What cannot be read, such as without permission, counts as present: it may be intact, and reading it raises why.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        # An unreadable manifest without any other file of ours belongs to another program.
        return None if has_data(path) else NAME
    except OSError as error:
        return NAME if is_absent(error) else None
    files = manifest.files.keys() - UNUSED
    return next((file for file in sorted(files) if not may_be_file(os.path.join(path, file))), None)


def has_data(path: str) -> bool:
    """Return whether a folder holds arrays of a checkpoint, written here or copied from a bucket."""
    return any(
        entry in OF_ORBAX or (is_attempt(entry) and os.path.isdir(os.path.join(path, entry))) for entry in listed(path)
    )


def is_remains(path: str) -> bool:
    """Return whether a folder is a checkpoint or the remains of one, and not data of another program."""
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    entries = set(listed(path))
    return not entries or bool(entries & {NAME, *OF_ORBAX})


_KEY = re.compile(r"(?P<name>(?P<prefix>[^/]+)-(?P<step>0|[1-9][0-9]*))/(?P<rest>.+)", re.DOTALL)
_ATTEMPT = re.compile(r"data\.(?:([0-9]{1,15})-)?[^/]+", re.DOTALL)
HOUR = 3600


def is_attempt(name: str | None) -> bool:
    """Return whether it is the name of an attempt."""
    return name is not None and _ATTEMPT.fullmatch(name) is not None


def is_old(attempt: str, now: float) -> bool:
    """Return whether an attempt began more than an hour ago, so that it is no longer written or read."""
    match = _ATTEMPT.fullmatch(attempt)
    return match is not None and match[1] is not None and now - int(match[1]) > HOUR


class Checkpoints:
    """The checkpoints of a prefix, or of any prefix, in a list of keys."""

    def __init__(self, keys: Iterable[str], prefix: str | None) -> None:
        self.committed: dict[str, int] = {}
        self.attempts: dict[str, dict[str, list[str]]] = {}
        """Name of the checkpoint → attempt → its keys."""
        for key in keys:
            match = _KEY.fullmatch(key)
            if match is None or (prefix is not None and match["prefix"] != prefix):
                continue
            attempt, _, below = match["rest"].partition("/")
            if match["rest"] == NAME:
                self.committed[match["name"]] = int(match["step"])
            elif below and is_attempt(attempt):
                self.attempts.setdefault(match["name"], {}).setdefault(attempt, []).append(key)

    def newest_first(self) -> list[tuple[int, str]]:
        """Return step and name of the checkpoints, highest step first."""
        return sorted(((step, name) for name, step in self.committed.items()), reverse=True)


# Checksums of the files of a checkpoint that was written to a disk, there or copied below a URL.
#
# Files are checksummed rather than arrays, so that a process that wrote only its shards can compute its part, and a
# process on another mesh, or with other shards, can verify them.

BLOCK = 64 * 2**20  # bytes per checksum: large files are read by several threads
_PIECE = 2**20  # bytes that fit the cache of a core
_PART = "checksums.process_"
_AT_ONCE = 4
"""Concurrent reads of objects: 256 MB at most."""


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


def _checksum(path: str, at: int) -> str:
    value, left = 0, BLOCK
    buffer = memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        file.seek(at)
        while left and (count := file.readinto(buffer[: min(left, _PIECE)])):
            value, left = zlib.crc32(buffer[:count], value), left - count
    return f"{value:08x}"


def find_corruption(checkpoint: str, manifest: Manifest, share: tuple[int, int], *, every: bool) -> list[str]:
    """Return descriptions of what is wrong with the files of a checkpoint; an empty list if it is intact.

    Wrong sizes are found without reading, and then no checksum is computed. A corrupted file that nothing
    reads is a warning.

    Args:
        checkpoint: The path of the checkpoint.
        manifest: Its manifest.
        share: (i, n) to check only every n-th of the large files, starting at the i-th.
        every: Whether a corrupted file that nothing reads is a problem, too.
    """
    large = [path for path in sorted(manifest.files) if manifest.files[path]["bytes"] > _PIECE]
    others = set(large) - set(large[share[0] :: share[1]])
    expected = {path: record for path, record in manifest.files.items() if path not in others}
    root = os.path.realpath(checkpoint)
    problems = {}
    read = {}
    for path, record in expected.items():
        if not is_below(root, path):
            problems[path] = "a link out of the checkpoint"
        elif path not in UNUSED:
            read[path] = record
        else:
            try:
                problems |= _differences(checkpoint, {path: record})
            except OSError as error:
                problems[path] = error.strerror or "it cannot be read"
    problems |= _differences(checkpoint, read)
    return _problems(checkpoint, {path: problems[path] for path in expected}, is_first=share[0] == 0, every=every)


def _differences(checkpoint: str, expected: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return how each file differs from its record; "" if it does not."""
    found = {}
    for path, record in expected.items():
        whole = os.path.join(checkpoint, path)
        found[path] = difference(record, {"bytes": os.path.getsize(whole)} if may_be_file(whole) else None)
    if not any(found.values()):
        for path, actual in records(checkpoint, expected, threads=8).items():
            found[path] = difference(expected[path], actual)
    return found


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


def find_corruption_of_copy(
    objects: Objects, above: str, manifest: Manifest, share: tuple[int, int], *, every: bool
) -> list[str]:
    """Return descriptions of what is wrong with the objects of a checkpoint that was copied from a disk; see above."""
    paths = sorted(manifest.files)[share[0] :: share[1]]
    actual: dict[str, dict[str, Any]] = {path: {"bytes": 0, "crc32": []} for path in paths}

    def started() -> Iterator[tuple[str, Pending]]:
        for path in paths:
            size = manifest.files[path]["bytes"]
            for at in range(0, max(size, 1), BLOCK):
                stop = at + BLOCK if at + BLOCK < size else None  # the last read shows whether the object is longer
                yield path, objects.start_read(above + path, at, stop)

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

    found = {path: difference(manifest.files[path], actual.get(path)) for path in paths}
    return _problems(objects.at(above.rstrip("/")), found, is_first=True, every=every)


def read_file(start_read: Callable[..., Any], above: str, manifest: Manifest, name: str) -> bytes:
    """Read a file of a checkpoint that was written to a disk, and verify its checksums.

    Args:
        start_read: Starts to read a file or an object, as in `packs`.
        above: What the keys of the checkpoint begin with: its name and a slash, or nothing.
        manifest: The manifest of the checkpoint.
        name: The name of the file.

    Raises:
        CorruptedError: It is corrupted, or not a file of the checkpoint.
    """
    try:
        data = start_read(f"{above}{name}").read().data if name in manifest.files else None
    except (ValueError, TruncatedError) as error:
        raise CorruptedError([f"{name}: {error}"]) from error
    actual = None
    if data is not None:
        sums = [f"{zlib.crc32(data[at : at + BLOCK]):08x}" for at in range(0, len(data), BLOCK)]
        actual = {"bytes": len(data), "crc32": sums}
    problem = difference(manifest.files.get(name, {}), actual)
    if data is None or problem:
        raise CorruptedError([f"{name}: {problem}"])
    return bytes(data)


def write_files(checkpoint: str, files: Mapping[str, Any]) -> None:
    """Write the files of a save (`Extra.files`) and release their memory; `write_part` or `collect` flush them."""
    for name, one in files.items():
        with open(os.path.join(checkpoint, name), "xb") as file:
            file.write(one.read())
        one.written()


def write_part(checkpoint: str, process: int, files: Iterable[str] = ()) -> None:
    """Flush the files that one process wrote to disk, and store their checksums for `collect`.

    Args:
        checkpoint: The path of the checkpoint.
        process: The index of the process.
        files: The names of its files besides those of the arrays.
    """
    paths = list(files)
    for path in files_below(checkpoint):
        # Orbax names its folders ocdbt.process_3, with a suffix for replicas.
        match = re.match(r"ocdbt\.process_([0-9]+)", path.split("/")[0])
        paths += [path] if match and match[1] == str(process) else []
    _sync(checkpoint, paths)
    part = records(checkpoint, paths)
    with open(os.path.join(checkpoint, f"{_PART}{process}"), "w") as file:
        json.dump(part, file)


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
