"""`Store`: storage of checkpoints, the base class for directories and URLs.

A Saver handles states, steps and retention; a store handles names and bytes, and makes checkpoints
atomic: whatever happens, a path holds a complete checkpoint or none.
"""

import abc
import contextlib
import errno
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from jstep.array_store.attempts import Attempt, BackgroundWrite, Storage, writer_module
from jstep.array_store.claims import FileClaim, ObjectClaim
from jstep.array_store.listing import ORBAX_ONLY
from jstep.array_store.manifest import CheckpointError, Manifest
from jstep.core.logs import logger
from jstep.stores.urls import join_path

if TYPE_CHECKING:
    from jstep.array_store.array_reader import ArrayReader


MAX_MANIFESTS = 16
"""The maximum number of manifests that are read at a time."""


class Store(abc.ABC):
    """Checkpoints below one directory or URL. Savers do not share stores.

    Errors of the storage are OSErrors; CheckpointError is for problems of a checkpoint. Without a
    prefix, a store can only read.
    """

    directory: str
    poll_secs: float = 1.0
    """Polling interval of a reader that waits for a checkpoint."""
    erase_secs: float = 0.0
    """The seconds of the deletions since the latest save began: `begin` sets it to 0, and `erase`
    adds to it."""
    _prefix: str
    _claim: FileClaim | ObjectClaim | None = None
    _write: BackgroundWrite | None = None

    def __init__(self, directory: str, prefix: str | None) -> None:
        self.directory = directory
        self._prefix = prefix or ""

    def path(self, name: str) -> str:
        """Return the path or URL of a checkpoint, as shown to users."""
        return join_path(self.directory, name)

    # Reading. These methods change nothing, and need no claim.

    @abc.abstractmethod
    def list_once(self) -> None:
        """List the checkpoints of all prefixes, for a caller that looks for the newest one of each.

        From then on, `newest_first` and `find_broken` use this list, unless it is outdated.
        """

    @abc.abstractmethod
    def newest_first(self, prefix: str | None) -> Iterator[tuple[int, str]]:
        """Yield step and path of complete checkpoints, highest step first."""

    def all_steps(self, prefix: str) -> list[int]:
        """Return the steps of all complete checkpoints, in ascending order."""
        return sorted(step for step, _ in self.newest_first(prefix))

    @abc.abstractmethod
    def own_paths(self) -> dict[int, str]:
        """Return step → path of this prefix's checkpoints, as the writer knows them, reading none.

        In a directory these are all entries with the name of a checkpoint, complete or not; below a
        URL, the checkpoints that were complete when the prefix was claimed, or were saved since.
        """

    @abc.abstractmethod
    def find_path(self, prefix: str, step: int) -> str | None:
        """Return the path of the complete checkpoint of a step, or None."""

    def path_to_read(self, prefix: str, step: int) -> str | None:
        """Return a step's checkpoint path, or None, for a caller that reads the manifest next.

        Unlike `find_path`, this may return a path without a checkpoint, as reading its manifest
        shows.
        """
        return self.find_path(prefix, step)

    def find_broken(self, prefix: str, newer_than: int) -> list[tuple[str, str]]:
        """Return path and problem of incomplete checkpoints of higher steps, highest step first.

        No crash leaves them: their files were removed. Object stores report none.
        """
        return []

    @abc.abstractmethod
    def manifest(self, path: str) -> Manifest:
        """Read a checkpoint's manifest; raise FileNotFoundError if it was deleted meanwhile."""

    def complete_manifest(self, prefix: str, step: int) -> Manifest | None:
        """Return the manifest of the complete checkpoint of a step, or None."""
        path = self.find_path(prefix, step)
        try:
            return None if path is None else self.manifest(path)
        except FileNotFoundError:
            return None

    @abc.abstractmethod
    def storage(self, path: str, manifest: Manifest) -> Storage:
        """Return the storage of the arrays of a checkpoint."""

    def reader(self, path: str, manifest: Manifest) -> "ArrayReader":
        """Return a reader of the arrays and files of a checkpoint, none of which is read yet."""
        # Not at the top: importing tensorstore is slow.
        from jstep.array_store.array_reader import ArrayReader

        storage = self.storage(path, manifest)
        return ArrayReader(storage.spec(), manifest, storage.wait)

    def find_wrong_sizes(self, path: str, manifest: Manifest) -> Mapping[str, str]:
        """Describe the listed files that are missing or have another size.

        Manifests below a URL list no files.
        """
        return {}

    def find_corruption(self, path: str, manifest: Manifest, *, every: bool = False) -> list[str]:
        """Read every chunk of a checkpoint, and describe corruption.

        `every` includes files that only Orbax reads.
        """
        problems = self.reader(path, manifest).find_corruption()
        return [*problems, *self.describe_files(path, manifest, every=every)]

    def describe_files(self, path: str, manifest: Manifest, *, every: bool = False) -> list[str]:
        """Describe files that are missing or differ, like `find_corruption`, but read no arrays.

        Files that only Orbax reads are left out. With `every`, they are not, and their contents are
        compared, too.
        """
        wrong = dict(self.find_wrong_sizes(path, manifest))
        if every:
            wrong |= self._orbax_corruption(path, manifest, raises=True)
        return [
            f"{path}/{name}: {why}"
            for name, why in wrong.items()
            if every or name not in ORBAX_ONLY
        ]

    def warn_of_orbax_files(self, path: str, manifest: Manifest) -> None:
        """Log the corrupted files that only Orbax reads."""
        corrupted = self._orbax_corruption(path, manifest, raises=False)
        if corrupted and not self.is_gone(path, manifest):
            texts = [f"{name} ({why})" for name, why in corrupted.items()]
            logger.warning(
                "%s: only Orbax reads these files, which are corrupted: %s",
                path,
                " and ".join(texts),
            )

    def _orbax_corruption(self, path: str, manifest: Manifest, *, raises: bool) -> dict[str, str]:
        """Describe the files that only Orbax reads and that differ from what was written.

        With `raises`, it is an error if one cannot be read.
        """
        storage = self.storage(path, manifest)
        corrupted: dict[str, str] = {}
        files = writer_module().orbax_files(manifest.leaves_by_array, manifest.saved_at)
        for name, written in files.items():
            try:
                data = storage.read(name)
            except OSError as error:
                is_other_kind = error.errno == errno.EINVAL  # a link, for example
                if raises and not is_other_kind:
                    raise
                corrupted[name] = f"cannot be read: {error.strerror or error}"
                continue
            except ValueError:  # it is too large
                corrupted[name] = "its content differs from what was written"
                continue
            if data is None:
                corrupted[name] = "missing"
            elif data != written:
                corrupted[name] = "its content differs from what was written"
        return corrupted

    def is_gone(self, path: str, manifest: Manifest) -> bool:
        """Return whether a checkpoint was deleted or replaced since its manifest was read."""
        try:
            current = self.manifest(path)
            expected = manifest.saved_at, manifest.data, manifest.files
            return (current.saved_at, current.data, current.files) != expected
        except FileNotFoundError:
            return True
        except (CheckpointError, OSError):
            return False

    # Writing.

    def claim(self) -> None:
        """Claim the prefix, so that only this store writes it, and check that it can.

        It creates the directory, and removes what an interrupted writer left behind.
        """
        if self._claim is not None and self._claim.is_held():
            # It is not held in a fork, whose parent has the claim.
            return
        with contextlib.suppress(CheckpointError):
            self._claim = self.lock()
            return
        # The owner may be a Saver of this process to which nothing refers any more: it releases its
        # claim when it is collected.
        gc.collect()
        self._claim = self.lock()

    @abc.abstractmethod
    def lock(self) -> FileClaim | ObjectClaim:
        """Take the claim; see `claim`."""

    @abc.abstractmethod
    def begin(
        self, path: str, attempt_id: int, saved_at: float, *, process: int, count: int
    ) -> Attempt:
        """Return a new attempt to save a checkpoint.

        All `count` processes call it together, with the same ID.
        """

    def start(self, attempt: Attempt, run: Callable[[], None]) -> None:
        """Let a thread run a save; `wait` waits for it."""
        self._write = BackgroundWrite(attempt.name, run, attempt.thread)

    def wait(self) -> BaseException | None:
        """Wait for the write in progress, and return its error."""
        if self._write is None:
            return None
        # Forgotten only when it has ended: Ctrl-C may interrupt this, and the next call then waits
        # for it.
        error = self._write.wait()
        self._write = None
        return error

    def is_writing(self) -> bool:
        write = self._write
        return write is not None and not write.has_ended()

    def abandon(self, path: str) -> None:  # noqa: B027  in a bucket, the next save does it
        """Remove the leftovers of a failed save, as far as possible; never raises."""

    @abc.abstractmethod
    def command_to_set_aside(self, path: str) -> str:
        """Return a shell command that renames a checkpoint so that nothing finds or deletes it."""

    # Deletion, for `retention`.

    @abc.abstractmethod
    def hide(self, path: str) -> Sequence[str]:
        """Atomically make a checkpoint disappear; return its remains for `erase`, if it existed."""

    @abc.abstractmethod
    def erase(self, remains: Sequence[str]) -> None:
        """Delete files or objects that belong to no checkpoint; in a bucket, in the background."""

    def evict(self, path: str) -> None:
        """Delete a checkpoint: hide it atomically, then remove its data. Failures are logged."""
        try:
            self.erase(self.hide(path))
        except (OSError, CheckpointError) as error:
            self.log_undeleted(path, error)

    def is_erasing(self) -> bool:
        return False

    def finish_erasing(self) -> None:  # noqa: B027  a directory has done it
        """Wait for the end of the deletions."""

    def log_undeleted(self, path: str, error: Exception) -> None:
        logger.warning("%s could not be deleted: %s", path, error)

    # The end.

    def close(self, wait: bool = True) -> None:
        """End the threads and release the claim, after any write that Ctrl-C has left running.

        Reading still works. Without `wait`, nothing waits, nor does the exit of the interpreter,
        for more than a second: the user has pressed Ctrl-C twice.
        """
        if not wait and self._write is not None:
            self._write.detach()
        if wait:
            if self._write is not None:
                self._write.join()
            self.finish_erasing()
        if self._claim is not None:
            self._claim.release(wait)
            self._claim = None
