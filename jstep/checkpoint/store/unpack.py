"""Reading of a checkpoint whose arrays are packed: below the URL where it was written, or in a copy on a disk.

Arrays are assembled from blocks onto any sharding; each process reads what it needs.
"""

import dataclasses
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jstep.checkpoint.format import leaves as _leaves
from jstep.checkpoint.format.manifest import Manifest
from jstep.checkpoint.store import packs
from jstep.checkpoint.store.checksums import is_below
from jstep.checkpoint.store.packs import Stored, overlap
from jstep.checkpoint.store.protocol import CorruptedError
from jstep.core.placement import lengths, local_parts, place
from jstep.stores.objects import ABSENT, ReadResult, TruncatedError, at_once

_AT_ONCE = 8
"""Concurrent reads: 256 MB at most."""


class ReadableObjects(Protocol):
    """Objects by key: those below a URL (`jstep.stores.objects.Objects`), or files."""

    def start_read(self, key: str, start: int = 0, stop: int | None = None) -> Any:
        """Start to read an object, or a range of its bytes. The result has `url` and `give_up()`."""

    def read_result(self, pending: Any) -> ReadResult:
        """Return the result of a read."""


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
        """See `jstep.stores.objects.Objects.start_read`."""
        return LocalRead(os.path.join(self._folder, key), start, stop)

    def read_result(self, pending: LocalRead) -> ReadResult:
        """See `jstep.stores.objects.Objects.read_result`."""
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
    return _arrays(objects, f"{above}{manifest.data}", manifest, _blocks(objects, above, manifest), shardings)


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
        _read(objects, folder, blocks, lambda block, body: packs.decoded(block, body, dtypes[block.dtype]))
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


def _check(
    manifest: Manifest, blocks: Sequence[Stored], names: Sequence[str]
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shape and dtype of arrays, after comparing them with the blocks before any block is read.

    Raises:
        CorruptedError: They do not match, or blocks are missing.
    """
    wanted = set(names)
    kinds = {leaf.array: _leaves.stored_kind(leaf) for leaf in manifest.leaves if leaf.array in wanted}
    there = dict.fromkeys(wanted, 0)
    problems = []
    for block in blocks:
        if block.array not in wanted:
            continue
        shape, dtype = kinds[block.array]
        inside = len(block.start) == len(shape) and all(
            begin + size <= whole for begin, size, whole in zip(block.start, block.shape, shape, strict=True)
        )
        if block.dtype != dtype or not inside:
            problems.append(
                f"{block.array!r} is {dtype} of shape {shape}, but the stored block is {block.dtype}, "
                f"{block.shape} at {block.start}"
            )
        there[block.array] += math.prod(block.shape)
    for name in names:
        if there[name] != math.prod(kinds[name][0]) and not problems:
            problems.append(f"{name!r}: {there[name]} of {math.prod(kinds[name][0])} elements are stored")
    if problems:
        raise CorruptedError(problems)
    return {name: (kinds[name][0], jnp.dtype(kinds[name][1])) for name in names}


def _arrays(
    objects: ReadableObjects, folder: str, manifest: Manifest, blocks: Sequence[Stored], shardings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arrays by name, with their shardings (None for NumPy arrays). They share no memory with anything.

    Raises:
        CorruptedError: An object is missing or corrupted.
        OSError: The store cannot be read.
    """
    kinds = _check(manifest, blocks, list(shardings))
    parts = {
        name: {part: np.empty(lengths(part), kinds[name][1]) for part in local_parts(kinds[name][0], sharding)}
        for name, sharding in shardings.items()
    }
    needed = [
        block for block in blocks if any(overlap(part, block.start, block.shape) for part in parts.get(block.array, {}))
    ]

    def fill(block: Stored, body: bytes) -> None:
        values = packs.decoded(block, body, kinds[block.array][1])
        for part, filled in parts[block.array].items():
            if (both := overlap(part, block.start, block.shape)) is not None:
                filled[both[0]] = values[both[1]]

    _read(objects, folder, needed, fill)
    out: dict[str, Any] = {}
    for name, sharding in shardings.items():
        mine = parts.pop(name)
        out[name] = next(iter(mine.values())) if sharding is None else place(*kinds[name], sharding, mine)
    return out


def _read(objects: ReadableObjects, folder: str, blocks: Sequence[Stored], use: Any) -> None:
    """Read blocks, and call `use(block, bytes)` with each.

    Raises:
        CorruptedError: An object is missing, or `use` raised ValueError.
        OSError: The store cannot be read.
    """
    problems: dict[str, None] = {}

    def started() -> Iterator[tuple[list[Stored], Any]]:
        for run in packs.runs(blocks):
            last = run[-1].offset + run[-1].nbytes
            yield run, objects.start_read(f"{folder}/{run[0].pack}", run[0].offset, last)

    for run, pending in at_once(started(), _AT_ONCE):
        try:
            found = objects.read_result(pending)
            if found.data is None:
                raise ValueError("missing")
            for block in run:
                at = block.offset - run[0].offset
                use(block, found.data[at : at + block.nbytes])
        except (ValueError, TruncatedError) as error:
            text = str(error)
            problems[text if pending.url in text else f"{pending.url}: {text}"] = None

    if problems:
        raise CorruptedError(list(problems))
