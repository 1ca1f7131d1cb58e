"""Checkpoints in a local directory, and the lock of their writer."""

import contextlib
import errno
import functools
import gc
import json
import logging
import os
import re
import shlex
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from jstep.checkpoint import listing
from jstep.checkpoint.listing import ASIDE, DELETED, REPLACED, TEMPORARY, Commit, is_remains, is_whole, listed
from jstep.checkpoint.manifest import NAME, CheckpointError, Manifest, encode
from jstep.core.checks import size
from jstep.stores.files import make_folders, new_file, sync_folder

# Write lock of a prefix in a directory: a locked file next to the checkpoints, for one writer at a time.
#
# The lock belongs to the operating system, so it ends with the process however that ends, also on network file systems
# (NFS passes it to its server). A child process does not inherit it. The file names its owner.
#
# On file systems without locks, the content of the file decides: a process on this host is looked up; one on another
# host counts as dead when it has not written for an hour.
#
# Other locks identify their processes in the same way: those of object stores, and temporary files of weights.


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


def owner_in(data: bytes | None) -> dict[str, Any]:
    """Return the owner that the content of a lock names; empty if it names none."""
    try:
        who = json.loads(data or b"{}")
    except ValueError:
        return {}
    return who if isinstance(who, dict) else {}


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
        self.handle = _locked(self.path, directory, prefix)
        self.finalizer = weakref.finalize(self, _unlock, self.path, self.handle, os.getpid())
        _HELD.add(self)

    def is_held(self) -> bool:
        """Return whether the claim still holds: the directory may have been removed, or this may be a fork."""
        with contextlib.suppress(OSError):
            if self.finalizer.alive and _same_file(self.handle, self.path):
                os.utime(self.handle)  # heartbeat
                return True
        return False

    def release(self) -> None:
        """Release the claim."""
        self.finalizer()


def _locked(path: str, directory: str, prefix: str) -> int:
    while True:
        handle, ours = _opened(path)
        try:
            if not _lock(handle):
                raise CheckpointError(refusal(directory, prefix, _read(handle)))
            if not ours:
                os.unlink(path)  # left behind by a killed writer of another user
            # The previous owner may have removed the file after we opened it and before we locked it.
            if _same_file(handle, path):
                with contextlib.suppress(OSError):  # a full disk: the lock counts, not the content of the file
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, json.dumps(this_process()).encode(), 0)
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
    who = _read(handle)
    alive = is_alive(who) if who else False
    return not (time.time() - os.fstat(handle).st_mtime < _SILENT if alive is None else alive)


def _same_file(handle: int, path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(handle))
    return False


def _read(handle: int) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        return owner_in(os.pread(handle, 4096, 0))
    return {}


def _unlock(path: str, handle: int, pid: int) -> None:
    if pid != os.getpid():
        return  # a fork that began while the claim was being made, so that nothing detached its finalizer
    with contextlib.suppress(OSError):
        if _same_file(handle, path):
            os.unlink(path)
    with contextlib.suppress(OSError):
        os.close(handle)


def _release_in_fork() -> None:
    """Close a fork's copies of the locked files, so that the claims end with the parent."""
    for claim in list(_HELD):
        if claim.finalizer.detach() is not None:
            with contextlib.suppress(OSError):
                os.close(claim.handle)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_fork)


# A store of checkpoints in a local directory, or one on a file system that all processes share.
#
# A checkpoint is written under a temporary name, its manifest last, and then renamed. Deletion renames it first.


def publish_folder(temporary: str, final: str, files: Iterable[str] = ()) -> None:
    """Rename a finished checkpoint to its final name. An older one of that name is deleted afterwards.

    Args:
        temporary: The folder of the checkpoint.
        final: Its final path.
        files: The files that must exist under the new name.

    Raises:
        FileNotFoundError: One of them was removed meanwhile.
        OSError: The new name may not be on the disk.
    """
    replaced = final + REPLACED
    if os.path.lexists(final):
        if is_remains(final):
            remove(replaced)
            os.rename(final, replaced)
        else:
            _set_aside(final)
    sync_folder(temporary)
    os.rename(temporary, final)
    try:
        lacks = next((file for file in files if not os.path.isfile(os.path.join(final, file))), None)
        if lacks is not None:  # another process is removing the folder, and continued after the rename
            raise FileNotFoundError(errno.ENOENT, f"{lacks} was removed while the checkpoint was written", temporary)
        sync_folder(os.path.dirname(final))
    except OSError:
        evict(final)
        if os.path.lexists(replaced):
            os.rename(replaced, final)
        raise
    remove(replaced)


