"""Blocks in objects: a few large objects for however many leaves, and an index that says what lies where.

    data.<attempt>/pack.<process>.<number>     blocks, one behind the other
    data.<attempt>/part.<process>.json         the index: every block with its place and its checksum

A checkpoint of 300 small leaves is two objects. Every byte of a pack is under the CRC-32 of its block, the index under
the one in the manifest.
"""

import dataclasses
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jstep.checkpoint.store.blocks import Block
from jstep.stores import Objects, Pending

PACK = 32 * 2**20
"""Bytes of an object, at most: what a slow line takes in half a minute, and drivers can only write whole."""
_AT_ONCE = 4


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a block lies.

    Attributes:
        array: The array's name.
        dtype: Of the array.
        start: Where the block begins in the array.
        shape: Of the block.
        pack: The object that holds it, below the attempt.
        offset: Where in the object.
        nbytes: How many bytes it takes there.
        crc32: Of these bytes.
        zipped: Whether they are compressed (zlib).
    """

    array: str
    dtype: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    pack: str
    offset: int
    nbytes: int
    crc32: str
    zipped: bool = False

    def to_json(self) -> list[Any]:
        """For the index."""
        place = [self.pack, self.offset, self.nbytes, self.crc32, int(self.zipped)]
        return [self.array, self.dtype, list(self.start), list(self.shape), *place]

    @classmethod
    def from_json(cls, record: Sequence[Any]) -> "Stored":
        """What `to_json` wrote."""
        array, dtype, start, shape, pack, offset, nbytes, crc32, zipped = record
        counts = [*start, *shape, offset, nbytes]
        if len(start) != len(shape) or any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(f"a block of {array!r:.50} has no place")
        return cls(
            str(array), str(dtype), tuple(start), tuple(shape), str(pack), offset, nbytes, str(crc32), bool(zipped)
        )


def write(objects: Objects, folder: str, process: int, blocks: Iterable[Block], compress: bool) -> bytes:
    """Writes packs, some at a time, and gives back the index, to be written when all of them are there.

    Raises:
        OSError: An object could not be written; none is under way any more.
    """
    stored: list[Stored] = []
    packs: dict[str, dict[str, Any]] = {}
    writing: list[tuple[str, int, Pending]] = []

    def end_one() -> None:
        name, nbytes, pending = writing.pop(0)
        packs[name] = {"bytes": nbytes, "stamp": pending.stamp().hex()}

    try:
        for number, group in enumerate(_groups(blocks, compress)):
            name = f"pack.{process}.{number}"
            data = b"".join(body for _, body in group)
            offset = 0
            for block, body in group:
                at = (name, offset, len(body), f"{zlib.crc32(body):08x}", compress)
                stored.append(Stored(block.array, str(block.data.dtype), block.start, block.data.shape, *at))
                offset += len(body)
            if len(writing) == _AT_ONCE:
                end_one()
            writing.append((name, len(data), objects.start_write(f"{folder}/{name}", data)))
        while writing:
            end_one()
    except BaseException:
        for _, _, pending in writing:
            pending.give_up()
        raise
    return json.dumps({"packs": packs, "blocks": [block.to_json() for block in stored]}).encode()


def _groups(blocks: Iterable[Block], compress: bool) -> Iterator[list[tuple[Block, bytes]]]:
    """Blocks with their bytes, as many as go into an object."""
    group: list[tuple[Block, bytes]] = []
    size = 0
    for block in blocks:
        body = block.data.tobytes()
        body = zlib.compress(body, 1) if compress else body
        if group and size + len(body) > PACK:
            yield group
            group, size = [], 0
        group.append((block, body))
        size += len(body)
    if group:
        yield group


def read_index(data: bytes) -> tuple[dict[str, dict[str, Any]], list[Stored]]:
    """The packs and the blocks of an index.

    Raises:
        ValueError: It is none.
    """
    try:
        loaded = json.loads(data)
        return dict(loaded["packs"]), [Stored.from_json(record) for record in loaded["blocks"]]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no index: {type(error).__name__}: {error}") from None


def decoded(block: Stored, body: bytes, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The values of a block.

    Raises:
        ValueError: The bytes are not what was written.
    """
    if len(body) != block.nbytes or f"{zlib.crc32(body):08x}" != block.crc32:
        raise ValueError(f"the checksum of bytes [{block.offset}, {block.offset + block.nbytes}) differs")
    expected = math.prod(block.shape) * dtype.itemsize
    if block.zipped:
        try:
            body = zlib.decompressobj().decompress(body, expected + 1)
        except zlib.error as error:
            raise ValueError(f"{block.array!r} cannot be decompressed: {error}") from None
    if len(body) != expected:
        raise ValueError(f"{len(body)} bytes of {block.array!r} instead of {expected}")
    return np.frombuffer(body, dtype).reshape(block.shape)


def runs(blocks: Iterable[Stored]) -> Iterator[list[Stored]]:
    """Blocks that lie side by side in one object, to be read together: up to a `PACK` each."""
    run: list[Stored] = []
    for pack, group in itertools.groupby(sorted(blocks, key=lambda b: (b.pack, b.offset)), key=lambda b: b.pack):
        del pack
        for block in group:
            end = run[-1].offset + run[-1].nbytes if run else -1
            if run and (run[-1].pack != block.pack or block.offset != end or end - run[0].offset > PACK):
                yield run
                run = []
            run.append(block)
        if run:
            yield run
            run = []
