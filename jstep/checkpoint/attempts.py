"""One save, in a background thread of each process: the same in a directory and below a URL.

    1. Each process writes its arrays. If there are several processes, it then writes an empty file, its "part".
    2. The first process waits for all parts, merges their databases, and commits: the manifest, and in a directory the
       name of the directory. From here on the checkpoint exists.
    3. The others wait until it does, or until the first process reports why not.

With one process, the database is directly in the attempt, else below `ocdbt.process_N/`. A crash before the commit
leaves an attempt, which the next save removes.
"""

import atexit
import contextlib
import dataclasses
import errno
import functools
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, Protocol

from jstep.checkpoint.listing import ROOT, TEMPORARY, directory_spec
from jstep.checkpoint.manifest import CheckpointError
from jstep.core.checks import format_bytes
from jstep.core.logs import logger
from jstep.stores.files import new_file, open_regular, replace_file, sync_directory

OUTCOME_SECS = 1800.0
"""Seconds that the others wait for the outcome: the first process may have much more to write."""
PEER_SECS = 120.0
"""Seconds that the first process waits for the others, plus ten times the time of its own part."""
_FAILURE = "failed.txt"
"""The file in which a process reports a failed save to the others."""


class Storage(Protocol):
    """The storage of a checkpoint's arrays, and of the files beside them: a directory, or the objects below a URL.

    Keys are relative to it.
    """

    def begin(self) -> None:
        """Note what this attempt replaces; called on the first process."""

    def path(self, key: str) -> str:
        """Return the path or URL of a key."""

    def spec(self) -> dict[str, Any]:
        """Return tensorstore's JSON for all files."""

    def read(self, key: str) -> bytes | None:
        """Read a small file; None if it is missing."""

    def write(self, key: str, data: bytes) -> object:
        """Write a new file, and flush its content."""

    def publish(self, key: str, data: bytes) -> object:
        """Write a file that others wait for, atomically."""

    def wait(self, future: Any, nbytes: int) -> Any:
        """See `array_writer.Wait`."""
        return future.result()

    def finish(self, key: str = "") -> Mapping[str, int]:
        """Flush the names of the files below a key, and return those that the manifest lists, with their sizes."""
        return {}


class LocalStorage(Storage):
    def __init__(self, path: str) -> None:
        self._path = path

    def begin(self) -> None:
        """Do nothing: the directory is renamed under the claim."""

    def path(self, key: str) -> str:
        return os.path.join(self._path, key) if key else self._path

    def spec(self) -> dict[str, Any]:
        return directory_spec(self._path)

    def read(self, key: str) -> bytes | None:
        try:
            with open_regular(self.path(key)) as file:
                return bytes(file.read())
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def write(self, key: str, data: bytes) -> None:
        with new_file(self.path(key)) as file:
            file.write(data)

    def publish(self, key: str, data: bytes) -> None:
        replace_file(self.path(key), data)

    def finish(self, key: str = "") -> Mapping[str, int]:
        sizes = {}
        for directory, _, names in os.walk(self.path(key)):
            for name in names:
                path = os.path.join(directory, name)
                sizes[os.path.relpath(path, self._path).replace(os.sep, "/")] = os.path.getsize(path)
            sync_directory(directory)
        return dict(sorted(sizes.items()))


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The part of one process in a save.

    Attributes:
        name: A name that no other attempt has, the same on all processes.
        process: The index of this process.
        count: The number of processes.
        saved_at: The time in the manifest, on the first process.
        arrays: The `OwnParts` to write. Their memory is released once they are written, like that of `files`.
        files: Name → `LargeBytes`.
        commit: Makes the checkpoint exist; called on the first process with the sizes of the files.
        is_committed: Returns whether this attempt is the checkpoint; called on the others.
    """

    storage: Storage
    name: str
    process: int
    count: int
    saved_at: float
    arrays: list[Any]
    files: Mapping[str, Any]
    commit: Callable[[Mapping[str, int]], None]
    is_committed: Callable[[], bool]

    def run(self) -> None:
        """Write this process's part; then the first process commits all parts, and the others wait for it."""
        began, nbytes = time.monotonic(), sum([math.prod(array.part) * array.dtype.itemsize for array in self.arrays])
        try:
            if self.process == 0:
                self.storage.begin()
            names = self._write_part()
            if self.process == 0:
                self._commit_all(names, time.monotonic() - began)
        except BaseException as error:
            explained = _explained(error, self.storage.path(""), nbytes)
            self._report(f"{type(explained).__name__}: {explained}"[:300])
            raise explained from error.__cause__
        if self.process:
            self._wait_for_first()

    def _write_part(self) -> list[str]:
        from jstep.checkpoint import array_writer  # not at the top: importing tensorstore is slow

        names = [array.name for array in self.arrays]
        file_arrays = [array_writer.file_array(name, file.read()) for name, file in self.files.items()]
        own_parts = [*self.arrays, *file_arrays]
        self.arrays.clear()
        key = process_key(self.process) if self.count > 1 else ""
        base = array_writer.base(self.storage.spec(), key)
        self._write_root(key, array_writer.write(base, own_parts, self.storage.wait, first=self.process == 0))
        for file in self.files.values():
            file.written()
        if self.count > 1:
            self.storage.finish(key)
            self.storage.publish(part_key(self.process, self.name), b"")
        return names

    def _commit_all(self, names: Sequence[str], took: float) -> None:
        from jstep.checkpoint import array_writer

        until = time.monotonic() + PEER_SECS + 10 * took
        for process in range(1, self.count):
            self._wait_for_part(process, until)
        if self.count > 1:
            base = array_writer.base(self.storage.spec())
            root = array_writer.merge(base, map(process_key, range(self.count)), self.storage.wait)
            self._write_root("", root)
        for name, data in array_writer.orbax_files(names, self.saved_at).items():
            self.storage.write(name, data)
        self.commit(self.storage.finish())

    def _write_root(self, key: str, root: bytes | None) -> None:
        if root is not None:
            self.storage.write(f"{key}{ROOT}", root)

    def _wait_for_part(self, process: int, until: float) -> None:
        for _ in _pauses(until):
            self._raise_failure_of(process)
            if self.storage.read(part_key(process, self.name)) is not None:
                return
        raise CheckpointError(f"{self.storage.path(process_key(process))}: process {process} has not written")

    def _wait_for_first(self) -> None:
        for _ in _pauses(time.monotonic() + OUTCOME_SECS):
            part = self.storage.read(part_key(self.process, self.name))
            self._raise_failure_of(0)
            if self.is_committed():
                return
            if part is None:
                raise CheckpointError(f"{self.storage.path('')}: the first process has removed it; see its error")
        raise CheckpointError(f"{self.storage.path('')}: the first process has not reported the outcome")

    def _raise_failure_of(self, process: int) -> None:
        if (text := self.storage.read(f"{process_key(process)}{_FAILURE}")) is not None:
            raise CheckpointError(f"process {process}: {text.decode()}")

    def _report(self, text: str) -> None:
        if self.count == 1:
            return
        try:
            self.storage.publish(f"{process_key(self.process)}{_FAILURE}", text.encode(errors="replace"))
        except OSError as error:
            logger.warning("the failure of %s was not reported to other processes: %s", self.storage.path(""), error)


