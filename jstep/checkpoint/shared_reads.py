"""What several processes read of arrays that more than one of them needs: each byte once; the others are sent it.

A large array is divided between its replicas, in parts of at least 1 MiB, and JAX brings the parts together. Arrays for
which this leaves bytes that two processes would read are read in groups of about 1 MiB: each by one process, as they
were written. The processes that need a group then receive it, in rounds of a few megabytes.
"""

import functools
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jstep.checkpoint.array_reader import ArrayKind, ArrayReader, boxes_of, place_boxes
from jstep.checkpoint.array_writer import SMALLEST, divide_replicas, stride
from jstep.core.meshes import internal_transfers
from jstep.core.placement import ShardBounds, bounds, lengths
from jstep.core.threads import AGREEING, doing

_ROUND = 2**25
"""The bytes that a process receives in a round."""
_SMALLEST_ROUND = 2**12

Boxes = tuple[ShardBounds, ...]


class _Needs(NamedTuple):
    """Which processes need the same boxes of an array.

    Attributes:
        groups: The processes, in groups of one size, each of which needs other boxes than the others.
        boxes: The boxes of each group.
    """

    groups: tuple[tuple[int, ...], ...]
    boxes: tuple[Boxes, ...]


class _SharedArray(NamedTuple):
    """An array that one process of each group reads: the member with this number."""

    name: str
    kind: ArrayKind
    boxes: tuple[Boxes, ...]
    reader: int

    def nbytes(self, group: int) -> int:
        return sum([math.prod(lengths(box)) for box in self.boxes[group]]) * int(self.kind.dtype.itemsize)


class ReadPlan:
    """Which arrays the processes read alone, divided or together; the same on all of them.

    Attributes:
        alone: Name → the sharding with which this process reads an array, which then needs no other process, or is
            brought into its own sharding by JAX.
        digest: A number that is the same on all processes if their plans are.
    """

    def __init__(self, kinds: Mapping[str, ArrayKind], shardings: Mapping[str, Any]) -> None:
        self._kinds = kinds
        self._shardings = shardings
        self.alone: dict[str, Any] = {}
        self._together: dict[tuple[tuple[int, ...], ...], list[_SharedArray]] = {}
        if jax.process_count() == 1:
            self.alone = dict(shardings)
            self.digest = 0
            return
        turns: dict[tuple[tuple[int, ...], ...], _Turn] = {}
        for name, sharding in shardings.items():
            kind = kinds[name]
            divided = _divided(sharding, kind.shape, kind.dtype.itemsize)
            needs = _needs(divided, kind.shape)
            if needs is None:
                self.alone[name] = divided
                continue
            needs = _needs(sharding, kind.shape)
            if needs is None:  # processes of unequal parts: each reads its own
                self.alone[name] = sharding
                continue
            turn = turns.setdefault(needs.groups, _Turn(len(needs.groups[0])))
            array = _SharedArray(name, kind, needs.boxes, turn.member)
            turn.add(max(array.nbytes(group) for group in range(len(needs.groups))))
            self._together.setdefault(needs.groups, []).append(array)
        signature = [(name, kinds[name], str(sharding)) for name, sharding in self.alone.items()]
        whole = repr([signature, self._together])
        self.digest = zlib.crc32(whole.encode(errors="replace")) >> 1  # fits an int32

    def boxes_to_read(self) -> dict[str, Boxes]:
        """Return the boxes of arrays that this process reads for its group."""
        found: dict[str, Boxes] = {}
        for groups, arrays in self._together.items():
            group, member = _position(groups)
            found |= {array.name: array.boxes[group] for array in arrays if array.reader == member}
        return found

    def exchange(self, read: Mapping[str, Mapping[ShardBounds, Any]]) -> dict[str, Any]:
        """Send the others what this process has read of `boxes_to_read`, and return all arrays that are shared."""
        placed = {}
        for groups, arrays in self._together.items():
            for array, boxes in _received(groups, arrays, read):
                placed[array.name] = place_boxes(array.kind, self._shardings[array.name], boxes)
        return placed


class _Turn:
    """The member of a group whose turn it is to read: each in turn reads `SMALLEST` bytes, as they were written."""

    def __init__(self, members: int) -> None:
        self._members = members
        self._number = 0
        self._nbytes = 0

    @property
    def member(self) -> int:
        return self._number * stride(self._members) % self._members

    def add(self, nbytes: int) -> None:
        self._nbytes += nbytes
        if self._nbytes >= SMALLEST:
            self._number += 1
            self._nbytes = 0


@functools.lru_cache(maxsize=4096)
def _divided(sharding: Any, shape: tuple[int, ...], itemsize: int) -> Any:
    if sharding is None or sharding.is_fully_addressable:
        return sharding
    return divide_replicas(sharding, shape, itemsize)


@functools.lru_cache(maxsize=4096)
def _needs(sharding: Any, shape: tuple[int, ...]) -> _Needs | None:
    """Return which processes need the same; None if no two do, or if the groups differ in size.

    Without a sharding, or with one of this process alone, each process needs the whole array.
    """
    count = jax.process_count()
    whole = tuple((0, size) for size in shape)
    if sharding is None or sharding.is_fully_addressable:
        return _Needs((tuple(range(count)),), ((whole,),))
    parts: dict[int, dict[ShardBounds, None]] = {process: {} for process in range(count)}
    for device, index in sharding.devices_indices_map(shape).items():
        parts[device.process_index].setdefault(bounds(index, shape))
    groups: dict[Boxes, list[int]] = {}
    for process, found in parts.items():
        if not found:
            return None
        groups.setdefault(tuple(boxes_of(list(found))), []).append(process)
    sizes = {len(processes) for processes in groups.values()}
    if len(sizes) > 1 or sizes == {1}:
        return None
    return _Needs(tuple(map(tuple, groups.values())), tuple(groups))


