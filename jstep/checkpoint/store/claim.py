"""One writer of a prefix in a directory at a time: a locked file beside the checkpoints, gone when the writer is.

The lock is the operating system's, so it ends with the process however that ends, also on file systems over a network
(NFS hands it to its server). A child of the process does not inherit it. The file says who has it.

Where a file system knows no locks, what the file says has to do: of a process on this host one can tell whether it
lives; one on another host counts as gone when it has not written for an hour.
"""

import contextlib
import errno
import json
import os
import time
import weakref
from typing import Any, NoReturn

from jstep.checkpoint.format.manifest import CheckpointError
from jstep.checkpoint.store import owner

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_SILENT = 3600.0  # seconds after which a writer on another host counts as gone, where there are no locks
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}
_HELD: "weakref.WeakSet[Claim]" = weakref.WeakSet()


def file_of(directory: str, prefix: str) -> str:
    """The file that whoever writes a prefix has locked."""
    return os.path.join(directory, f".{prefix}.jstep-writer")


class Claim:
    """The right to write a prefix in a directory, from when it is made until `release`, or the end of the process.

    Raises:
        CheckpointError: Somebody else has it; names host and process.
        OSError: The directory cannot be written.
    """

    def __init__(self, directory: str, prefix: str) -> None:
        self.path = file_of(directory, prefix)
        self._handle: int | None = _locked(self.path, directory, prefix)
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _unlock, self.path, self._handle, self._pid)
        _HELD.add(self)

    def is_held(self) -> bool:
        """Whether it is still what others see: the directory may have been removed, or this be a fork."""
        if self._handle is None or self._pid != os.getpid():
            return False
        with contextlib.suppress(OSError):
            if not _same_file(self._handle, self.path):
                return False
            os.utime(self._handle)  # a sign of life
            return True
        return False

    def release(self) -> None:
        """Gives it up."""
        self._handle = None
        self._finalizer()


def _locked(path: str, directory: str, prefix: str) -> int:
    while True:
        handle, ours = _opened(path)
        try:
            if not _lock(handle):
                _refuse(handle, directory, prefix)
            if not ours:
                os.unlink(path)  # what a killed writer left, who was another user
            # Whoever had it before may have removed the file between our opening and our locking it.
            if _same_file(handle, path):
                _write(handle, owner.this_process())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _opened(path: str) -> tuple[int, bool]:
    """The file, opened, and whether it may be written: one that another user left may not, as a rule."""
    flags = getattr(os, "O_CLOEXEC", 0)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666), True
    except PermissionError:
        return os.open(path, os.O_RDONLY | flags), False


def _lock(handle: int) -> bool:
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            if error.errno not in _NO_LOCKS:
                raise
    return not _seems_alive(_read(handle), os.fstat(handle).st_mtime)


def _seems_alive(who: dict[str, Any], last_sign: float) -> bool:
    if not who:
        return False
    alive = owner.is_alive(who)
    return time.time() - last_sign < _SILENT if alive is None else alive


def _same_file(handle: int, path: str) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    own = os.fstat(handle)
    return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)


def _read(handle: int) -> dict[str, Any]:
    try:
        who = json.loads(os.pread(handle, 4096, 0))
    except (OSError, ValueError):
        return {}
    return who if isinstance(who, dict) else {}


def _write(handle: int, who: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a full disk: the lock counts, not what the file says
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(who).encode(), 0)


def _refuse(handle: int, directory: str, prefix: str) -> NoReturn:
    raise CheckpointError(owner.refusal(directory, prefix, _read(handle)))


def _unlock(path: str, handle: int, pid: int) -> None:
    if pid != os.getpid():
        return  # a fork: its copy was closed when it began
    with contextlib.suppress(OSError):
        if _same_file(handle, path):
            os.unlink(path)
    with contextlib.suppress(OSError):
        os.close(handle)


def _leave_to_the_parent() -> None:
    """In a fork: closes its copies of the locked files, so that the claims end with the parent."""
    for claim in list(_HELD):
        handle, claim._handle = claim._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)