def _set_aside(path: str) -> None:
    aside = _unused(path + ".set-aside-")
    os.rename(path, aside)
    _logger.warning("%s is not a checkpoint, but a checkpoint needs its name: moved to %s", path, aside)


def _unused(stem: str) -> str:
    """Return the first name that does not exist, of those that begin so and end with a number."""
    number = 0
    while os.path.lexists(name := f"{stem}{number}"):
        number += 1
    return name


def evict(path: str) -> None:
    """Delete a checkpoint atomically; errors are logged."""
    deleted = path + DELETED
    try:
        remove(deleted)
        os.rename(path, deleted)
    except FileNotFoundError:
        return
    except OSError as error:
        _logger.warning("%s could not be deleted: %s", path, error)
        return
    remove(deleted)


def remove(path: str) -> None:
    """Delete a folder of ours as far as possible; of a link, only the link."""
    if os.path.islink(path):
        with contextlib.suppress(OSError):
            os.unlink(path)
    else:
        shutil.rmtree(path, ignore_errors=True)


def remove_leftovers(directory: str, prefix: str, in_use: Callable[[str], bool]) -> None:
    """Remove what interrupted saves and deletions of this prefix left behind.

    Only the owner of the claim may call it: otherwise the removed folder may be one that is being written.

    Args:
        directory: The directory of the checkpoints.
        prefix: The prefix of the names; others are not touched.
        in_use: Returns whether a temporary folder is being written.
    """
    step = rf"({re.escape(prefix)}-(?:0|[1-9][0-9]*))"
    pattern = re.compile(
        rf"{step}({re.escape(TEMPORARY)}(?:-[0-9]+)?|{re.escape(REPLACED)}|{re.escape(DELETED)})", re.DOTALL
    )
    for entry in listed(directory):
        if match := pattern.fullmatch(entry):
            path, final = os.path.join(directory, entry), os.path.join(directory, match[1])
            if match[2] == REPLACED and is_whole(path) and not is_whole(final):
                _restore_replaced(path, final)
            elif not in_use(path):
                remove(path)


def _restore_replaced(replaced: str, final: str) -> None:
    if os.path.lexists(final):
        if is_remains(final):
            evict(final)
        else:
            _set_aside(final)
    os.rename(replaced, final)


_FULL = {
    errno.EDQUOT: ("the disk quota is exceeded", re.compile(r"Disk quota exceeded|EDQUOT")),
    errno.ENOSPC: ("the disk is full", re.compile(r"No space left|ENOSPC|RESOURCE_EXHAUSTED")),
}
"""Code of an error → its description, and how libraries in C++ report it."""


def full(error: BaseException | None) -> int | None:
    """Return the code of a full disk or an exceeded quota, if an error or one of its causes reports it."""
    seen = 0
    while error is not None and seen < 20:
        for code, (_, words) in _FULL.items():
            if (isinstance(error, OSError) and error.errno == code) or words.search(str(error)):
                return code
        error, seen = error.__cause__ or error.__context__, seen + 1
    return None


def full_disk(directory: str, needed: int, code: int) -> OSError:
    """Return the error to raise for a full disk or an exceeded quota, with the bytes needed and the bytes free."""
    try:
        free = f"{size(shutil.disk_usage(directory).free)} free"
    except OSError:
        free = "free space unknown"
    return OSError(
        code,
        f"{_FULL[code][0]} ({size(needed)} needed, {free}: {os.strerror(code)}); make room, or keep fewer checkpoints "
        "by max_to_keep",
    )


_LOOKS = 10  # a writer evicts one checkpoint per save
_logger = logging.getLogger("jstep")
_HOLDERS: "weakref.WeakValueDictionary[str, Directory]" = weakref.WeakValueDictionary()
"""The claims of this process: file → its store."""


