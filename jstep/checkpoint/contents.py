"""The contents of a checkpoint, read and verified: its arrays, and the files that were saved with them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jstep.checkpoint.listing import COMMITTED, COMMITTED_TEXT
from jstep.checkpoint.manifest import Manifest

if TYPE_CHECKING:
    from jstep.checkpoint.array_reader import ArrayReader


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint in a folder, or below a URL.

    Attributes:
        base: tensorstore's JSON for the folder with the arrays.
        read_small: A function that returns a file of that folder; None if it is missing.
        find_wrong_sizes: A function that describes the files of the manifest that are missing, or have another size.
        wait: See `array_writer.Wait`.
    """

    manifest: Manifest
    base: Mapping[str, Any]
    read_small: Callable[[str], bytes | None]
    find_wrong_sizes: Callable[[], Mapping[str, str]] = dict
    wait: Callable[[Any, int], Any] = lambda future, nbytes: future.result()

    def read(self, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """Read arrays by their `Leaf.array`, with these shardings, or None for NumPy arrays; see `ArrayReader.read`."""
        return self._reader.read(shardings) if shardings else {}

    def read_file(self, name: str) -> bytes:
        """Read a file that was saved with the arrays."""
        return self._reader.read_file(name)

    def find_corruption(self) -> list[str]:
        """Read every chunk, and describe what is corrupted."""
        reader = self._reader
        names = [*self.manifest.by_array, *reader.files()]
        return reader.problems or reader.find_corruption(names)

    def find_unused_corruption(self) -> dict[str, str]:
        """Describe the files that only Orbax reads and that differ from what was written."""
        from jstep.checkpoint.array_writer import description  # not at the top: importing tensorstore is slow

        expected = description(self.manifest.by_array, self.manifest.saved_at) | {COMMITTED: COMMITTED_TEXT}
        found: dict[str, str] = {}
        for name, data in expected.items():
            try:
                if (read := self.read_small(name)) != data:
                    found[name] = "missing" if read is None else "its content differs from what was written"
            except OSError as error:
                found[name] = f"cannot be read: {error.strerror or error}"
        return found

    @functools.cached_property
    def _reader(self) -> "ArrayReader":
        from jstep.checkpoint.array_reader import ArrayReader  # not at the top: importing tensorstore is slow

        return ArrayReader(self.base, self.manifest.by_array, self.wait)
