"""The contents of a checkpoint, read and verified: its arrays, and the files that were saved with them."""

import abc
from collections.abc import Callable, Mapping
from typing import Any

from jstep.checkpoint import checksums
from jstep.checkpoint.manifest import Manifest


class Contents(abc.ABC):
    """The contents of a checkpoint, in one of the formats in which they are stored.

    Attributes:
        verifies: Whether `restore` verifies what it reads; otherwise `find_corruption` does.
    """

    verifies: bool

    @abc.abstractmethod
    def restore(self, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """Read arrays by their name in the manifest (`Leaf.array`); each process reads what it needs.

        The stored shapes and dtypes are compared with the manifest (`leaf_records.stored_kind`) before any byte is
        decoded.

        Args:
            shardings: Name → sharding of the array; None for a NumPy array.

        Raises:
            CorruptedError: The checkpoint is corrupted.
        """

    @abc.abstractmethod
    def read_file(self, name: str) -> bytes:
        """Read one of the files that were saved with the arrays, and verify its checksums.

        Raises:
            CorruptedError: The file is corrupted, or the checkpoint has no such file.
        """

    @abc.abstractmethod
    def find_corruption(self, share: tuple[int, int], *, every: bool) -> tuple[list[str], list[str]]:
        """Return the problems of what is read, and those of files that nothing reads; see `Store.find_corruption`."""


class OrbaxContents(Contents):
    """Arrays in the files of Orbax, with other files beside them.

    Args:
        path: The path or URL of the checkpoint.
        manifest: Its manifest.
        start_read: Starts to read a file.
        differences: Returns how files differ from their records, by their paths; "" if they do not.
        read_arrays: `restore`, with the manifest as its first argument.
    """

    verifies = False

    def __init__(
        self,
        path: str,
        manifest: Manifest,
        start_read: checksums.StartRead,
        differences: Callable[[Mapping[str, checksums.Record]], dict[str, str]],
        read_arrays: Callable[[Manifest, Mapping[str, Any]], dict[str, Any]],
    ) -> None:
        self._path, self._manifest, self._start_read = path, manifest, start_read
        self._differences, self._read_arrays = differences, read_arrays

    def restore(self, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Contents.restore`."""
        return self._read_arrays(self._manifest, shardings)

    def read_file(self, name: str) -> bytes:
        """See `Contents.read_file`."""
        return checksums.read_file(self._start_read, self._manifest, name)

    def find_corruption(self, share: tuple[int, int], *, every: bool) -> tuple[list[str], list[str]]:
        """See `Contents.find_corruption`."""
        found = self._differences(checksums.share_of(self._manifest, share))
        return checksums.problems_of(self._path, found, every=every)
