"""Attempts: where a save writes until the checkpoint is published.

`save` writes into them, in the same way in a directory and below a URL. With one process, the
database is directly in the attempt, otherwise below `ocdbt.process_N/`. A crash before the
checkpoint is published leaves an attempt, which the next save removes.
"""

import abc
import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from typing import Any, Protocol

from jstep.array_store.listing import TEMPORARY, directory_spec, list_names
from jstep.array_store.manifest import Manifest
from jstep.core.logs import logger
from jstep.stores.files import new_file, read_small, replace_file, sync_directory
from jstep.stores.untrusted import MAX_MANIFEST_BYTES

FileSizes = Mapping[str, int]
"""Path of a file below a checkpoint → its bytes; none below a URL."""


PARTS = "parts/"
"""The key below which the processes of a save report (`peers`)."""


class Storage(Protocol):
    """Storage of a checkpoint's arrays and files beside them: a directory, or objects below a URL.

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

    def progress(self, keys: Sequence[str]) -> Sequence[int]:
        """Return, for each key, what changes while files below it are written.

        It is the bytes of the files, or the number of objects. In a bucket, one list is requested
        for all keys.
        """

    def write(self, key: str, data: bytes) -> object:
        """Write a new file, and flush its content."""

    def write_atomically(self, key: str, data: bytes) -> object:
        """Write a file that others wait for: whoever reads it finds all of it."""

    def wait(self, future: Any, nbytes: int) -> Any:
        """See `array_writer.Wait`."""
        return future.result()

    def finish(self, key: str = "", flushed_keys: Collection[str] = ()) -> FileSizes:
        """Flush the names of files below a key; return those that the manifest lists, with sizes.

        Args:
            flushed_keys: Keys below it where another process has flushed the names already.
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

    def progress(self, keys: Sequence[str]) -> list[int]:
        return [self._nbytes(key) for key in keys]

    def _nbytes(self, key: str) -> int:
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
                nbytes = os.path.getsize(path)
                sizes[os.path.relpath(path, self._path).replace(os.sep, "/")] = nbytes
            # A flushed key has one level of directories, `d/`. The name of the key itself is in the
            # directory above it, which is flushed here.
            if directory not in flushed and os.path.dirname(directory) not in flushed:
                sync_directory(directory)
        return dict(sorted(sizes.items()))


class Attempt(abc.ABC):
    """The place of one save in a store.

    Attributes:
        storage: Where it writes.
        path: The path or URL of the checkpoint that it becomes.
        name: A name that no other attempt of the program has.
        thread: The name of the thread that writes.
        may_report_saved: Whether other processes still find a report once the checkpoint is
            published. In a directory they do not, because it has another name by then: they check
            for that (`is_published`).
    """

    may_report_saved: bool
    thread: str = "jstep-save"

    def __init__(self, storage: Storage, path: str) -> None:
        self.storage = storage
        self.path = path
        self.name = storage.path("")

    def begin(self) -> None:  # noqa: B027  nothing to do in a directory
        """Called on the first process, before anything is written."""

    @abc.abstractmethod
    def publish(self, manifest: Manifest) -> Sequence[str]:
        """Make the checkpoint exist; return the remains of one that it replaces, for `erase`."""

    @abc.abstractmethod
    def is_published(self, report_key: str) -> bool:
        """Whether this attempt is the checkpoint, by the report that a process wrote into it."""

    def clean_up(self) -> None:  # noqa: B027  a directory has none
        """Remove what a published checkpoint replaced, and what interrupted saves left behind."""


def writer_module() -> Any:
    """Return the module `array_writer`, imported on first use: importing tensorstore is slow."""
    from jstep.array_store import array_writer

    return array_writer


# The threads of saves.

_DETACHED_SECS = 1.0
"""Seconds for which the exit of the interpreter waits for a detached write."""
UNFINISHED_WRITES: "dict[str, BackgroundWrite]" = {}
"""Path of a temporary directory, or name of an attempt → its write."""


class BackgroundWrite:
    """The write of a checkpoint in the background, which the interpreter finishes before it exits.

    `run` writes it, or waits until it is written. Any exception that it raises is the error of the
    write.
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
        """Let the interpreter exit before the write ends; its files are left as after a kill."""
        self._is_detached = True

    def has_ended(self) -> bool:
        return self._done.done()

    def join(self) -> None:
        """Wait for the write to end, failed or not; do nothing in a fork, whose parent writes."""
        if self._pid == os.getpid():
            futures.wait([self._done])

    def wait(self) -> BaseException | None:
        """Wait like `join`, and return the error of a failed write.

        It is not raised: an exit or an interrupt in the thread of the write is not one of this
        thread.
        """
        # If Ctrl-C interrupts this, the write is still in `UNFINISHED_WRITES`, and `_finish` waits
        # for it.
        self.join()
        if self._pid != os.getpid():
            return None
        self._forget()
        return self._done.exception()

    def finish(self) -> None:
        """Wait at the exit of the interpreter, unless the write is detached, and log its error."""
        if self._is_detached:
            # A thread that returned from tensorstore while the interpreter ends would abort the
            # process. A short write ends within this time, and a longer one stays in tensorstore.
            futures.wait([self._done], timeout=_DETACHED_SECS)
            return
        error = self.wait()
        if error is not None:
            logger.error("%s was not saved", self._name.partition(TEMPORARY)[0], exc_info=error)


@functools.cache
def _finish_at_exit() -> None:
    """Let the interpreter finish the saves in progress before it exits.

    By itself, it would not wait for their daemon threads.
    """
    # Executors refuse work once threading shuts down, which happens before atexit functions run.
    with contextlib.suppress(RuntimeError):  # it is shutting down already
        getattr(threading, "_register_atexit", atexit.register)(_finish)


def _finish() -> None:
    for write in list(UNFINISHED_WRITES.values()):
        write.finish()


def is_written(name: str) -> bool:
    """Return whether this process's write of that name in `UNFINISHED_WRITES` is in progress."""
    write = UNFINISHED_WRITES.get(name)
    return write is not None and not write.has_ended()
