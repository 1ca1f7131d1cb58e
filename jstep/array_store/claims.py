"""Claims: the lock that allows only one writer of a prefix, in a directory or an object store."""

import contextlib
import errno
import fcntl
import io
import json
import os
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from typing import Any

from jstep.array_store.manifest import CheckpointError
from jstep.core.checks import truncate
from jstep.core.logs import logger
from jstep.stores.files import make_directories, open_own
from jstep.stores.objects import ABSENT, Bucket
from jstep.stores.owners import is_alive, owner_in, this_process
from jstep.stores.untrusted import MAX_CLAIM_BYTES


def refusal(directory: str, prefix: str, owner: Mapping[str, Any]) -> CheckpointError:
    """Return the error that another writer has the claim.

    Args:
        owner: What the claim says of its writer, such as its host and PID; see
            `owners.this_process`.
    """
    who = truncate(f"process {_escaped(owner, 'pid')} on {_escaped(owner, 'host')}", 200)
    way_out = "wait for that process or end it"
    if owner.get("pid") == os.getpid() and is_alive(owner):
        who += ", which is this one"
        way_out = "close the other Saver first"
    return CheckpointError(
        f"{prefix}-* in {directory} is being written by {who}: one writer at a time, or one run "
        "would destroy the other's checkpoints. Give this run its own directory or "
        f"prefix, or {way_out}."
    )


def _escaped(owner: Mapping[str, Any], name: str) -> str:
    """Return a field of an owner without line breaks and control characters.

    Anybody may have written the file.
    """
    return repr(str(owner.get(name, "unknown")))[1:-1]


# Write lock of a prefix in a directory: a locked file next to the checkpoints, for one writer.
#
# The lock belongs to the operating system, so it ends with the process, however that ends, even on
# network file systems (NFS passes it to its server). A child process does not inherit it. The file
# names its owner.
#
# On file systems without locks, the content of the file decides. An owner on this host is looked
# up; one on another host counts as dead once it has not touched the file for an hour.

_FILE_SILENT_SECS = 3600.0
"""Seconds after which a writer on another host counts as dead, on file systems without locks."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}
_BEGINNING = b'{"host": "'
"""The first bytes of a locked file; a file that begins otherwise is somebody else's."""

_file_claims: "weakref.WeakSet[FileClaim]" = weakref.WeakSet()


