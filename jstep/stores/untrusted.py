"""Rules for files that somebody else may have written: what is opened, followed, counted, named.

Whoever made a directory of runs, a checkpoint or a bucket has chosen everything in it: where links
lead, the paths in records, and each size, number and name. Every reader uses this module to decide
what to trust; `tests/stores/test_untrusted.py` finds the readers that do not.

    opened      regular files, which neither wait nor act when they are opened
    followed    links above the directory that the user has given, and none below it; recorded paths
                that stay below or beside the directory of the run, or that the reader has recorded
    counted     bytes of files, each file once; numbers that a step, a size or a time can have
    named       names and keys that this package gives
"""

import contextlib
import errno
import json
import os
import re
import socket
import stat
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from jstep.core.tables import printable
from jstep.stores.urls import is_url, join_path, resolve_path, split_path


class UntrustedError(ValueError):
    """The content of a file is not what jstep writes."""


# Opened: regular files.


def check_regular(path: str, *, follow_link: bool) -> None:
    """Raise an OSError if a path is not a regular file's; `open_regular` calls this first.

    Opening a FIFO blocks, and opening a device may have effects.
    """
    mode = os.stat(path, follow_symlinks=follow_link).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if stat.S_ISLNK(mode):
        raise OSError(errno.EINVAL, "is a link, not a regular file", path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is not a regular file", path)


# Followed: links, and paths that records name.


def link_below(path: str, run_directory: str) -> str | None:
    """Return the first link between a run's directory and a path below it; None if there is none.

    The directory of a run may itself be a link, and so may the directories above it: its user has
    made them. Links below it were made by the author of the run, and files that are written or
    deleted through them are not in the run.
    """
    if is_url(path) or is_url(run_directory):
        return None
    directory = os.path.abspath(path)
    names: list[str] = []
    while not _is_same_directory(directory, run_directory):
        directory, name = os.path.split(directory)
        if not name:
            return None  # it is not below the directory of the run
        names.append(name)
    # From the run down to the path.
    for name in reversed(names):
        directory = os.path.join(directory, name)
        if os.path.islink(directory):
            return directory
    return None


def _is_same_directory(path: str, directory: str) -> bool:
    if path == os.path.abspath(directory):
        return True
    # The names alone do not tell: one may lead through a link above the directory. But a path that
    # is a link does not count, since it may be one in the run that leads to the run.
    with contextlib.suppress(OSError):
        return not os.path.islink(path) and os.path.samefile(path, directory)
    return False


class RecordedRun(NamedTuple):
    """A run as its record describes it, which decides which recorded paths may be opened.

    Attributes:
        where: The directory or URL of the run as it is read.
        directory: The directory or URL that the record names; None if it names none.
        hosts: The hosts that have recorded that directory.
        original: The directory or URL of the reader's own run that this is a copy of; None if it is
            not one.
    """

    where: str
    directory: str | None
    hosts: Collection[str | None]
    original: str | None = None

    @property
    def is_readers(self) -> bool:
        """Whether the reader has made the record: on this host, in this directory."""
        return self.is_of_host and self.directory is not None and self.is_at(self.directory)

    @property
    def is_of_host(self) -> bool:
        return set(self.hosts) == {socket.gethostname()}

    def is_at(self, path: str) -> bool:
        """Return whether a recorded path is that of the run, as it is read."""
        if is_url(path) or is_url(self.where):
            return path == self.where
        if os.path.abspath(path) == os.path.abspath(self.where):
            return True
        if _is_below_proc_or_dev(path):
            return False
        # Following the links of an arbitrary path may mount another file system.
        may_follow = self.is_of_host or is_below_or_beside(path, self.where)
        return may_follow and resolve_path(path) == resolve_path(self.where)

    def may_be_opened(self, path: str) -> bool:
        """Return whether a path that the record names may be opened, as it is."""
        return self.is_readers or is_below_or_beside(path, self.where)

    def is_in_original(self, path: str) -> bool:
        """Return whether a recorded path is below the original of this copy.

        It must also be below it once links on the way are followed.
        """
        if self.original is None or is_url(path):
            return False
        if not _is_below(os.path.abspath(path), self.original):
            return False
        return _is_below(os.path.realpath(path), os.path.realpath(self.original))

    def find(self, path: str) -> str | None:
        """Return where a recorded path may be opened.

        None if somebody else recorded it and it leads elsewhere. Files that were moved together
        with the run are found below or beside the directory in which the run is now.
        """
        if self.is_readers:
            return path
        moved = self.moved(path)
        if not is_below_or_beside(moved, self.where):
            return None
        return moved

    def moved(self, path: str) -> str:
        if not self.directory or not path or any(map(is_url, (self.directory, self.where, path))):
            return path
        return os.path.normpath(os.path.join(self.where, os.path.relpath(path, self.directory)))


def is_below_or_beside(path: str, where: str) -> bool:
    """Return whether a path is in the directory above a run's, even if links are followed.

    Nothing is beside a run in the root directory.
    """
    if is_url(path) != is_url(where) or not path:
        return False
    if is_url(where):
        # A server may take `..` in a key for the directory above, which may be another bucket.
        if {".", ".."} & set(path.split("/")):
            return False
        return join_path(path, "").startswith(join_path(split_path(where)[0], ""))
    # The names are compared first: following the links of an arbitrary path may mount a file
    # system.
    named = os.path.abspath(path)
    parent_as_named = _parent(os.path.abspath(where))
    parent = _parent(os.path.realpath(where))
    if not _is_below(named, parent_as_named) and not _is_below(named, parent):
        return False
    return _is_below(os.path.realpath(path), parent)


def _is_below_proc_or_dev(path: str) -> bool:
    # Such as `/proc/self/cwd`, which is any directory that the reader is in.
    first_name, _, _ = os.path.abspath(path).lstrip("/").partition("/")
    return first_name in ("proc", "dev")


def _parent(where: str) -> str:
    """Return the directory above a run's; the run's own if that is the root."""
    parent = os.path.dirname(where)
    is_root = os.path.dirname(parent) == parent
    return where if is_root else parent


def _is_below(path: str, directory: str) -> bool:
    # With the slash: /runs/ab is not below /runs/a.
    return os.path.join(path, "").startswith(os.path.join(directory, ""))


# Counted: the bytes of files, each file once, and the ranges of numbers.

MAX_CLAIM_BYTES = 2**16
"""The maximum bytes of a claim, of the file of a stall, and of the file of a process."""
MAX_START_BYTES = 2**20
"""The maximum bytes of the file of a start, and of its setup."""
MAX_MANIFEST_BYTES = 2**28
"""The maximum bytes of the manifest of a checkpoint."""
MAX_DEPTH = 200
"""The maximum depth of nested values: a config may have lists of lists."""
_MAX_EQUAL_HASHES = 64
"""The maximum number of keys with one hash. About 34 floats, such as 1.0, 2.0**61 and 2.0**122,
have equal hashes."""


class RegularFiles(NamedTuple):
    """The regular files below a directory.

    Attributes:
        sizes: Path below the directory → bytes.
        nbytes: The bytes of all of them. A file with several names counts once.
    """

    sizes: Mapping[str, int]
    nbytes: int


def regular_files(
    directory: str, is_counted: Callable[[str], bool] = lambda path: True
) -> RegularFiles:
    """Find the regular files below a directory, which may itself be a link.

    Args:
        is_counted: Whether a file of this path below the directory counts. Other files are left
            out: they may pretend that there are more bytes than a reader reads.

    Raises:
        UntrustedError: Something below the directory is a link, which would be followed, or is not
            a regular file.
    """
    sizes: dict[str, int] = {}
    inodes: dict[tuple[int, int], int] = {}
    waiting = [""]
    while waiting:
        inner = waiting.pop()
        with os.scandir(os.path.join(directory, inner)) as entries:
            for entry in entries:
                path = os.path.join(inner, entry.name)
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    waiting.append(path)
                elif stat.S_ISREG(found.st_mode):
                    if is_counted(path):
                        sizes[path] = found.st_size
                        inodes[found.st_dev, found.st_ino] = found.st_size
                else:
                    raise UntrustedError(f"{printable(path)} is not a regular file")
    return RegularFiles(sizes, sum(inodes.values()))


class Extents:
    """Ranges of bytes that an index names.

    If no two of them have a byte in common, all need no more than the files.
    """

    def __init__(self) -> None:
        self._ranges: dict[str, list[tuple[int, int]]] = {}

    def add(self, path: str, start: int, length: int) -> None:
        self._ranges.setdefault(path, []).append((start, start + length))

    def check(self) -> None:
        """Raise UntrustedError if ranges share a byte, or one has bytes that no file can have."""
        for path, ranges in self._ranges.items():
            ranges.sort()
            end = 0
            for start, stop in ranges:
                if start < end:
                    raise UntrustedError(
                        f"{path!r:.80} is named more than once, from byte {start} on"
                    )
                end = stop
            if end >= 2**63:
                raise UntrustedError(f"{path!r:.80} is named up to byte {end}")


def is_step(value: object) -> bool:
    """Return whether a value is a step, or another count: of bytes, of elements, of processes."""
    return type(value) is int and 0 <= value < 2**63


def is_seconds(value: float) -> bool:
    """Return whether a number is a duration, or a time since 1970 before the year 2921."""
    return 0 <= value < 3e10


def step_in(text: str) -> int | None:
    """Return the step that the name of a checkpoint ends in; None if no step has so many digits."""
    # Before `int`, which raises an error of its own for more than 4,300 digits.
    if len(text) > 19:
        return None
    step = int(text)
    return step if step < 2**63 else None


def check_keys(keys: Iterable[Hashable]) -> None:
    """Raise UntrustedError if many keys have one hash: a dict of them would take quadratic time."""
    hashes = Counter(map(hash, keys))
    if hashes and max(hashes.values()) > _MAX_EQUAL_HASHES:
        raise UntrustedError(f"{max(hashes.values())} keys have one hash")


def decode_json(raw: bytes) -> Any:
    """Return the value of JSON; None if it is corrupted, or too deeply nested for recursion."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    # With so few brackets, it cannot be nested deeper.
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return value
    return value if _is_nested_at_most(value, MAX_DEPTH) else None


def _is_nested_at_most(value: object, depth: int) -> bool:
    if depth == 0:
        return False
    items: Iterable[object] = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list):
        items = value
    return all(_is_nested_at_most(item, depth - 1) for item in items)


# Named: files and keys that this package gives.

_DATABASE_FILE = re.compile(r"(?:ocdbt\.process_[0-9]+/)?(?:manifest\.ocdbt|d/[0-9a-f]{32})")


def is_database_file(path: str) -> bool:
    """Return whether the database of a checkpoint has a file of this path below its directory."""
    return _DATABASE_FILE.fullmatch(path) is not None


def is_utf8(text: str) -> bool:
    """Return whether a string has no half of a surrogate pair."""
    return text.encode(errors="replace").decode() == text


def is_word(value: object) -> bool:
    """Return whether a value is a short text that an error may show as it is."""
    return isinstance(value, str) and value.isprintable() and len(value) <= 100
