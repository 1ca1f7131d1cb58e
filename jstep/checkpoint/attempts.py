"""One save of a checkpoint, in a background thread of each process: the same in a directory and below a URL.

    1. Each process writes its arrays. If there are several processes, it then writes an empty file below `parts/`.
    2. The first process waits for these files, by one list at a time, merges the databases, and commits: the manifest,
       and in a directory the name of the directory. From here on the checkpoint exists.
    3. The others wait until it does, or until the first process reports why not: in one file, that of its own part.

With one process, the database is directly in the attempt, else below `ocdbt.process_N/`. A crash before the commit
leaves an attempt, which the next save removes.
"""

import abc
import atexit
import contextlib
import dataclasses
import errno
import functools
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, Protocol

from jstep.checkpoint.listing import ROOT, TEMPORARY, directory_spec, list_names
from jstep.checkpoint.manifest import CheckpointError, Manifest
from jstep.checkpoint.part_watch import PATIENCE_SECS, PartWatch, patience_secs
from jstep.core.checks import format_bytes, format_list
from jstep.core.logs import logger
from jstep.stores.files import new_file, read_small, replace_file, sync_directory
from jstep.stores.untrusted import MAX_MANIFEST_BYTES
from jstep.stores.urls import is_url

FileSizes = Mapping[str, int]
"""Path of a file below a checkpoint → its bytes; none below a URL."""

OUTCOME_SECS = 1800.0
"""Seconds without a heartbeat after which the others give up, once the first process has written its part."""
_HEARTBEAT_SECS = 30.0
"""Seconds between two heartbeats of the first process, while it waits for parts that grow."""
PARTS = "parts/"
_FAILED = ".failed"
"""The end of the name of a file in which a process reports to the first one why it has failed."""
# What the first process writes at its `report_key`, one after the other. Anything else is its error.
_BEGUN = b""
"""It writes its part."""
_HEARTBEAT = b"waiting "
"""The beginning of its heartbeats, which their number follows: it waits for the parts of others."""
_SAVED = b"saved"
"""The checkpoint exists."""


class Storage(Protocol):
    """The storage of a checkpoint's arrays, and of the files beside them: a directory, or the objects below a URL.

    Keys are relative to it.
    """

    def path(self, key: str) -> str:
        """Return the path or URL of a key."""

    def spec(self) -> dict[str, Any]:
        """Return tensorstore's JSON for all files."""

    def read(self, key: str) -> bytes | None:
        """Read a small file; None if it is missing."""

    def names(self, key: str) -> Collection[str]:
        """Return the names of the files below a key, which has a slash at its end."""

    def progress(self, key: str) -> object:
        """Return what changes while files below a key are written: their bytes, or the number of objects."""
        return len(self.names(key))

    def write(self, key: str, data: bytes) -> object:
        """Write a new file, and flush its content."""

    def write_atomically(self, key: str, data: bytes) -> object:
        """Write a file that others wait for: whoever reads it finds all of it."""

    def wait(self, future: Any, nbytes: int) -> Any:
        """See `array_writer.Wait`."""
        return future.result()

    def finish(self, key: str = "", flushed_keys: Collection[str] = ()) -> FileSizes:
        """Flush the names of the files below a key, and return those that the manifest lists, with their sizes.

        Args:
            flushed_keys: Keys below it, the names of whose files another process has flushed already.
        """
        return {}