def _position(groups: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the number of the group of this process, and its number there."""
    process = jax.process_index()
    return next((i, group.index(process)) for i, group in enumerate(groups) if process in group)


def _received(
    groups: tuple[tuple[int, ...], ...], arrays: Sequence[_SharedArray], read: Mapping[str, Mapping[ShardBounds, Any]]
) -> Iterator[tuple[_SharedArray, dict[ShardBounds, Any]]]:
    """Yield arrays and their boxes, as they arrive from the members of the group of this process."""
    own_group, own_member = _position(groups)
    members = range(len(groups[0]))
    of_member = {member: [array for array in arrays if array.reader == member] for member in members}
    # The members send equally long streams, of all their arrays one after the other.
    longest = max(
        sum([array.nbytes(group) for array in found]) for found in of_member.values() for group in range(len(groups))
    )
    limit = max(_SMALLEST_ROUND, _ROUND // len(members))
    size = min(1 << (limit.bit_length() - 1), max(_SMALLEST_ROUND, 1 << (longest - 1).bit_length()))
    sent = _Stream(of_member[own_member], own_group, read)
    receiving = {member: _Stream(found, own_group) for member, found in of_member.items()}
    gather = _Gather(groups, size)
    for _ in range(math.ceil(longest / size)):
        rows = gather.gather(sent.take(size))
        for member, row in zip(members, rows, strict=True):
            yield from receiving[member].put(row)


class _Stream:
    """The bytes of arrays, one after the other: those that were read, or memory for those that will arrive."""

    def __init__(
        self, arrays: Sequence[_SharedArray], group: int, read: Mapping[str, Mapping[ShardBounds, Any]] | None = None
    ) -> None:
        self._pieces = self._make_pieces(arrays, group, read)
        self._piece: tuple[_SharedArray, dict[ShardBounds, Any], np.ndarray[Any, Any], bool] | None = None
        self._at = 0

    @staticmethod
    def _make_pieces(
        arrays: Sequence[_SharedArray], group: int, read: Mapping[str, Mapping[ShardBounds, Any]] | None
    ) -> Iterator[tuple[_SharedArray, dict[ShardBounds, Any], np.ndarray[Any, Any], bool]]:
        for array in arrays:
            # Memory is allocated when the first byte arrives.
            if read is None:
                boxes = {box: np.empty(lengths(box), array.kind.dtype) for box in array.boxes[group]}
            else:
                boxes = dict(read[array.name])
            for number, values in enumerate(boxes.values()):
                yield array, boxes, values.reshape(-1).view(np.uint8), number == len(boxes) - 1

    def _next_piece(self) -> bool:
        if self._piece is None or self._at == self._piece[2].size:
            self._piece = next(self._pieces, None)
            self._at = 0
        return self._piece is not None

    def take(self, size: int) -> np.ndarray[Any, Any]:
        """Return the next bytes, with zeros after the last."""
        taken = np.zeros(size, np.uint8)
        at = 0
        while at < size and self._next_piece():
            assert self._piece is not None
            part = self._piece[2][self._at : self._at + size - at]
            taken[at : at + part.size] = part
            at += part.size
            self._at += part.size
        return taken

    def put(self, row: np.ndarray[Any, Any]) -> Iterator[tuple[_SharedArray, dict[ShardBounds, Any]]]:
        """Store bytes that have arrived, and yield the arrays that are complete."""
        at = 0
        while at < row.size and self._next_piece():
            assert self._piece is not None
            array, boxes, memory, is_last = self._piece
            part = row[at : at + memory.size - self._at]
            memory[self._at : self._at + part.size] = part
            at += part.size
            self._at += part.size
            if is_last and self._at == memory.size:
                yield array, boxes


class _Gather:
    """Brings rows of bytes of one size from the members of each group to all of them."""

    def __init__(self, groups: Sequence[Sequence[int]], size: int) -> None:
        self._shape = len(groups), len(groups[0]), size
        local = {
            process: [d for d in jax.devices() if d.process_index == process] for process in itertools.chain(*groups)
        }
        # All devices, unless their number differs: not every backend runs a program on some devices of a process.
        used = min(len(devices) for devices in local.values())
        devices = np.array([[local[process][:used] for process in group] for group in groups])
        mesh = Mesh(devices, ("group", "member", "device"))
        self._rows = NamedSharding(mesh, PartitionSpec("group", "member"))
        self._every = NamedSharding(mesh, PartitionSpec("group"))
        self._devices = local[jax.process_index()][:used]

    def gather(self, row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with internal_transfers(), doing(AGREEING):
            shards = [jax.device_put(row[None, None], device) for device in self._devices]
            rows = jax.make_array_from_single_device_arrays(self._shape, self._rows, shards)
            every = _to(self._every)(rows)
            return np.asarray(every.addressable_data(0))[0]


@functools.lru_cache(maxsize=64)
def _to(sharding: Any) -> Any:
    return jax.jit(lambda rows: rows, out_shardings=sharding)


def read_arrays(reader: ArrayReader, plan: ReadPlan) -> tuple[dict[str, Any], dict[str, dict[ShardBounds, Any]]]:
    """Read what this process reads: arrays of its own, and boxes for its group. It does not communicate."""
    return reader.read(plan.alone), reader.read_boxes(plan.boxes_to_read())