class Directory:
    """A `Store` in a directory: a checkpoint is a folder, which is renamed to its final name when it is complete."""

    def __init__(self, directory: str, prefix: str | None) -> None:
        self.directory = directory
        self._prefix = prefix
        self._claim: Claim | None = None
        self._is_cleaned = False
        self._arrays: Any = None
        self._bytes = 0
        self._is_left = False

    def path(self, name: str) -> str:
        """See `Store.path`."""
        return os.path.join(self.directory, name)

    def newest_first(self, prefix: str | None, trusted: Collection[int] = frozenset()) -> Iterator[tuple[int, str]]:
        """See `Store.newest_first`. Only that files exist is checked; incomplete and foreign folders are skipped."""
        given: set[int] = set()
        for _ in range(_LOOKS):
            for step, _, entry in listing.entries(self.directory, prefix):
                if step in given:
                    continue
                path = self.path(entry)
                found = path if step in trusted else listing.found(path.removesuffix(REPLACED))
                if found is not None:
                    given.add(step)
                    yield step, found
                elif not given and not os.path.lexists(path):
                    break  # it was evicted, so there is a newer one, which is not in this list
            else:
                return

    def at(self, prefix: str, step: int) -> str | None:
        """See `Store.at`."""
        return listing.found(self.path(listing.name(prefix, step)))

    def broken(self, prefix: str, above: int) -> list[tuple[str, str]]:
        """See `Store.broken`.

        A folder gets its name when it is complete, and loses it before it is deleted. Only in a copy from a bucket,
        data without a manifest may come from an interrupted save.
        """
        problems = []
        for step, is_final, entry in listing.entries(self.directory, prefix):
            path = self.path(entry)
            if step <= above or not is_final:
                continue
            found, lacks = listing.look(path)
            if found is not None or (lacks == NAME and not listing.has_data(path)) or not os.path.lexists(path):
                continue
            if lacks == NAME and not listing.OF_ORBAX & set(listed(path)):
                _logger.warning(
                    "%s is ignored: it has no %s, so its save to a bucket was interrupted, or its copy was; in the "
                    "latter case, copy it again",
                    path,
                    NAME,
                )
            else:
                problems.append((path, f"{lacks} is missing"))
        return problems

    def manifest(self, path: str) -> Manifest:
        """See `Store.manifest`."""
        return listing.read_manifest(path)

    def find_corruption(
        self, path: str, manifest: Manifest, share: tuple[int, int] = (0, 1), *, every: bool = False
    ) -> list[str]:
        """See `Store.find_corruption`. Reads every byte."""
        if manifest.is_packed:  # copied from a bucket
            from jstep.checkpoint import packs  # not at the top: it imports JAX

            return packs.find_corruption(functools.partial(packs.LocalRead, path), "", manifest, share)
        return listing.find_corruption(path, manifest, share, every=every)

    def read_file(self, path: str, manifest: Manifest, name: str) -> bytes:
        """See `Store.read_file`."""
        from jstep.checkpoint import packs  # not at the top: it imports JAX

        read = packs.read_file if manifest.is_packed else listing.read_file
        return read(functools.partial(packs.LocalRead, path), "", manifest, name)

    def restore(self, path: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Store.restore`."""
        from jstep.checkpoint import orbax_arrays, packs  # not at the top: importing tensorstore is slow

        if manifest.is_packed:
            return packs.read(functools.partial(packs.LocalRead, path), "", manifest, shardings)
        return orbax_arrays.read(orbax_arrays.in_folder(path), manifest, shardings)

    def claim(self, prefix: str) -> None:
        """See `Store.claim`."""
        try:
            make_folders(self.directory)
        except OSError as error:
            what = f"the directory of checkpoints cannot be created: {error.strerror}"
            raise OSError(error.errno, what, self.directory) from error
        if not os.access(self.directory, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise PermissionError(errno.EACCES, "the directory of checkpoints cannot be written", self.directory)
        if self._claim is None or not self.holds_claim():
            self._claim, self._is_cleaned = self._take(prefix), False
            _HOLDERS[os.path.realpath(self._claim.path)] = self
        if not self._is_cleaned:
            remove_leftovers(self.directory, prefix, listing.IN_FLIGHT.__contains__)
            self._is_cleaned = True

    def _take(self, prefix: str) -> Claim:
        try:
            return Claim(self.directory, prefix)
        except CheckpointError:
            file = os.path.realpath(file_of(self.directory, prefix))
            if (holder := _HOLDERS.get(file)) is None or not holder.holds_claim():
                raise
            del holder
            gc.collect()  # an unreferenced Saver releases its claim here, or when its write has ended
            if (holder := _HOLDERS.get(file)) is not None and holder._is_left:
                holder.finish()
            return Claim(self.directory, prefix)

    def holds_claim(self) -> bool:
        """Return whether this store has the claim, in this process and not in the parent of a fork."""
        return self._claim is not None and self._claim.is_held()

    def finish(self) -> None:
        """Finish the save of an unreferenced Saver; an error is logged, since no call can raise it."""
        try:
            self.wait()
        except Exception:
            _logger.exception("the save in progress in %s was not saved", self.directory)
        self.close()

    def save(
        self, path: str, arrays: Mapping[str, Any], compress: bool, commit: Commit, files: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint, in a thread; see `Store.save`.

        One after the other, these are on the disk:

        1. the arrays and then the files, in a temporary folder (`orbax_arrays`), and with several processes the
           checksums of each;
        2. all of them, flushed, with checksums (`listing.collect`), and what `Saver.flushing` flushes;
        3. the manifest, which is written last, so that a folder without one is not a checkpoint;
        4. the temporary folder, flushed, then renamed, then the folder around it, flushed (`publish_folder`);
        5. and then only are superseded checkpoints removed (`commit`).
        """

        def publish(temporary: str, final: str) -> None:
            import jax  # not at the top: listing a directory of checkpoints does not need JAX

            from jstep.checkpoint import orbax_arrays

            manifest, committed = commit.seal(listing.collect(temporary, jax.process_count()))
            # Cleaners of old files may remove files while they are written; the rest would look like a checkpoint.
            if lost := _lost(lambda: orbax_arrays.missing(temporary, manifest)):
                raise OSError(errno.ENOENT, f"{lost}: files were removed while they were written", temporary)
            with new_file(os.path.join(temporary, NAME)) as file:
                file.write(encode(manifest))
            publish_folder(temporary, final, [NAME, *manifest.files])
            committed()

        self._bytes = sum(int(one.nbytes) for one in (*arrays.values(), *files.values()))
        self._is_cleaned = False  # if this is interrupted, the next save removes the remains
        with self._explained():
            from jstep.checkpoint import orbax_arrays  # not at the top: importing Orbax is slow

            if self._arrays is None:
                self._arrays = orbax_arrays.Checkpointer(self._prefix or "")
            self._arrays.save(path, orbax_arrays.SaveArgs(dict(arrays), compress, files), publish)
        self._is_cleaned = True

    def wait(self) -> None:
        """See `Store.wait`."""
        with self._explained():
            if self._arrays is not None:
                self._arrays.wait()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """A context whose error says that the disk is full, and how much is needed, if that is the cause."""
        try:
            yield
        except Exception as error:
            if (code := full(error)) is not None:
                raise full_disk(self.directory, self._bytes, code) from error
            raise

    def abandon(self, path: str) -> None:
        """See `Store.abandon`."""
        self._is_cleaned = False
        remove(path + listing.TEMPORARY)

    def command_to_set_aside(self, path: str) -> str:
        """See `Store.command_to_set_aside`."""
        return shlex.join(["mv", path, _unused(path + ASIDE)])

    def evict(self, path: str) -> None:
        """See `Store.evict`."""
        evict(path)

    def leave(self) -> None:
        """See `Store.leave`."""
        self._is_left = True

    def close(self, wait: bool = True) -> None:
        """See `Store.close`."""
        if self._arrays is not None and wait:
            self._arrays.close()
        if self._claim is not None:
            self._claim.release()
            self._claim = None


def _lost(missing: Callable[[], str | None]) -> str | None:
    """Describe what is missing of the written files; None if nothing is."""
    try:
        path = missing()
    except Exception as error:  # tensorstore has no error types
        return f"the written files cannot be read ({str(error)[:300]})"
    return path and f"{path!r} no longer exists"
