"""Reading of arrays that several processes need: each byte is read once, and sent to the others.

A large array is divided between its replicas, in parts of at least 1 MiB, and JAX joins the parts.
If two processes would still read the same bytes of an array, it is one of those that are read in
groups of about 1 MiB, as they were written: each group by one process. The processes that need a
group then receive it, in rounds of a few megabytes.
"""

import functools
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jstep.array_store.array_reader import ArrayKind, ArrayReader, boxes_of, place_boxes
from jstep.array_store.array_writer import Turns, divide_replicas
from jstep.core.meshes import internal_transfers
from jstep.core.placement import ShardBounds, bounds, lengths
from jstep.core.threads import AGREEING, doing

_ROUND_BYTES = 2**25
"""The bytes that a process receives in a round."""
_MIN_ROUND_BYTES = 2**12
"""The minimum of these bytes: a program is compiled for each size."""
_AXES = ("group", "member", "device")
"""The axes of the mesh on which the processes exchange what they have read."""

Boxes: TypeAlias = tuple[ShardBounds, ...]
Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Processes, in groups of one size."""


class _Needs(NamedTuple):
    """Which processes need the same boxes of an array.

    Attributes:
        groups: All processes. Those of one group need the same boxes, which no other group needs.
        boxes: The boxes of each group.
    """

    groups: Groups
    boxes: tuple[Boxes, ...]


class _SharedArray(NamedTuple):
    """An array that one process of each group reads for the others.

    Attributes:
        boxes: The boxes that each group needs.
        reader: The number of that process in its group, the same for all groups.
    """

    name: str
    kind: ArrayKind
    boxes: tuple[Boxes, ...]
    reader: int

    def nbytes(self, group: int) -> int:
        elements = sum([math.prod(lengths(box)) for box in self.boxes[group]])
        return elements * int(self.kind.dtype.itemsize)


class ReadPlan:
    """Which arrays the processes read alone, divided or together; the same on all of them.

    Attributes:
        alone: Name → the sharding with which this process reads an array. It is the wanted one, or
            one that divides the array between more processes; JAX then brings it into the wanted
            one.
        digest: A number that is the same on all processes if their plans are.
    """

    def __init__(self, kinds: Mapping[str, ArrayKind], shardings: Mapping[str, Any]) -> None:
        self._kinds = kinds
        self._shardings = shardings
        self.alone: dict[str, Any] = {}
        self._together: dict[Groups, list[_SharedArray]] = {}
        if jax.process_count() == 1:
            self.alone = dict(shardings)
            self.digest = 0
            return
        turns_of_groups: dict[Groups, Turns] = {}
        for name, sharding in shardings.items():
            kind = kinds[name]
            divided = _divided(sharding, kind.shape, kind.dtype.itemsize)
            if _needs(divided, kind.shape) is None:
                # Each process reads what it needs of the divided array; JAX joins the parts.
                self.alone[name] = divided
                continue
            # Even of the divided array, several processes would read the same bytes. So they share
            # the boxes that they need in the end, without a division.
            needs = _needs(sharding, kind.shape)
            if needs is None:
                self.alone[name] = sharding
                continue
            turns = turns_of_groups.setdefault(needs.groups, Turns(len(needs.groups[0])))
            array = _SharedArray(name, kind, needs.boxes, turns.current)
            largest = max(array.nbytes(group) for group in range(len(needs.groups)))
            turns.add(largest)
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

    def exchange(self, own_data: Mapping[str, Mapping[ShardBounds, Any]]) -> dict[str, Any]:
        """Send others what this process has read of `boxes_to_read`; return all shared arrays."""
        placed = {}
        for groups, arrays in self._together.items():
            for array, boxes in _received(groups, arrays, own_data):
                placed[array.name] = place_boxes(array.kind, self._shardings[array.name], boxes)
        return placed


@functools.lru_cache(maxsize=4096)
def _divided(sharding: Any, shape: tuple[int, ...], itemsize: int) -> Any:
    if sharding is None or sharding.is_fully_addressable:
        return sharding
    return divide_replicas(sharding, shape, itemsize)


@functools.lru_cache(maxsize=4096)
def _needs(sharding: Any, shape: tuple[int, ...]) -> _Needs | None:
    """Return which processes need the same boxes, in groups of one size; None to read alone.

    Each process reads alone if no two need the same boxes, if one needs none, or if groups would
    have different sizes: these could not exchange what they have read. Without a sharding, or with
    one of this process alone, each process needs the whole array.
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


def _position(groups: Groups) -> tuple[int, int]:
    """Return the number of the group of this process, and its number there."""
    process = jax.process_index()
    for i, group in enumerate(groups):
        if process in group:
            return i, group.index(process)
    raise ValueError(f"process {process} is in none of {groups}")


def _received(
    groups: Groups,
    arrays: Sequence[_SharedArray],
    own_data: Mapping[str, Mapping[ShardBounds, Any]],
) -> Iterator[tuple[_SharedArray, dict[ShardBounds, Any]]]:
    """Yield arrays and their boxes, as they arrive from the members of this process's group."""
    own_group, own_member = _position(groups)
    arrays_of_members: list[list[_SharedArray]] = [[] for _ in groups[0]]
    for array in arrays:
        arrays_of_members[array.reader].append(array)
    # Each member sends a stream of all its arrays, one after the other, and in each round `size`
    # bytes of it.
    longest = 0
    for arrays_of_member in arrays_of_members:
        for group in range(len(groups)):
            longest = max(longest, sum([array.nbytes(group) for array in arrays_of_member]))
    size = _round_size(longest, len(groups[0]))
    sent = _Stream(_pieces_to_send(arrays_of_members[own_member], own_data))
    received = [
        _Stream(_pieces_to_receive(arrays_of_member, own_group))
        for arrays_of_member in arrays_of_members
    ]
    gather = _Gather(groups, size)
    for _ in range(math.ceil(longest / size)):
        rows = gather.gather(sent.take(size))
        for stream, row in zip(received, rows, strict=True):
            yield from stream.put(row)


