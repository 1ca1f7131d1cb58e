"""Arrays of checkpoints in object stores: blocks, packed into a few large objects with an index."""

import dataclasses
import itertools
import json
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jstep.checkpoint.checksums import StartRead
from jstep.checkpoint.contents import Contents
from jstep.checkpoint.leaf_records import shape_and_dtype
from jstep.checkpoint.manifest import CorruptedError, Manifest
from jstep.core.meshes import internal_transfers
from jstep.core.placement import ShardBounds, lengths, local_parts, place
from jstep.stores.objects import Objects, PendingOperation, TruncatedError, pipelined
from jstep.stores.tagged_json import LargeBytes

# Splitting of arrays into blocks, and packing of blocks into a few large objects with an index of their positions.
#
# A block is a box of one array in C order, the unit that a process writes. Larger shards are split, so that no block is
# larger than an object.
#
#     data.<attempt>/pack.<process>.<number>     concatenated blocks
#     data.<attempt>/part.<process>.json         the index: every block with its position and its checksum
#
# A checkpoint of 300 small leaves is two objects. A CRC-32 covers the bytes of each block, and one in the manifest
# covers the index.

FILE = "file"
"""The dtype of a block that holds bytes of a file saved with the arrays, such as a position."""
Box = tuple[slice, ...]
_Tag = TypeVar("_Tag")


class Block(NamedTuple):
    """A box of an array, on the host.

    Attributes:
        start: The index of the first element, one number per axis.
        dtype: `FILE` if it holds bytes of a file, whose name `array` then is.
    """

    array: str
    start: tuple[int, ...]
    data: np.ndarray[Any, Any]
    dtype: str = ""


def own_blocks(arrays: Mapping[str, Any]) -> list[Block]:
    """Return the blocks that this process writes: first replicas of shards, and on process 0 also NumPy arrays.

    The values are on the host; on the CPU they alias the arrays, whose memory is then not reused.
    """
    shards: list[tuple[str, Box, Any]] = []
    for name, array in arrays.items():
        if isinstance(array, jax.Array):
            for shard in array.addressable_shards:
                if shard.replica_id == 0:
                    with internal_transfers():
                        shard.data.copy_to_host_async()
                    shards.append((name, shard.index, shard.data))
        elif jax.process_index() == 0:
            shards.append((name, (slice(None),) * array.ndim, array))
    blocks = []
    for name, index, data in shards:
        with internal_transfers():
            host = np.asarray(jax.device_get(data))
        start = tuple(0 if part.start is None else part.start for part in index)
        for box in boxes(host.shape, host.dtype.itemsize, PACK):
            begin = tuple(a + part.start for a, part in zip(start, box, strict=True))
            blocks.append(Block(name, begin, host[box]))
    return blocks


def file_blocks(files: Mapping[str, LargeBytes]) -> Iterator[Block]:
    """Yield files as blocks. Copy a block before taking the next one, which releases its memory."""
    for name, content in files.items():
        data = np.frombuffer(content.read(), np.uint8)
        for start in range(0, len(data), PACK):
            yield Block(name, (start,), data[start : start + PACK], FILE)
        del data
        content.written()