class FileClaim:
    """The exclusive right to write a prefix in a directory, until `release` or the process ends."""

    def __init__(self, directory: str, prefix: str) -> None:
        self.path = os.path.join(directory, f".{prefix}.jstep-writer")
        self.file = _locked(self.path, directory, prefix)
        self.finalizer = weakref.finalize(self, _unlock, self.path, self.file, os.getpid())
        _file_claims.add(self)

    def is_held(self) -> bool:
        """Return whether the claim holds: not if the directory was removed, nor in a fork.

        This also touches the file: on a file system without locks, its time shows that the writer
        is alive.
        """
        if not self.finalizer.alive or not _same_file(self.file.fileno(), self.path):
            return False
        try:
            os.utime(self.file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from None
        return True

    def is_moved(self) -> bool:
        """Return whether the locked file has another path: somebody has renamed the directory."""
        if not self.finalizer.alive:
            return False
        handle = self.file.fileno()
        if _same_file(handle, self.path):
            return False
        # If it was removed instead, it has no name left, even if there is a new file at the path.
        return os.fstat(handle).st_nlink > 0

    def release(self, wait: bool = True) -> None:
        """Release the claim; `wait` is for claims of object stores, and this one never waits."""
        self.finalizer()


def claim_file(path: str) -> FileClaim:
    """Claim a file that the user named, which one run at a time may write; create its directory."""
    directory, name = os.path.split(path)
    make_directories(directory)
    try:
        return FileClaim(directory, name)
    except CheckpointError as error:
        raise ValueError(
            f"path={path!r}: another run is writing this file; give each run its own"
        ) from error


def _locked(path: str, directory: str, prefix: str) -> io.FileIO:
    while True:
        with contextlib.ExitStack() as closing:
            file = closing.enter_context(open_own(path, _BEGINNING, append=False))
            handle = file.fileno()
            if not _try_to_claim(handle):
                raise refusal(directory, prefix, owner_in(_content(handle)))
            # The previous owner may have removed the file between our opening and locking it.
            if _same_file(handle, path):
                with contextlib.suppress(OSError):
                    # On a full disk this fails: the lock counts, not the content of the file.
                    os.ftruncate(handle, 0)
                    os.lseek(handle, 0, os.SEEK_SET)
                    os.write(handle, json.dumps(this_process()).encode())
                closing.pop_all()
                return file


def _try_to_claim(handle: int) -> bool:
    """Lock a file, and return whether this process may write the prefix.

    On a file system without locks, nothing is locked: it may if the file names no owner, or one
    that does not exist or counts as dead.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in _NO_LOCKS:
            raise
    owner = owner_in(_content(handle))
    if not owner:
        return True
    alive = is_alive(owner)
    if alive is None:  # it is on another host
        return time.time() - os.fstat(handle).st_mtime >= _FILE_SILENT_SECS
    return not alive


def _same_file(handle: int, path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    return False


def _content(handle: int) -> bytes:
    with contextlib.suppress(OSError):
        os.lseek(handle, 0, os.SEEK_SET)
        return os.read(handle, MAX_CLAIM_BYTES)
    return b""


def _unlock(path: str, file: io.FileIO, pid: int) -> None:
    with contextlib.suppress(OSError):
        if pid == os.getpid() and _same_file(file.fileno(), path):
            # A fork has a copy of the handle, but no claim.
            os.unlink(path)
    with contextlib.suppress(OSError):
        file.close()


def _release_in_fork() -> None:
    """Close a fork's copies of the locked files, so that the claims end with the parent."""
    for claim in list(_file_claims):
        claim.release()


os.register_at_fork(after_in_child=_release_in_fork)


# Write lock of a prefix in an object store, which has no locks: an object that names its writer.
# The writer renews it.
#
# A writer on this host is looked up. One on another host counts as dead if it does not renew its
# claim while a new writer watches, so no clocks are compared. If it is alive after all, it finds
# that its claim is taken before it commits anything, and gives up.

RENEWAL_SECS = 10.0
"""Seconds between renewals."""
OBJECT_SILENT_SECS = 25.0
"""Seconds without a renewal after which a writer on another host counts as dead."""

_object_claims: "weakref.WeakValueDictionary[str, ObjectClaim]" = weakref.WeakValueDictionary()


def claim_key(prefix: str) -> str:
    return f"~claims/{prefix}"


class ObjectClaim:
    """The exclusive right to write a prefix below a URL, until `release`."""

    def __init__(self, objects: Bucket, prefix: str) -> None:
        self._objects = objects
        self._prefix = prefix
        self.id = uuid.uuid4().hex
        self._ended = threading.Event()
        self._lost = False
        # Held while the object is checked, renewed or deleted.
        self._lock = threading.Lock()
        self._beats = 0
        # The stamp of the object, as this claim has last written or checked it.
        self._stamp = self._take()
        _object_claims[self.id] = self
        self._pid = os.getpid()
        from jstep.core.threads import Thread  # it imports JAX

        self._thread = Thread(target=_renew, args=(weakref.ref(self), self._ended), daemon=True)
        self._thread.name = f"jstep-claim-{prefix}"
        self._thread.start()
        weakref.finalize(self, self._ended.set)

    def _take(self) -> bytes:
        """Write the claim once its previous owner counts as dead; return the stamp of the object.

        An owner that cannot be looked up is watched. It is alive if it renews its claim meanwhile.
        """
        key = claim_key(self._prefix)
        first = self._objects.read(key)
        current = first
        # The end of the watch; None before it begins.
        deadline: float | None = None
        while True:
            owner = owner_in(current.data)
            alive = _is_owner_alive(owner)
            is_renewed = current.stamp != first.stamp
            if alive or (alive is None and is_renewed):
                raise refusal(self._objects.url, self._prefix, owner)
            is_silent = deadline is not None and time.monotonic() > deadline
            if alive is False or is_silent:
                stamp = self._objects.write_if(key, self._as_json(), current.stamp)
                if stamp is not None:
                    return stamp
                # Another writer was faster, and is now the owner.
            elif deadline is None:
                logger.info(
                    "%s: process %s on %s wrote %s-* last; waiting for %g s to see "
                    "whether it is still alive",
                    self._objects.url,
                    owner.get("pid"),
                    owner.get("host"),
                    self._prefix,
                    OBJECT_SILENT_SECS,
                )
                deadline = time.monotonic() + OBJECT_SILENT_SECS
            else:
                remaining = max(0.01, deadline - time.monotonic())
                self._ended.wait(min(OBJECT_SILENT_SECS / 10, remaining))
            current = self._objects.read(key)

    def _as_json(self) -> bytes:
        return json.dumps(this_process() | {"id": self.id, "beat": self._beats}).encode()

    def is_held(self) -> bool:
        """Return whether the claim is not known to be lost; only `check` queries the store."""
        return not self._lost and not self._ended.is_set() and self._pid == os.getpid()

    def check(self) -> None:
        """Raise a `CheckpointError` if another writer took the claim; called before each commit."""
        key = claim_key(self._prefix)
        with self._lock:
            current = self._objects.read(key)
            if current.data is None:  # deleted by hand, or by a rule of the bucket
                self._objects.write_if(key, self._as_json(), ABSENT)
                current = self._objects.read(key)
            owner = owner_in(current.data)
            if owner.get("id") == self.id:
                self._stamp = current.stamp
                return
            self._lost = True
        raise refusal(self._objects.url, self._prefix, owner)

    def renew(self) -> None:
        """Write another beat, which shows writers that watch the claim that this one is alive."""
        with self._lock:
            if not self.is_held():
                return
            self._beats += 1
            stamp = self._objects.write_if(claim_key(self._prefix), self._as_json(), self._stamp)
            if stamp is not None:
                self._stamp = stamp

    def release(self, wait: bool = True) -> None:
        """Release the claim within 5 seconds, or 1 if not `wait`.

        If that fails, the next writer finds its owner dead, or silent.
        """
        seconds = 5 if wait else 1
        self._ended.set()
        _object_claims.pop(self.id, None)
        if self._pid != os.getpid() or self._lost or not self._lock.acquire(timeout=seconds):
            return
        try:
            with contextlib.suppress(OSError), self._objects.time_limit(seconds):
                self._objects.delete(claim_key(self._prefix), self._stamp)
        finally:
            self._lock.release()


def _is_owner_alive(owner: Mapping[str, Any]) -> bool | None:
    """Return whether the owner of a claim is alive; None if that cannot be looked up here."""
    if not owner:
        return False
    alive = is_alive(owner)
    if alive and owner.get("pid") == os.getpid():
        return str(owner.get("id")) in _object_claims
    return alive


def _renew(claim: "weakref.ref[ObjectClaim]", ended: threading.Event) -> None:
    while not ended.wait(RENEWAL_SECS):
        current = claim()
        if current is None:
            return
        with contextlib.suppress(OSError):  # the commit raises it if it persists
            current.renew()
        # Not held while this thread waits: a claim that nobody else refers to ends.
        del current