class LocalStorage(Storage):
    def __init__(self, path: str) -> None:
        self._path = path

    def path(self, key: str) -> str:
        return os.path.join(self._path, key) if key else self._path

    def spec(self) -> dict[str, Any]:
        return directory_spec(self._path)

    def read(self, key: str) -> bytes | None:
        try:
            return read_small(self.path(key), MAX_MANIFEST_BYTES, follow_link=False)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def names(self, key: str) -> Collection[str]:
        return list_names(self.path(key))

    def progress(self, key: str) -> int:
        nbytes = 0
        for directory, _, names in os.walk(self.path(key)):
            for name in names:
                with contextlib.suppress(OSError):  # a temporary file that has its final name now
                    nbytes += os.path.getsize(os.path.join(directory, name))
        return nbytes

    def write(self, key: str, data: bytes) -> None:
        with new_file(self.path(key)) as file:
            file.write(data)

    def write_atomically(self, key: str, data: bytes) -> None:
        replace_file(self.path(key), data, make_parents=False)

    def finish(self, key: str = "", flushed_keys: Collection[str] = ()) -> FileSizes:
        sizes = {}
        flushed = {self.path(other).rstrip("/") for other in flushed_keys}
        for directory, _, names in os.walk(self.path(key)):
            for name in names:
                path = os.path.join(directory, name)
                sizes[os.path.relpath(path, self._path).replace(os.sep, "/")] = os.path.getsize(path)
            # Below the key of a process there is one level of directories, `d/`. The name of the key itself is in the
            # directory above it, which is flushed here.
            if directory not in flushed and os.path.dirname(directory) not in flushed:
                sync_directory(directory)
        return dict(sorted(sizes.items()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveJob:
    """What one process writes.

    Attributes:
        name: A name that no other attempt has, the same on all processes.
        saved_at: The time in the manifest.
        process: The index of this process.
        count: The number of processes.
        nbytes: The bytes of all arrays, by all processes.
        arrays: The `OwnParts` to write.
        files: Name → `ExternalBytes`.
        finish_save: `Retention.finish`, for the first process: see `Attempt.commit`.
        release: Gives back the memory of the arrays, once they are written.
    """

    name: str
    saved_at: float
    process: int
    count: int
    nbytes: int
    arrays: Sequence[Any]
    files: Mapping[str, Any]
    finish_save: Callable[[FileSizes, Callable[[Manifest], Sequence[str]]], None]
    release: Callable[[], None]


class Attempt(abc.ABC):
    """A save in progress: `run` writes the part of this process; the first one then commits, and the others wait.

    The memory of the arrays is released once they are written.
    """

    def __init__(self, storage: Storage, job: SaveJob) -> None:
        self.storage = storage
        self.name = job.name
        self.process = job.process
        self.count = job.count
        self.saved_at = job.saved_at
        self._finish_save = job.finish_save
        self._release = job.release
        # The arrays are forgotten once they are written, so that their memory is free; their names are not.
        self._arrays = job.arrays
        self._names = [array.name for array in job.arrays]
        self._files = job.files
        self._nbytes = job.nbytes  # of the whole checkpoint, for the error of a full disk
        self._own_bytes = sum([values.nbytes for array in job.arrays for _, values in array.values])
        # The parts of other processes are not known: a replicated array is in one of them.
        self._average_bytes = job.nbytes / job.count
        self._own_secs = 0.0  # how long this process has taken to write its part
        self._entries = 0  # of the merged database, see `count_entries`; known when the part is written
        self._heartbeats = 0

    @abc.abstractmethod
    def publish(self, manifest: Manifest) -> Sequence[str]:
        """Make the checkpoint exist, and return what it leaves to be erased."""

    @abc.abstractmethod
    def is_published(self) -> bool:
        """Return whether this attempt is the checkpoint."""

    def begin(self) -> None:
        """Let the others wait for the outcome; called on the first process before anything is written."""
        if self.count > 1:
            self.storage.write_atomically(self.report_key(0), _BEGUN)

    def commit(self, file_sizes: FileSizes) -> None:
        """Publish the checkpoint, on the first process.

        This calls `Retention.finish`, which decides what the checkpoint supersedes, calls `publish` with the manifest
        that says so, and then deletes.
        """
        self._finish_save(file_sizes, self.publish)

    def report_key(self, process: int) -> str:
        """Return the key of a process's report: that it has written its part; of the first process, the outcome."""
        return f"{PARTS}{self.name}.{process}"

    def tell_outcome(self, outcome: bytes = _SAVED) -> None:
        if self.count > 1:
            self.storage.write_atomically(self.report_key(0), outcome)

    def run(self) -> None:
        began = time.monotonic()
        try:
            if self.process == 0:
                self.begin()
            self._write_part()
            self._own_secs = time.monotonic() - began
            if self.process == 0:
                self._merge()
                for name, data in writer_module().orbax_files(self._names, self.saved_at).items():
                    self.storage.write(name, data)
                others = [process_key(other) for other in range(1, self.count)]
                self.commit(self.storage.finish(flushed_keys=others))
        except BaseException as error:
            explained = _explained(error, self.storage.path(""), self._nbytes)
            self._report(f"{type(explained).__name__}: {explained}"[:300])
            # Not `from error`, which would be its own cause if there is nothing to explain.
            raise explained from error.__cause__
        if self.process:
            self._wait_for_outcome()

    def _write_part(self) -> None:
        writer = writer_module()
        files = [writer.file_array(name, file.read()) for name, file in self._files.items()]
        own_parts = [*self._arrays, *files]
        self._arrays = ()
        key = ""
        if self.count > 1:
            key = process_key(self.process)
            self._entries = writer.count_entries(own_parts)
        base = writer.database_base(self.storage.spec(), key)
        root = writer.write(base, own_parts, self.storage.wait, first=self.process == 0)
        self._release()
        self._write_root(key, root)
        for file in self._files.values():
            file.written()
        if self.process:
            self.storage.finish(key)
            self.storage.write_atomically(self.report_key(self.process), b"")

    def _merge(self) -> None:
        """Wait for the parts of all processes, and merge their databases."""
        if self.count == 1:
            return
        self._wait_for_parts()
        writer = writer_module()
        base = writer.database_base(self.storage.spec())
        self._write_root("", writer.merge(base, map(process_key, range(self.count)), self._entries, self.storage.wait))

    def _watch(self, process: int) -> PartWatch:
        patience = patience_secs(self._average_bytes, self._own_bytes, self._own_secs)
        key = process_key(process)
        return PartWatch(lambda: self.storage.progress(key), patience, time.monotonic())

    def _wait_for_parts(self) -> None:
        """Wait, on the first process, until all others have written; a process that hangs is an error."""
        watches = {process: self._watch(process) for process in range(1, self.count)}
        warned_of: set[int] = set()
        self._write_heartbeat()
        heartbeat_at = time.monotonic()
        for pause in _pauses():
            self._drop_finished(watches)
            if not watches:
                return
            instant = time.monotonic()
            self._check_not_stuck(watches, instant)
            self._warn_of_quiet(watches, instant, warned_of)
            if instant - heartbeat_at > _HEARTBEAT_SECS:
                self._write_heartbeat()
                heartbeat_at = instant
            time.sleep(pause)

    def _drop_finished(self, watches: dict[int, PartWatch]) -> None:
        """Forget the processes that have written; raise the error of one that has failed."""
        names = set(self.storage.names(PARTS))
        for process in list(watches):
            if f"{self.name}.{process}{_FAILED}" in names:
                text = self.storage.read(f"{self.report_key(process)}{_FAILED}") or b""
                raise CheckpointError(f"process {process}: {text.decode()}")
            if f"{self.name}.{process}" in names:
                del watches[process]

    def _check_not_stuck(self, watches: Mapping[int, PartWatch], instant: float) -> None:
        stuck = [process for process, watch in watches.items() if watch.is_stuck(instant)]
        if not stuck:
            return
        stuck_secs = max(watches[process].quiet_secs(instant) for process in stuck)
        is_first_alone = len(watches) == self.count - 1
        finished = "process 0 has" if is_first_alone else "others have"
        raise CheckpointError(
            f"{_processes_text(stuck)}: written nothing for {stuck_secs:.0f} s, while {finished} finished: its write "
            "hangs"
        )

    def _warn_of_quiet(self, watches: Mapping[int, PartWatch], instant: float, warned_of: set[int]) -> None:
        """Warn of each process that may hang, unless it is in `warned_of`, and add it there."""
        quiet = []
        for process, watch in watches.items():
            if process not in warned_of and watch.quiet_secs(instant) > PATIENCE_SECS:
                quiet.append(process)
        if not quiet:
            return
        warned_of.update(quiet)
        logger.warning(
            "%s: %s has written nothing for %.0f s, and has %.0f s more: its storage is slow, or its write hangs",
            *(self.storage.path(""), _processes_text(quiet), PATIENCE_SECS, watches[quiet[0]].left_secs(instant)),
        )

    def _write_heartbeat(self) -> None:
        """Tell the others that this first process lives, and has written its part."""
        self._heartbeats += 1
        self.storage.write_atomically(self.report_key(0), _HEARTBEAT + str(self._heartbeats).encode())

    def _write_root(self, key: str, root: bytes | None) -> None:
        if root is not None:
            self.storage.write(f"{key}{ROOT}", root)

    def _wait_for_outcome(self) -> None:
        """Wait, on all processes but the first, until the checkpoint exists, or the first process says why not.

        What the first process has reported is None before it has begun. In a directory it is None again after the end:
        then the directory has its final name, or was removed. Otherwise it is one of the constants above, or an error.
        """
        watch = self._watch(0)
        latest: bytes | None = None
        latest_at = time.monotonic()
        for pause in _pauses():
            outcome = self.storage.read(self.report_key(0))
            if outcome == _SAVED:
                return
            if outcome is None:
                if self.is_published():
                    return
                if latest is not None:
                    raise CheckpointError(f"{self.storage.path('')}: process 0 has removed it; see its error")
            elif outcome and not outcome.startswith(_HEARTBEAT):
                raise CheckpointError(f"process 0: {outcome.decode()}")
            # It has not begun, it writes, or it waits for the parts of others.
            instant = time.monotonic()
            if outcome != latest:
                latest = outcome
                latest_at = instant
            if not outcome:
                # This process has written its part, and knows how long that takes.
                if watch.is_stuck(instant):
                    raise CheckpointError(
                        f"process 0: written nothing for {watch.quiet_secs(instant):.0f} s: its write hangs"
                    )
            elif instant - latest_at > OUTCOME_SECS:
                text = f"process 0 has neither published it nor sent a heartbeat in {OUTCOME_SECS:.0f} s"
                raise CheckpointError(f"{self.storage.path('')}: {text}")
            time.sleep(pause)

    def _report(self, text: str) -> None:
        data = text.encode(errors="replace")
        try:
            if self.process:
                self.storage.write_atomically(f"{self.report_key(self.process)}{_FAILED}", data)
            else:
                self.tell_outcome(data)
        except OSError as error:
            logger.warning("the failure of %s was not reported to other processes: %s", self.storage.path(""), error)


def _processes_text(found: Sequence[int]) -> str:
    return format_list([f"process {process}" for process in sorted(found)], 8)


def process_key(process: int) -> str:
    return f"ocdbt.process_{process}/"


def writer_module() -> Any:
    """Return the module `array_writer`, which is imported on first use: importing tensorstore is slow."""
    from jstep.checkpoint import array_writer

    return array_writer


def _pauses() -> Iterator[float]:
    """Yield longer and longer pauses."""
    pause = 0.005
    while True:
        yield pause
        pause = min(1.0, 1.5 * pause)


def _explained(error: BaseException, path: str, nbytes: int) -> BaseException:
    """Return an error that says how much a full disk lacks; tensorstore's errors have no numbers."""
    if not isinstance(error, OSError | ValueError) or is_url(path):
        return error
    full = (errno.ENOSPC, errno.EDQUOT)
    number = next((number for number in full if os.strerror(number) in str(error)), None)
    if number is None:
        return error
    try:
        free_bytes = shutil.disk_usage(os.path.dirname(path)).free
    except OSError:
        # An error of this would hide the first one, and the other processes would not be told of any.
        return error
    text = f"{os.strerror(number)} ({format_bytes(nbytes)} needed, {format_bytes(free_bytes)} free)"
    return OSError(number, text, path)


# The threads of saves.

_DETACHED_SECS = 1.0
"""Seconds for which the exit of the interpreter waits for a detached write."""
UNFINISHED_WRITES: "dict[str, BackgroundWrite]" = {}
"""Path of a temporary directory, or name of an attempt → its write."""


class BackgroundWrite:
    """The write of a checkpoint in the background, which the interpreter finishes before it exits.

    `run` writes it, or waits until it is written; its exception, of any kind, is the error of the write.
    """

    def __init__(self, name: str, run: Callable[[], None], thread: str) -> None:
        from jstep.core.threads import run_in_background  # it imports JAX

        def write() -> None:
            run()
            self._forget()

        self._name = name
        self._is_detached = False
        self._pid = os.getpid()
        UNFINISHED_WRITES[name] = self
        _finish_at_exit()
        self._done = run_in_background(write, name=thread, daemon=True)

    def _forget(self) -> None:
        UNFINISHED_WRITES.pop(self._name, None)

    def detach(self) -> None:
        """Let the interpreter exit without the end of the write, whose files are left as after a kill."""
        self._is_detached = True

    def has_ended(self) -> bool:
        return self._done.done()

    def join(self) -> None:
        """Wait for the write to end, whether it fails or not; do nothing in a fork, whose parent writes."""
        if self._pid == os.getpid():
            futures.wait([self._done])

    def wait(self) -> BaseException | None:
        """Wait like `join`, and return the error of a failed write.

        It is not raised: an exit or an interrupt in the thread of the write is none of this thread.
        """
        # If Ctrl-C interrupts this, the write is still in `UNFINISHED_WRITES`, and `_finish` waits for it.
        self.join()
        if self._pid != os.getpid():
            return None
        self._forget()
        return self._done.exception()

    def finish(self) -> None:
        """Wait at the exit of the interpreter, unless the write is detached, and log its error."""
        if self._is_detached:
            # A thread that comes back from tensorstore while the interpreter ends would abort the process. What is
            # short ends within this time, and what is not stays in tensorstore.
            futures.wait([self._done], timeout=_DETACHED_SECS)
            return
        error = self.wait()
        if error is not None:
            logger.error("%s was not saved", self._name.partition(TEMPORARY)[0], exc_info=error)


@functools.cache
def _finish_at_exit() -> None:
    """Let the interpreter finish the saves in progress before it exits: it would not wait for their daemon threads."""
    # Executors refuse work once threading shuts down, which happens before atexit functions run.
    with contextlib.suppress(RuntimeError):  # it is shutting down already
        getattr(threading, "_register_atexit", atexit.register)(_finish)


def _finish() -> None:
    for write in list(UNFINISHED_WRITES.values()):
        write.finish()


def is_written(name: str) -> bool:
    """Return whether a write of this process is in progress, given its name in `UNFINISHED_WRITES`."""
    write = UNFINISHED_WRITES.get(name)
    return write is not None and not write.has_ended()
