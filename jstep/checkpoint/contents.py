"""The contents of a checkpoint, read and verified: its arrays, and the files that were saved with them."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jstep.checkpoint import checksums
from jstep.checkpoint.listing import UNUSED
from jstep.checkpoint.manifest import Manifest


class Contents(abc.ABC):
    """The contents of a checkpoint in one of the storage formats.

    Attributes:
        verifies: Whether `restore` verifies what it reads; otherwise `find_corruption` does.
    """

    verifies: bool

    @abc.abstractmethod
    def restore(self, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """Read arrays by their `Leaf.array`, with these shardings, or None for NumPy arrays.

        Shapes and dtypes are compared with the manifest (`leaf_records.shape_and_dtype`) before any byte is decoded.
        """

    @abc.abstractmethod
    def read_file(self, name: str) -> bytes:
        """Read a file that was saved with the arrays, and verify its checksums."""

    @abc.abstractmethod
    def find_corruption(self, share: tuple[int, int], *, every: bool) -> tuple[list[str], list[str]]:
        """Return the problems of files that are read, and of unused ones; see `Store.find_corruption`."""


@dataclasses.dataclass(frozen=True)
class OrbaxContents(Contents):
    """Arrays in Orbax's files, with other files beside them.

    Attributes:
        base: tensorstore's JSON for the files.
        wait: See `orbax_arrays.read_arrays`.
    """

    path: str
    manifest: Manifest
    start_read: checksums.StartRead
    differences: Callable[[Mapping[str, checksums.Record]], dict[str, str]]
    base: Mapping[str, Any]
    wait: Callable[[Any, int], Any] = lambda future, nbytes: future.result()
    verifies = False

    def restore(self, shardings: Mapping[str, Any]) -> dict[str, Any]:
        from jstep.checkpoint import orbax_arrays  # not at the top: importing tensorstore is slow

        return orbax_arrays.read_arrays(self.base, self.manifest, shardings, self.wait) if shardings else {}

    def read_file(self, name: str) -> bytes:
        return checksums.read_file(self.start_read, self.manifest, name)

    def find_corruption(self, share: tuple[int, int], *, every: bool) -> tuple[list[str], list[str]]:
        differences = self.differences(checksums.process_share(self.manifest, share))
        unread = frozenset[str]() if every else UNUSED
        bad = {path: why for path, why in differences.items() if why}
        read = [f"{self.path}/{path}: {why}" for path, why in bad.items() if path not in unread]
        return read, [f"{path} ({why})" for path, why in bad.items() if path in unread]
