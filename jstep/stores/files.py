"""Reading of local files and objects for logs and the command line; atomic, durable file writes."""

import contextlib
import errno
import io
import math
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from jstep.core.tables import printable
from jstep.stores.objects import Bucket, Objects
from jstep.stores.owners import new_token, remove_temporary, temporary_path
from jstep.stores.untrusted import check_regular, link_below
from jstep.stores.urls import is_url, join_path, resolve_path, split_path


def open_for_reading(path: str, *, follow_link: bool = True) -> BinaryIO:
    """Open a regular file for reading; an object is read immediately as a whole."""
    if not is_url(path):
        file: BinaryIO = open_regular(path, follow_link=follow_link)
        return file
    parent, name = split_path(path)
    data = Objects(parent).read(name).data if name else None
    if data is None:
        raise FileNotFoundError(f"{printable(path)}: there is no such object")
    return io.BytesIO(data)


def open_regular(path: str, *, follow_link: bool = True) -> Any:
    """Open a regular file for reading; never a FIFO, which blocks, or a device.

    Args:
        follow_link: Whether the file itself may be a link.
    """
    check_regular(path, follow_link=follow_link)
    return open(path, "rb", opener=_opener(0 if follow_link else os.O_NOFOLLOW))


def _opener(extra_flags: int) -> Callable[[str, int], int]:
    no_wait = os.O_NONBLOCK  # a FIFO that took the place of the file meanwhile
    return lambda path, flags: os.open(path, flags | no_wait | extra_flags, 0o666)


def read_small(path: str, limit: int, *, follow_link: bool = True) -> bytes:
    """Read a regular file or object of at most `limit` bytes; a larger one is a ValueError."""
    with open_for_reading(path, follow_link=follow_link) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        data = file.read(limit + 1) if size <= limit else b""
    # It may have grown meanwhile.
    if max(size, len(data)) > limit:
        raise ValueError(f"{printable(path)}: has more than {limit} bytes")
    return data


def json_number(value: float) -> float | str:
    """Return a number as strict JSON holds it: NaN and infinities as text."""
    return value if math.isfinite(value) else str(float(value))


def seconds_since_write(path: str) -> float:
    """Return how long ago a local file was written, by its file system's clock if readable."""
    time_now = time.time()
    with contextlib.suppress(OSError, AttributeError):
        handle = os.open(os.path.dirname(os.path.realpath(path)), os.O_TMPFILE | os.O_WRONLY, 0o600)
        time_now = os.fstat(handle).st_mtime
        os.close(handle)
    return time_now - os.stat(path).st_mtime


def is_directory(path: str) -> bool:
    if is_url(path):
        return Bucket(path).exists()
    return os.path.isdir(path)


def is_absent(error: OSError) -> bool:
    """Return whether an error of opening a file means that it is absent, not unreadable."""
    return error.errno in {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    }


def may_be_file(path: str) -> bool:
    """Return whether a local file exists, or may exist but is unreadable.

    A link counts, although it is rejected when it is read.
    """
    try:
        mode = os.stat(path, follow_symlinks=False).st_mode
        return stat.S_ISREG(mode) or stat.S_ISLNK(mode)
    except OSError as error:
        return not is_absent(error)
    except ValueError:
        return False  # the path has a null character, for example


def names_in(path: str) -> list[str]:
    names = Bucket(path).listing() if is_url(path) else os.listdir(path)
    return sorted(name for name in names if "/" not in name)


def walk(path: str) -> list[tuple[str, list[str]]]:
    """Return the directories below one, or directory-like parts of keys, with the names in each."""
    if not is_url(path):
        return sorted((directory, names) for directory, _, names in os.walk(path))
    names_of: dict[str, list[str]] = {}
    for key in Bucket(path).listing():
        directory, _, name = key.rpartition("/")
        url = join_path(path, directory) if directory else path
        names_of.setdefault(url, []).append(name)
    return sorted(names_of.items())


class ForeignFileError(ValueError):
    """A file with a name that jstep writes, which is not one that jstep wrote."""


def check_no_links(path: str, *run_directories: str) -> None:
    """Raise ForeignFileError for a path through a link below a run's directory: `link_below`."""
    for directory in run_directories:
        link = link_below(path, directory)
        if link is not None:
            raise ForeignFileError(
                f"{link}: is a link below {directory}, and nothing is written through it; give the "
                "directory that it leads to, or remove it"
            )


def check_is_no_link(path: str) -> None:
    """Raise a ForeignFileError if a path is a link, behind which may be files of others."""
    if os.path.islink(path):
        raise foreign_file(path, "is a link")


