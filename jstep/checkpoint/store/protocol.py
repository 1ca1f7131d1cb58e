"""What a Saver asks of the place where checkpoints lie, be it a directory or an object store.

A Saver knows states, steps and retention; a store knows names, bytes, and how a checkpoint comes to exist whole or
not at all. Whatever happens in between, a path stands for a whole checkpoint or for none.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from jstep.checkpoint.format.manifest import CheckpointError, Manifest

Files = Mapping[str, Mapping[str, Any]]
"""Path below a checkpoint → what is known of that file or object: its `bytes`, and checksums or a stamp."""


class DamagedError(CheckpointError):
    """What was read is not what was written.

    Attributes:
        problems: What is wrong with which file or object, in words.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


class Commit(Protocol):
    """The end of a save, in two parts. Both are called on the first process, in the background, in this order."""

    saved_at: float
    """When the save began, by the Saver's clock."""

    def seal(self, files: Files) -> Manifest:
        """The manifest of what was written, to be put in its place as the last thing."""

    def committed(self) -> None:
        """The checkpoint is there: what it supersedes may go."""


class Store(Protocol):
    """Checkpoints of any prefixes below one directory or URL. Each Saver has one of its own.

    Errors of the place (no right, no bucket, no space, no network) are OSErrors that name it and the way out;
    CheckpointError is for what is wrong with a checkpoint.
    """

    directory: str
    """An absolute path, or a URL without a slash at its end."""

    checks_what_it_reads: bool
    """Whether `restore` finds damage by itself, so that `damage` need not go over the same bytes."""

    def path(self, name: str) -> str:
        """Where a checkpoint of that name lies, as users see it."""

    # Reading. Nothing here changes anything, and none of it asks who writes.

    def newest_first(self, prefix: str | None, trusted: Collection[int] = frozenset()) -> Iterator[tuple[int, str]]:
        """Step and path of every whole checkpoint, highest step first, looked into one by one.

        Args:
            prefix: Of the names; any where None.
            trusted: Steps that need not be looked into.
        """

    def at(self, prefix: str, step: int) -> str | None:
        """The path of the whole checkpoint of a step, or None."""

    def broken(self, prefix: str, above: int) -> list[str]:
        """What lies at steps above one as if it were a checkpoint and is none: `path: what is wrong`, highest first.

        Only what no crash of ours leaves: an object store has none of these.
        """

    def manifest(self, path: str) -> Manifest:
        """The manifest of a checkpoint.

        Raises:
            CheckpointError: It is damaged (names its path).
            FileNotFoundError: There is none: the checkpoint was deleted meanwhile.
        """

    def damage(self, path: str, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> list[str]:
        """What is wrong with the files of a checkpoint, in words. It may be called while `restore` reads.

        Args:
            path: Of the checkpoint.
            manifest: Its manifest.
            share: (i, n) for the i-th of n processes that share the work.
        """

    def restore(self, path: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays by their name in the manifest (`Leaf.array`).

        Shape and dtype of what is stored are compared with the manifest's (`leaves.stored_kind`) before a byte of
        it is decoded.

        Args:
            path: Of the checkpoint.
            manifest: Its manifest.
            shardings: Name → where the array goes; None for a NumPy array.

        Raises:
            DamagedError: What is there is not what was written.
        """

    # Writing.

    def claim(self, prefix: str) -> None:
        """Makes sure that this store alone writes a prefix, and can.

        Makes the directory, tries the rights it will need, takes the claim, and clears away what an earlier writer
        left when it was cut short. Called before every save, and before the first step of a run: cheap where all is
        as it was. On several processes the first one does it, and only it calls.

        Raises:
            CheckpointError: Another one writes that prefix; names its host and process.
            OSError: It cannot be made or written.
        """

    def save(self, path: str, arrays: Mapping[str, Any], compress: bool, commit: Commit) -> None:
        """Starts to write arrays, all processes together; returns when their memory may be donated.

        When all is written, the manifest that `commit.seal` returns is put in its place, atomically, and
        `commit.committed` is called.
        """

    def wait(self) -> None:
        """Waits for the write to end, and raises what went wrong."""

    def abandon(self, path: str) -> None:
        """Clears away what a save that failed has left, as far as possible; raises nothing."""

    def evict(self, path: str) -> None:
        """Deletes a checkpoint: at no moment is half of one there. What cannot be deleted is a warning."""

    def close(self, wait: bool = True) -> None:
        """Ends threads, and gives the claim up. Reading goes on.

        Args:
            wait: False where nothing may be waited for: the user has pressed Ctrl-C twice.
        """
