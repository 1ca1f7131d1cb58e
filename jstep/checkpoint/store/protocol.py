"""The `Store` protocol: storage of checkpoints in a directory or an object store.

A Saver handles states, steps and retention; a store handles names and bytes, and makes checkpoints atomic: whatever
happens, a path holds a complete checkpoint or none.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from jstep.checkpoint.format.manifest import CheckpointError, Manifest

Files = Mapping[str, Mapping[str, Any]]
"""Path below a checkpoint → record of that file or object: its `bytes`, and checksums or a stamp."""


class CorruptedError(CheckpointError):
    """A checkpoint is corrupted.

    Attributes:
        problems: Descriptions of what is wrong with which file or object.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


@dataclasses.dataclass(frozen=True)
class Commit:
    """The end of a save, on the first process and in the background.

    Attributes:
        saved_at: The start time of the save, by the Saver's clock.
        seal: Called with the written files: returns the manifest, which is published last, and a function to call when
            the checkpoint exists, which deletes those that it supersedes.
    """

    saved_at: float
    seal: Callable[[Files], tuple[Manifest, Callable[[], None]]]


class Store(Protocol):
    """Checkpoints of any prefixes below one directory or URL. Savers do not share stores.

    Errors of the storage (permissions, bucket, space, network) are OSErrors that name it and say what to do;
    CheckpointError is for problems of a checkpoint.
    """

    directory: str
    """An absolute path, or a URL without a trailing slash."""

    def path(self, name: str) -> str:
        """Return the path or URL of a checkpoint, as shown to users."""

    # Reading. These methods change nothing, and need no claim.

    def newest_first(self, prefix: str | None, trusted: Collection[int] = frozenset()) -> Iterator[tuple[int, str]]:
        """Yield step and path of every complete checkpoint, highest step first; checkpoints are checked lazily.

        Args:
            prefix: The prefix of the names; None for any prefix.
            trusted: Steps that need not be checked.
        """

    def at(self, prefix: str, step: int) -> str | None:
        """Return the path of the complete checkpoint of a step, or None."""

    def broken(self, prefix: str, above: int) -> list[tuple[str, str]]:
        """Return path and problem of incomplete checkpoints at steps above a given one, highest step first.

        These are only checkpoints that files were removed from; no crash leaves them. Object stores report none.
        """

    def manifest(self, path: str) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointError: The manifest is corrupted (names its path).
            FileNotFoundError: There is no manifest: the checkpoint was deleted meanwhile.
        """

    def find_corruption(
        self, path: str, manifest: Manifest, share: tuple[int, int] = (0, 1), *, every: bool = False
    ) -> list[str]:
        """Return descriptions of what is wrong with the files of a checkpoint. May be called while `restore` reads.

        Args:
            path: The path of the checkpoint.
            manifest: Its manifest.
            share: (i, n) for the i-th of n processes that share the work.
            every: Whether a corrupted file that nothing reads is a problem, too, and not only a warning.
        """

    def restore(self, path: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """Read arrays by their name in the manifest (`Leaf.array`).

        The stored shapes and dtypes are compared with the manifest (`leaves.stored_kind`) before any byte is decoded.
        Packed arrays (`Manifest.is_packed`) are verified as they are read; others need `find_corruption`.

        Args:
            path: The path of the checkpoint.
            manifest: Its manifest.
            shardings: Name → sharding of the array; None for a NumPy array.

        Raises:
            CorruptedError: The checkpoint is corrupted.
        """

    # Writing.

    def claim(self, prefix: str) -> None:
        """Claim a prefix, so that only this store writes it, and check that it can.

        Creates the directory, checks the required permissions, takes the claim, and removes what an interrupted writer
        left behind. Called before every save, and before the first step of a run; cheap if nothing has changed.
        On several processes only the first one calls it.

        Raises:
            CheckpointError: Another store writes that prefix; names its host and process.
            OSError: The directory cannot be created or written.
        """

    def save(self, path: str, arrays: Mapping[str, Any], compress: bool, commit: Commit) -> None:
        """Start to write arrays, all processes together; return when their memory may be donated.

        When everything is written, the manifest that `commit.seal` returns is published atomically, and the function
        that it returns is called.
        """

    def wait(self) -> None:
        """Wait for the write to end, and raise its error if it failed."""

    def abandon(self, path: str) -> None:
        """Remove what a failed save left behind, as far as possible; never raises."""

    def command_to_set_aside(self, path: str) -> str:
        """Return a shell command that gives a checkpoint a name under which nothing finds or deletes it."""

    def evict(self, path: str) -> None:
        """Delete a checkpoint atomically; log a warning if that fails."""

    def leave(self) -> None:
        """Note that the Saver was not closed and is no longer referenced: the next writer may finish its save."""

    def close(self, wait: bool = True) -> None:
        """End the threads and release the claim. Reading still works.

        Args:
            wait: False to wait for nothing: the user has pressed Ctrl-C twice.
        """