def process_key(process: int) -> str:
    return f"ocdbt.process_{process}/"


def part_key(process: int, attempt: str) -> str:
    """Return the key of the part of a process: an empty file, which has the name of the attempt."""
    return f"{process_key(process)}part.{attempt}"


def _pauses(until: float) -> Iterator[None]:
    """Yield, with longer and longer pauses, until a time."""
    pause = 0.005
    while time.monotonic() < until:
        yield
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)


def _explained(error: BaseException, path: str, nbytes: int) -> BaseException:
    """Return an error that says how much a full disk lacks; tensorstore's errors have no numbers."""
    full = (errno.ENOSPC, errno.EDQUOT)
    number = next((number for number in full if os.strerror(number) in str(error)), None)
    if number is None or not isinstance(error, OSError | ValueError) or not os.path.isabs(path):
        return error
    free = format_bytes(shutil.disk_usage(os.path.dirname(path)).free)
    return OSError(number, f"{os.strerror(number)} ({format_bytes(nbytes)} needed, {free} free)", path)


# The threads of saves.

IN_FLIGHT: "dict[str, BackgroundWrite]" = {}
"""Path of a temporary directory, or name of an attempt → its write."""


class BackgroundWrite:
    """The write of a checkpoint in the background, which the interpreter finishes before it exits.

    `run` writes it, or waits until it is written; its error is the error of the write.
    """

    def __init__(self, name: str, run: Callable[[], None], thread: str) -> None:
        from jstep.core.threads import in_background

        def write() -> None:
            run()
            self.detach()

        self._name, self._pid = name, os.getpid()
        IN_FLIGHT[name] = self
        _finish_at_exit()
        self._done = in_background(write, name=thread, daemon=True)

    def detach(self) -> None:
        """Let the interpreter exit without waiting for the write."""
        IN_FLIGHT.pop(self._name, None)

    def join(self) -> None:
        """Wait for the write to end, whether it fails or not; do nothing in a fork, whose parent writes."""
        if self._pid == os.getpid():
            futures.wait([self._done])

    def wait(self) -> None:
        """Wait like `join`, and raise the error of a failed write."""
        self.join()  # after Ctrl-C, the interpreter waits for the write, and logs its error
        if self._pid == os.getpid():
            self.detach()
            self._done.result()


@functools.cache
def _finish_at_exit() -> None:
    """Register the saves in progress to be finished at exit, which ends their threads."""
    # Executors refuse work once threading shuts down, which happens before atexit functions run.
    with contextlib.suppress(RuntimeError):  # it is shutting down already
        getattr(threading, "_register_atexit", atexit.register)(_finish)


def _finish() -> None:
    for name, write in list(IN_FLIGHT.items()):
        try:
            write.wait()
        except Exception:
            logger.exception("%s was not saved", name.partition(TEMPORARY)[0])
