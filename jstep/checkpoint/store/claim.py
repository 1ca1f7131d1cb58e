"""Write lock of a prefix in a directory: a locked file next to the checkpoints, for one writer at a time.

The lock belongs to the operating system, so it ends with the process however that ends, also on network file systems
(NFS passes it to its server). A child process does not inherit it. The file names its owner.

On file systems without locks, the content of the file decides: a process on this host is looked up; one on another host
counts as dead when it has not written for an hour.

Other locks identify their processes in the same way: those of object stores, and temporary files of weights.
"""

import contextlib
import errno
import json
import os
import socket
import time
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

from jstep.checkpoint.format.manifest import CheckpointError


def this_process() -> dict[str, Any]:
    """Return a JSON dict that identifies this process among all hosts."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "space": _space(), "pid": pid, "started": started(pid)}


def is_alive(owner: Mapping[str, Any]) -> bool | None:
    """Return whether a process is alive; None if it is on another host or in another container."""
    if owner.get("host") != socket.gethostname() or owner.get("space", _space()) != _space():
        return None
    pid = owner.get("pid", -1)
    return isinstance(pid, int) and pid > 0 and owner.get("started") == started(pid) is not None


def started(pid: int) -> str | None:
    """Return the start time of a process of this host in system ticks, which identifies it together with its PID."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]  # killed, but not yet reaped by its parent
    if os.name != "posix":
        return "unknown"  # os.kill would end the process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "unknown"


def _space() -> str:
    """Return the namespace of PIDs: the boot ID separates hosts of the same name, the PID namespace containers."""
    found = []
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        found.append(file.read().strip())
    with contextlib.suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)


def refusal(directory: str, prefix: str, owner: Mapping[str, Any]) -> str:
    """Return the error message for a second writer."""
    host, pid = owner.get("host", "an unknown host"), owner.get("pid", "unknown")
    mine = pid == os.getpid() and host == socket.gethostname() and owner.get("space", _space()) == _space()
    who = f"process {pid} on {host}" + (", which is this one" if mine else "")
    way_out = (
        "close the other Saver first (`with Saver(…) as saver:` does)" if mine else "wait for that process or end it"
    )
    return (
        f"{prefix}-* in {directory} is being written by {who}: one writer at a time, or one run would destroy the "
        f"other's checkpoints. Give this run its own directory or prefix, or {way_out}."
    )


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_SILENT = 3600.0  # seconds after which a writer on another host counts as dead, on file systems without locks
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}
_HELD: "weakref.WeakSet[Claim]" = weakref.WeakSet()


def file_of(directory: str, prefix: str) -> str:
    """Return the file that the writer of a prefix locks."""
    return os.path.join(directory, f".{prefix}.jstep-writer")


class Claim:
    """The exclusive right to write a prefix in a directory, until `release` or the end of the process.

    Raises:
        CheckpointError: Another writer has it; names its host and process.
        OSError: The directory cannot be written.
    """

    def __init__(self, directory: str, prefix: str) -> None:
        self.path = file_of(directory, prefix)
        self._handle: int | None = _locked(self.path, directory, prefix)
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _unlock, self.path, self._handle, self._pid)
        _HELD.add(self)

    def is_held(self) -> bool:
        """Return whether the claim still holds: the directory may have been removed, or this may be a fork."""
        if self._handle is None or self._pid != os.getpid():
            return False
        with contextlib.suppress(OSError):
            if not _same_file(self._handle, self.path):
                return False
            os.utime(self._handle)  # heartbeat
            return True
        return False

    def release(self) -> None:
        """Release the claim."""
        self._handle = None
        self._finalizer()


def _locked(path: str, directory: str, prefix: str) -> int:
    while True:
        handle, ours = _opened(path)
        try:
            if not _lock(handle):
                _refuse(handle, directory, prefix)
            if not ours:
                os.unlink(path)  # left behind by a killed writer of another user
            # The previous owner may have removed the file after we opened it and before we locked it.
            if _same_file(handle, path):
                _write(handle, this_process())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _opened(path: str) -> tuple[int, bool]:
    """Open the file, and return whether it is writable: one that another user left usually is not."""
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
    alive = is_alive(who)
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
    with contextlib.suppress(OSError):  # a full disk: the lock counts, not the content of the file
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(who).encode(), 0)


def _refuse(handle: int, directory: str, prefix: str) -> NoReturn:
    raise CheckpointError(refusal(directory, prefix, _read(handle)))


def _unlock(path: str, handle: int, pid: int) -> None:
    if pid != os.getpid():
        return  # a fork: its copy was closed when it started
    with contextlib.suppress(OSError):
        if _same_file(handle, path):
            os.unlink(path)
    with contextlib.suppress(OSError):
        os.close(handle)


def _release_in_fork() -> None:
    """Close a fork's copies of the locked files, so that the claims end with the parent."""
    for claim in list(_HELD):
        handle, claim._handle = claim._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_fork)
