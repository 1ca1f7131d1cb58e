"""What a reader opens, follows, counts and names in files that somebody else may have written.

Who made a directory of runs, a checkpoint or a bucket has chosen all of it: what its links lead to, the paths that its
records name, and each size, number and name. Every reader asks this module what of it to believe;
`tests/stores/test_untrusted.py` finds the readers that do not.

    opened      regular files, which neither wait nor act when they are opened
    followed    links above the directory that the user has given, and none below it; recorded paths that stay below or
                beside the directory of the run, or that the reader has recorded
    counted     bytes of files, each file once; numbers that a step, a size or a time can have
    named       names and keys that this package gives
"""

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple


class UntrustedError(ValueError):
    """The content of a file is not what jstep writes."""


# RunComponents: regular files.


def require_regular(path: str, *, follow_link: bool) -> None:
    """Raise an OSError if a path is not that of a regular file; `open_regular` asks before it opens one.

    A FIFO blocks who opens it, and opening a device may have effects.
    """
    mode = os.stat(path, follow_symlinks=follow_link).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if stat.S_ISLNK(mode):
        raise OSError(errno.EINVAL, "is a link, which is not followed", path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is not a regular file", path)


# Counted: the bytes of files, each once, and numbers that something can have.

MAX_CLAIM_BYTES = 2**16
"""The maximum bytes of a claim, of the file of a stall, and of that of a process."""
MAX_START_BYTES = 2**20
"""The maximum bytes of the file of a start, and of its card."""
MAX_MANIFEST_BYTES = 2**28
"""The maximum bytes of the manifest of a checkpoint."""
MAX_DEPTH = 200
"""The maximum depth of nested values: a config may have lists of lists."""
_MAX_EQUAL_HASHES = 64
"""The maximum number of keys with one hash. Those of floats such as 1.0, 2.0**61, 2.0**122 are equal, about 34."""


class RegularFiles(NamedTuple):
    """The regular files below a directory.

    Attributes:
        sizes: Path below the directory → bytes.
        nbytes: The bytes of all of them. A file with several names counts once.
    """

    sizes: Mapping[str, int]
    nbytes: int


def regular_files(directory: str, is_counted: Callable[[str], bool] = lambda path: True) -> RegularFiles:
    """Find the regular files below a directory, which may itself be a link.

    Args:
        is_counted: Whether a file of this path below the directory counts. Other files are left out: they may pretend
            that there are more bytes than a reader reads.

    Raises:
        UntrustedError: Something below the directory is a link, which would be followed, or is not a regular file.
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
                    raise UntrustedError(f"{path} is not a regular file")
    return RegularFiles(sizes, sum(inodes.values()))


class Extents:
    """Ranges of bytes that an index names. If no two of them have a byte in common, all need no more than the files."""

    def __init__(self) -> None:
        self._ranges: dict[str, list[tuple[int, int]]] = {}

    def add(self, path: str, start: int, length: int) -> None:
        self._ranges.setdefault(path, []).append((start, start + length))

    def check(self) -> None:
        """Raise an UntrustedError if two ranges have a byte in common."""
        for path, ranges in self._ranges.items():
            ranges.sort()
            end = 0
            for start, stop in ranges:
                if start < end:
                    raise UntrustedError(f"{path!r:.80} is named more than once, from byte {start} on")
                end = stop


def is_step(value: object) -> bool:
    """Return whether a value is a step, or another count: of bytes, of elements, of processes."""
    return type(value) is int and 0 <= value < 2**63


def is_seconds(value: float) -> bool:
    """Return whether a number is a duration, or a time since 1970 before the year 2921."""
    return 0 <= value < 3e10


def step_in(text: str) -> int | None:
    """Return the step that the name of a checkpoint ends in; None if no step has so many digits."""
    # Not `int` at once, which raises an error of its own for more than 4,300 digits.
    step = int(text) if len(text) <= 19 else 2**63
    return step if step < 2**63 else None


def check_keys(keys: Iterable[Hashable]) -> None:
    """Raise an UntrustedError if many keys have one hash, so that a dict of them takes quadratic time."""
    hashes = Counter(map(hash, keys))
    if hashes and max(hashes.values()) > _MAX_EQUAL_HASHES:
        raise UntrustedError(f"{max(hashes.values())} keys have one hash")


def decode_json(raw: bytes) -> Any:
    """Return the value of JSON; None if it is corrupted, or nested too deeply for recursive functions."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    is_shallow = raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH
    return value if is_shallow or _is_nested_at_most(value, MAX_DEPTH) else None


def _is_nested_at_most(value: object, depth: int) -> bool:
    items: Iterable[object] = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list):
        items = value
    return depth > 0 and all(_is_nested_at_most(item, depth - 1) for item in items)


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
