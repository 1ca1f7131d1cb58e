"""Reading of a checkpoint whose arrays are packed: below the URL where it was written, or in a copy on a disk."""

import dataclasses
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jstep.checkpoint.format.manifest import Manifest
from jstep.checkpoint.store import packs, unpack
from jstep.checkpoint.store.checksums import is_below
from jstep.checkpoint.store.protocol import CorruptedError
from jstep.checkpoint.store.unpack import ReadableObjects
from jstep.stores import ABSENT, ReadResult


@dataclasses.dataclass(frozen=True)
class LocalRead:
    """A range of a file to read.

    Attributes:
        url: The path of the file.
        start: The first byte.
        stop: The end of the range; None for the end of the file.
    """

    url: str
    start: int
    stop: int | None

    def give_up(self) -> None:
        """Do nothing: the file is read when its result is requested."""


class LocalObjects:
    """The files of a copied checkpoint, read like the objects below a URL."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def start_read(self, key: str, start: int = 0, stop: int | None = None) -> LocalRead:
        """See `jstep.stores.Objects.start_read`."""
        return LocalRead(os.path.join(self._folder, key), start, stop)

    def read_result(self, pending: LocalRead) -> ReadResult:
        """See `jstep.stores.Objects.read_result`."""
        if not is_below(os.path.realpath(self._folder), os.path.relpath(pending.url, self._folder)):
            raise ValueError(f"{pending.url}: a link out of the checkpoint")
        try:
            with open(pending.url, "rb") as file:
                file.seek(pending.start)
                return ReadResult(file.read(-1 if pending.stop is None else pending.stop - pending.start), b"")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return ReadResult(None, ABSENT)


def read(objects: ReadableObjects, above: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
    """Read arrays by name. Each process reads the blocks that it needs and verifies their checksums.

    Args:
        objects: The objects.
        above: What the keys of the checkpoint begin with: its name and a slash, or nothing.
        manifest: The manifest of the checkpoint.
        shardings: Name → sharding of the array; None for a NumPy array.

    Raises:
        CorruptedError: The checkpoint is corrupted.
    """
    return unpack.arrays(objects, f"{above}{manifest.data}", manifest, _blocks(objects, above, manifest), shardings)


def find_corruption(
    objects: ReadableObjects, above: str, manifest: Manifest, share: tuple[int, int] = (0, 1)
) -> list[str]:
    """Return descriptions of what is wrong with the objects of a checkpoint; see `Store.find_corruption`."""
    try:
        blocks = _blocks(objects, above, manifest)
        mine = set(sorted({block.pack for block in blocks})[share[0] :: share[1]])
        blocks = [block for block in blocks if block.pack in mine]
        dtypes = {block.dtype: jax.numpy.dtype(block.dtype) for block in blocks}
        folder = f"{above}{manifest.data}"
        unpack.read(objects, folder, blocks, lambda block, body: packs.decoded(block, body, dtypes[block.dtype]))
    except CorruptedError as error:
        return error.problems
    except (TypeError, ValueError) as error:
        return [str(error)]
    return []


def _blocks(objects: ReadableObjects, above: str, manifest: Manifest) -> Sequence[packs.Stored]:
    """Return all blocks of a checkpoint, from the indexes that its processes wrote."""
    parts = {key: record for key, record in manifest.files.items() if key.split("/")[-1].startswith("part.")}
    reading = [(record, objects.start_read(f"{above}{key}")) for key, record in parts.items()]
    blocks: list[packs.Stored] = []
    problems = []
    for record, pending in reading:
        try:
            data = objects.read_result(pending).data
            if data is None:
                raise ValueError("missing")
            if record.get("crc32") != [f"{zlib.crc32(data):08x}"]:
                raise ValueError("its checksum differs")
            found = packs.read_index(data)[1]
            if any(f"{manifest.data}/{block.pack}" not in manifest.files for block in found):
                raise ValueError("it names an object that is not in the manifest")
            blocks += found
        except ValueError as error:
            text = str(error)
            problems.append(text if pending.url in text else f"{pending.url}: {text}")
    if problems:
        raise CorruptedError(problems)
    return blocks
