"""Splitting of arrays into blocks, the units that a process writes to an object store.

A block is a box of one array in C order. Larger shards are split, so that no block is larger than an object.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jstep.core.contexts import internal_transfers
from jstep.core.placing import Bounds

Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """A box of an array, on the host.

    Attributes:
        array: The array's name.
        start: The index of the first element, one number per axis.
        data: Its values.
    """

    array: str
    start: tuple[int, ...]
    data: np.ndarray[Any, Any]


def own_blocks(arrays: Mapping[str, Any], most: int) -> list[Block]:
    """Return the blocks that this process writes: first replicas of shards, and on process 0 also NumPy arrays.

    The values are on the host when this returns; on the CPU they alias the arrays, whose memory is then not reused.
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
        for box in boxes(host.shape, host.dtype.itemsize, most):
            begin = tuple(a + part.start for a, part in zip(start, box, strict=True))
            blocks.append(Block(name, begin, host[box]))
    return blocks


def boxes(shape: tuple[int, ...], itemsize: int, most: int) -> Iterator[Box]:
    """Yield boxes of a shape in C order, each a run of at most `most` bytes (or one element)."""
    whole = tuple(slice(0, size) for size in shape)
    if math.prod(shape) * itemsize <= most:
        yield whole
        return
    axis = next(i for i, size in enumerate(shape) if size > 1)
    row = math.prod(shape[axis + 1 :]) * itemsize
    step = max(1, most // row)
    for start in range(0, shape[axis], step):
        part = slice(start, min(start + step, shape[axis]))
        if row <= most:
            yield (*whole[:axis], part, *whole[axis + 1 :])
        else:  # one row at a time, split further
            for rest in boxes(shape[axis + 1 :], itemsize, most):
                yield (*whole[:axis], part, *rest)


def overlap(part: Bounds, start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Box, Box] | None:
    """Return the common elements of a part and a block, as indices into the part and the block; None if disjoint."""
    inside, outside = [], []
    for (lower, upper), begin, size in zip(part, start, shape, strict=True):
        first, last = max(lower, begin), min(upper, begin + size)
        if first >= last:
            return None
        inside.append(slice(first - lower, last - lower))
        outside.append(slice(first - begin, last - begin))
    return tuple(inside), tuple(outside)