def _round_size(longest: int, num_members: int) -> int:
    """Return how many bytes each member of a group sends in a round.

    It is a power of two, so that programs are few. Together they send at most `_ROUND_BYTES`, if
    they are not very many, and no more than the longest stream needs.
    """
    limit = max(_MIN_ROUND_BYTES, _ROUND_BYTES // num_members)
    largest_power = 1 << (limit.bit_length() - 1)
    whole_stream = max(_MIN_ROUND_BYTES, 1 << (longest - 1).bit_length())
    return min(largest_power, whole_stream)


class _Piece(NamedTuple):
    """The bytes of a box of an array.

    Attributes:
        boxes: The boxes of the array.
        memory: The bytes of this one.
        is_last: Whether it is the last box of the array.
    """

    array: _SharedArray
    boxes: dict[ShardBounds, Any]
    memory: np.ndarray[Any, Any]
    is_last: bool


def _pieces_of(array: _SharedArray, boxes: dict[ShardBounds, Any]) -> Iterator[_Piece]:
    for number, values in enumerate(boxes.values()):
        yield _Piece(array, boxes, values.reshape(-1).view(np.uint8), number == len(boxes) - 1)


def _pieces_to_send(
    arrays: Sequence[_SharedArray], own_data: Mapping[str, Mapping[ShardBounds, Any]]
) -> Iterator[_Piece]:
    for array in arrays:
        yield from _pieces_of(array, dict(own_data[array.name]))


def _pieces_to_receive(arrays: Sequence[_SharedArray], group: int) -> Iterator[_Piece]:
    for array in arrays:
        # Only now, when its first byte arrives.
        boxes = {box: np.empty(lengths(box), array.kind.dtype) for box in array.boxes[group]}
        yield from _pieces_of(array, boxes)


class _Stream:
    """The bytes of arrays, one after the other: those read, or memory for those yet to arrive."""

    def __init__(self, pieces: Iterator[_Piece]) -> None:
        self._pieces = pieces
        # The stream continues at this byte of this piece.
        self._piece: _Piece | None = None
        self._offset = 0

    def _current_piece(self) -> _Piece | None:
        """Return the piece at which the stream continues; None at its end."""
        if self._piece is None or self._offset == self._piece.memory.size:
            self._piece = next(self._pieces, None)
            self._offset = 0
        return self._piece

    def take(self, size: int) -> np.ndarray[Any, Any]:
        """Return the next bytes, with zeros after the last."""
        taken = np.zeros(size, np.uint8)
        count = 0
        while count < size:
            piece = self._current_piece()
            if piece is None:
                break
            part = piece.memory[self._offset : self._offset + size - count]
            taken[count : count + part.size] = part
            count += part.size
            self._offset += part.size
        return taken

    def put(
        self, row: np.ndarray[Any, Any]
    ) -> Iterator[tuple[_SharedArray, dict[ShardBounds, Any]]]:
        """Store bytes that have arrived, and yield the arrays that are complete."""
        count = 0
        while count < row.size:
            piece = self._current_piece()
            if piece is None:
                break
            part = row[count : count + piece.memory.size - self._offset]
            piece.memory[self._offset : self._offset + part.size] = part
            count += part.size
            self._offset += part.size
            if piece.is_last and self._offset == piece.memory.size:
                yield piece.array, piece.boxes


class _Gather:
    """An all-gather within each group: every member gets the rows of bytes of all its members."""

    def __init__(self, groups: Sequence[Sequence[int]], size: int) -> None:
        self._shape = len(groups), len(groups[0]), size
        devices_of: dict[int, list[Any]] = {process: [] for process in itertools.chain(*groups)}
        for device in jax.devices():
            if device.process_index in devices_of:
                devices_of[device.process_index].append(device)
        # All devices, if each process has as many: not every backend runs a program on only some
        # devices of a process.
        count = min(len(devices) for devices in devices_of.values())
        devices_of = {process: devices[:count] for process, devices in devices_of.items()}
        rows = [[devices_of[process] for process in group] for group in groups]
        mesh = Mesh(np.array(rows), _AXES)
        self._own_rows = NamedSharding(mesh, PartitionSpec("group", "member"))
        self._all_rows = NamedSharding(mesh, PartitionSpec("group"))
        self._devices = devices_of[jax.process_index()]

    def gather(self, row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with internal_transfers(), doing(AGREEING):
            shards = [jax.device_put(row[None, None], device) for device in self._devices]
            own_rows = jax.make_array_from_single_device_arrays(self._shape, self._own_rows, shards)
            all_rows = _reshard_program(self._all_rows)(own_rows)
            return np.asarray(all_rows.addressable_data(0))[0]


@functools.lru_cache(maxsize=64)
def _reshard_program(sharding: Any) -> Any:
    return jax.jit(lambda rows: rows, out_shardings=sharding)


def read_arrays(
    reader: ArrayReader, plan: ReadPlan
) -> tuple[dict[str, Any], dict[str, dict[ShardBounds, Any]]]:
    """Read what this process reads: arrays of its own, and boxes for its group.

    It does not communicate.
    """
    return reader.read(plan.alone), reader.read_boxes(plan.boxes_to_read())