def open_own(path: str, beginning: bytes, *, append: bool = True) -> io.FileIO:
    """Open a file with a name of jstep's for reading and writing, and create it if it is missing.

    Args:
        path: The file. Directories above it may be links.
        beginning: The bytes with which the file begins, unless it is empty, torn, or begins with
            null characters.
        append: Whether all bytes are written at the end of the file.

    Raises:
        ForeignFileError: The file is a link, is not a regular file, or has other content.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode  # before it is opened, as opening a device may have effects
        if not stat.S_ISREG(mode):
            raise foreign_file(path, "is a link" if stat.S_ISLNK(mode) else "is not a regular file")
    opening = _opener(os.O_NOFOLLOW | os.O_CREAT)
    file: io.FileIO = open(path, "ab+" if append else "r+b", 0, opener=opening)  # noqa: SIM115
    try:
        file.seek(0)
        head = file.read(2**20) or b""
        first = head.lstrip(b"\0")[: len(beginning)]
        if not beginning.startswith(first) and not _begins_with_lost_block(head, beginning):
            raise foreign_file(path, f"begins with {first!r}")
        if append and os.fstat(file.fileno()).st_nlink > 1:
            # Another name of the file is elsewhere, as in a backup that `cp -al` has made, and
            # would grow with it.
            file.seek(0)
            _copy_apart(path, file)
            file.close()
            return open_own(path, beginning, append=append)
        file.seek(0, os.SEEK_END)
    except BaseException:
        file.close()
        raise
    return file


def _copy_apart(path: str, file: BinaryIO | io.FileIO) -> None:
    """Put a copy of an open file in its place, which leaves its other names as they are."""
    partial = temporary_path(path, new_token())
    try:
        with new_file(partial) as copy:
            shutil.copyfileobj(file, copy)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _begins_with_lost_block(head: bytes, beginning: bytes) -> bool:
    """Return whether a file begins with zeros, as after a power cut, and continues as expected."""
    if not head.startswith(b"\0"):
        return False
    # The zeros may end within a line.
    next_line = head.lstrip(b"\0").partition(b"\n")[2]
    return next_line.startswith(beginning)


def foreign_file(path: str, what: str) -> ForeignFileError:
    return ForeignFileError(
        f"{path}: jstep writes a file of this name, but it {what}; move it away"
    )


def write_named(path: str, data: bytes) -> None:
    """Write a file or object that the user named; a regular file is replaced atomically.

    Links are followed. A FIFO or a device is written to directly.
    """
    if is_url(path) or os.path.isfile(path) or not os.path.exists(path):
        replace_file(resolve_path(path), data, keeps_mode=True)
        return
    with open(path, "wb") as file:
        file.write(data)


@contextlib.contextmanager
def new_file(path: str, *, flush: bool = True) -> Iterator[BinaryIO]:
    """Open a new file for writing, with the umask's mode, and `flush` it to disk at the end."""
    with open(path, "xb") as file:
        yield file
        if flush:
            file.flush()
            sync(file.fileno(), path)


def keep_mode(new: str, old: str) -> None:
    """Give a new file the permissions of the one that it replaces, which the user has named."""
    with contextlib.suppress(OSError):  # there is no old one, or the file system has no modes
        os.chmod(new, os.stat(old).st_mode & 0o777)


def replace_file(
    path: str,
    data: bytes,
    *,
    flush: bool = True,
    make_parents: bool = True,
    keeps_mode: bool = False,
) -> None:
    """Write a file or object atomically.

    Without `flush`, a power cut may empty it. Without `make_parents`, its directory must exist. The
    mode is the umask's, since somebody else may have put a file there; with `keeps_mode`, it is the
    mode of the file that is replaced.
    """
    directory, name = split_path(path)
    if is_url(path):
        Objects(directory).write(name, data)
        return
    if make_parents:
        make_directories(directory)
    partial = temporary_path(path, new_token())
    try:
        with new_file(partial, flush=flush) as file:
            if keeps_mode:
                keep_mode(partial, path)
            file.write(data)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    if flush:
        sync_directory(directory)
        remove_temporary(directory, name.__eq__)


def remove_file(path: str) -> None:
    directory, name = split_path(path)
    if is_url(path):
        Objects(directory).delete(name)
        return
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def make_directories(path: str) -> None:
    """Create a directory and its parents, and flush their entries."""
    new = []
    directory = path
    while directory and not os.path.isdir(directory):
        new.append(directory)
        directory = os.path.dirname(directory)
    os.makedirs(path or ".", exist_ok=True)
    for directory in reversed(new):
        sync_directory(os.path.dirname(directory))


def sync(handle: int, path: str, *, data_only: bool = False) -> None:
    """Flush an open file to disk.

    `data_only` flushes only data and size, which is enough for a file that only grows.
    """
    try:
        if sys.platform == "darwin" and _is_flushed_by_drive(handle):
            return
        if data_only and hasattr(os, "fdatasync"):
            os.fdatasync(handle)
        else:
            os.fsync(handle)
    except OSError as error:
        raise OSError(
            error.errno, f"could not be flushed to disk: {error.strerror}", path
        ) from error


def _is_flushed_by_drive(handle: int) -> bool:
    """Flush the drive's buffers, too, unlike macOS's fsync; False if the file system cannot."""
    import fcntl

    try:
        fcntl.fcntl(handle, getattr(fcntl, "F_FULLFSYNC", 51))
    except OSError:
        return False
    return True


def sync_directory(directory: str) -> None:
    """Flush the entries of a directory to disk, if the system supports that."""
    try:
        handle = os.open(directory or ".", os.O_RDONLY)
        try:
            sync(handle, directory)
        finally:
            os.close(handle)
    except OSError as error:
        # Some systems cannot flush a directory, or do not let this user open it.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM, errno.EBADF}:
            raise