def boxes(shape: tuple[int, ...], itemsize: int, max_bytes: int) -> Iterator[Box]:
    """Yield boxes of a shape in C order, of at most `max_bytes` bytes, enough for one element."""
    whole = tuple(slice(0, size) for size in shape)
    if math.prod(shape) * itemsize <= max_bytes:
        yield whole
        return
    axis = next(i for i, size in enumerate(shape) if size > 1)
    row = math.prod(shape[axis + 1 :]) * itemsize
    step = max(1, max_bytes // row)
    for start in range(0, shape[axis], step):
        part = slice(start, min(start + step, shape[axis]))
        for rest in boxes(shape[axis + 1 :], itemsize, max_bytes):  # one row at a time is split further
            yield (*whole[:axis], part, *rest)


def overlap(part: ShardBounds, start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Box, Box] | None:
    """Return the common elements, as indices into the part and the block, or None."""
    inside, outside = [], []
    for (lower, upper), begin, size in zip(part, start, shape, strict=True):
        first, last = max(lower, begin), min(upper, begin + size)
        if first >= last:
            return None
        inside.append(slice(first - lower, last - lower))
        outside.append(slice(first - begin, last - begin))
    return tuple(inside), tuple(outside)


PACK = 32 * 2**20
"""Maximum bytes of an object: a slow connection uploads this in half a minute, and drivers cannot write in parts."""
_AT_ONCE = 4


class BlockPosition(NamedTuple):
    """The position of a block in an object, as the index lists it.

    Attributes:
        start: The index of the block's first element in the array.
        pack: The object, relative to the attempt.
        zipped: 1 if compressed (zlib), as an older version could; otherwise 0.
    """

    array: str
    dtype: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    pack: str
    offset: int
    nbytes: int
    crc32: str
    zipped: int

    @classmethod
    def from_json(cls, record: Sequence[Any]) -> "BlockPosition":
        array, dtype, start, shape, pack, offset, nbytes, crc32, zipped = record
        counts = [*start, *shape, offset, nbytes]
        if len(start) != len(shape) or any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(f"a block of {array!r:.50} has an invalid position")
        return cls(
            str(array), str(dtype), tuple(start), tuple(shape), str(pack), offset, nbytes, str(crc32), bool(zipped)
        )


def write(objects: Objects, folder: str, process: int, blocks: Iterable[Block]) -> bytes:
    """Write packs concurrently; return the index, to be written after all of them."""
    stored: list[BlockPosition] = []
    packs: dict[str, dict[str, Any]] = {}

    def started() -> Iterator[tuple[tuple[str, int], PendingOperation]]:
        for number, group in enumerate(_groups(blocks)):
            name = f"pack.{process}.{number}"
            data = b"".join(body for _, body in group)
            offset = 0
            for block, body in group:
                at = (name, offset, len(body), f"{zlib.crc32(body):08x}", 0)
                dtype = block.dtype or str(block.data.dtype)
                stored.append(BlockPosition(block.array, dtype, block.start, block.data.shape, *at))
                offset += len(body)
            yield (name, len(data)), objects.start_write(f"{folder}/{name}", data)

    for (name, nbytes), pending in pipelined(started(), _AT_ONCE):
        packs[name] = {"bytes": nbytes, "stamp": pending.stamp().hex()}
    return json.dumps({"packs": packs, "blocks": stored}).encode()


def _groups(blocks: Iterable[Block]) -> Iterator[list[tuple[Block, bytes]]]:
    group: list[tuple[Block, bytes]] = []
    size = 0
    for block in blocks:
        body = block.data.tobytes()
        if group and size + len(body) > PACK:
            yield group
            group, size = [], 0
        group.append((block, body))
        size += len(body)
    if group:
        yield group


def read_index(data: bytes) -> tuple[dict[str, dict[str, Any]], list[BlockPosition]]:
    try:
        loaded = json.loads(data)
        return dict(loaded["packs"]), [BlockPosition.from_json(record) for record in loaded["blocks"]]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not an index: {type(error).__name__}: {error}") from None


def decode_block(block: BlockPosition, body: bytes, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Decode the values of a block, if its bytes are not corrupted."""
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


def runs(blocks: Iterable[BlockPosition]) -> Iterator[list[BlockPosition]]:
    """Yield runs of adjacent blocks in one object, about `PACK` bytes each, to be read together."""
    run: list[BlockPosition] = []
    for block in sorted(blocks, key=lambda b: (b.pack, b.offset)):
        end = run[-1].offset + run[-1].nbytes if run else -1
        if run and (run[-1].pack != block.pack or block.offset != end or end - run[0].offset > PACK):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


# Reading of a checkpoint whose arrays are packed: below the URL where it was written, or in a copy on a disk.
#
# Arrays are assembled from blocks onto any sharding; each process reads what it needs.

_READ_AT_ONCE = 8
"""Concurrent reads: 256 MB at most."""


@dataclasses.dataclass(frozen=True)
class PackedContents(Contents):
    start_read: StartRead
    manifest: Manifest
    verifies = True

    def restore(self, shardings: Mapping[str, Any]) -> dict[str, Any]:
        if not shardings:
            return {}
        blocks = [block for block in self._blocks() if block.dtype != FILE]
        kinds = _check(self.manifest, blocks, shardings)
        parts = {
            name: {part: np.empty(lengths(part), kinds[name][1]) for part in local_parts(kinds[name][0], sharding)}
            for name, sharding in shardings.items()
        }
        needed = [
            block
            for block in blocks
            if any(overlap(part, block.start, block.shape) for part in parts.get(block.array, {}))
        ]

        def fill(block: BlockPosition, body: bytes) -> None:
            values = decode_block(block, body, kinds[block.array][1])
            for part, filled in parts[block.array].items():
                if (both := overlap(part, block.start, block.shape)) is not None:
                    filled[both[0]] = values[both[1]]

        self._read_blocks(needed, fill)
        out: dict[str, Any] = {}
        for name, sharding in shardings.items():
            mine = parts.pop(name)
            out[name] = next(iter(mine.values())) if sharding is None else place(*kinds[name], sharding, mine)
        return out

    def read_file(self, name: str) -> bytes:
        blocks = [stored for stored in self._blocks() if (stored.array, stored.dtype) == (name, FILE)]
        blocks.sort(key=lambda block: block.start)
        ends = itertools.accumulate((block.shape[0] if len(block.shape) == 1 else -1 for block in blocks), initial=0)
        if not blocks or [block.start for block in blocks] != [(end,) for end in list(ends)[:-1]]:
            raise CorruptedError([f"{self.manifest.data}: {name}: {'a part of it is' if blocks else 'it is'} missing"])
        contents: dict[tuple[int, ...], bytes] = {}

        def keep(block: BlockPosition, body: bytes) -> None:
            contents[block.start] = decode_block(block, body, _dtype_of(block)).tobytes()

        self._read_blocks(blocks, keep)
        return b"".join(contents[block.start] for block in blocks)

    def find_corruption(self, share: tuple[int, int], *, every: bool) -> tuple[list[str], list[str]]:
        try:
            blocks = self._blocks()
            mine = set(sorted({block.pack for block in blocks})[share[0] :: share[1]])
            blocks = [block for block in blocks if block.pack in mine]
            self._read_blocks(blocks, lambda block, body: decode_block(block, body, _dtype_of(block)))
        except CorruptedError as error:
            return error.problems, []
        except (TypeError, ValueError) as error:
            return [str(error)], []
        return [], []

    def _blocks(self) -> Sequence[BlockPosition]:
        blocks: list[BlockPosition] = []

        def add(key: str, data: bytes) -> None:
            if self.manifest.files[key].get("crc32") != [f"{zlib.crc32(data):08x}"]:
                raise ValueError("its checksum differs")
            listed = read_index(data)[1]
            if any(f"{self.manifest.data}/{block.pack}" not in self.manifest.files for block in listed):
                raise ValueError("it names an object that is not in the manifest")
            blocks.extend(listed)

        keys = [key for key in self.manifest.files if key.split("/")[-1].startswith("part.")]
        _read(((key, self.start_read(key)) for key in keys), add, len(keys))
        return blocks

    def _read_blocks(self, blocks: Sequence[BlockPosition], use: Callable[[BlockPosition, bytes], Any]) -> None:
        def started() -> Iterator[tuple[list[BlockPosition], Any]]:
            for run in runs(blocks):
                last = run[-1].offset + run[-1].nbytes
                yield run, self.start_read(f"{self.manifest.data}/{run[0].pack}", run[0].offset, last)

        def use_run(run: list[BlockPosition], data: bytes) -> None:
            for block in run:
                at = block.offset - run[0].offset
                use(block, data[at : at + block.nbytes])

        _read(started(), use_run)


def _dtype_of(block: BlockPosition) -> Any:
    return np.dtype(np.uint8) if block.dtype == FILE else jnp.dtype(block.dtype)


def _check(
    manifest: Manifest, blocks: Sequence[BlockPosition], names: Collection[str]
) -> dict[str, tuple[tuple[int, ...], Any]]:
    kinds = {leaf.array: shape_and_dtype(leaf) for leaf in manifest.leaves if leaf.array in names}
    there = dict.fromkeys(names, 0)
    problems = []
    for block in blocks:
        if block.array not in there:
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


def _read(
    started: Iterable[tuple[_Tag, Any]], use: Callable[[_Tag, bytes], None], max_in_flight: int = _READ_AT_ONCE
) -> None:
    """Read objects, or ranges of them, concurrently; `use(item, bytes)` raises ValueError if they are corrupted."""
    problems: dict[str, None] = {}
    for what, pending in pipelined(started, max_in_flight):
        try:
            data = pending.read().data
            if data is None:
                raise ValueError("missing")
            use(what, data)
        except (ValueError, TruncatedError) as error:
            text = str(error)
            problems[text if pending.url in text else f"{pending.url}: {text}"] = None
    if problems:
        raise CorruptedError(list(problems))
