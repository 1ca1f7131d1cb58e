"""Reading of the parts of a tensor that the devices of this process hold: each byte of a file is read once."""

import io
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jstep.core import placement
from jstep.core.placement import ShardBounds
from jstep.weights.tensors import Tensor

_SHORT = 4096
"""Bytes of a run below which separate reads cost more than also reading the bytes between runs."""


def read_shards(file: io.RawIOBase, tensor: Tensor, sharding: Any) -> Any:
    """Read the parts of a tensor that the devices of this process hold; the whole tensor without sharding."""
    parts = placement.local_parts(tensor.shape, sharding)
    arrays = read_parts(file, tensor, parts)
    return arrays[0] if sharding is None else dict(zip(parts, arrays, strict=True))


def read_parts(file: io.RawIOBase, tensor: Tensor, parts: Sequence[ShardBounds]) -> list[np.ndarray[Any, Any]]:
    """Read parts of a tensor, each into new memory; each byte is read once.

    Args:
        file: The tensor's file, unbuffered.
        tensor: The tensor.
        parts: The bounds of the parts; no two of them share an element.

    Raises:
        ValueError: The file ends early, or holds bools that are neither 0 nor 1.
    """
    dtype = tensor.dtype
    assert dtype is not None
    sizes = [math.prod(placement.lengths(part)) for part in parts]
    if len(parts) > 1 and sum(sizes) * dtype.itemsize == tensor.nbytes and _run(tensor.shape, parts[0])[1] < _SHORT:
        whole = read_shards(file, tensor, None)
        return [whole[placement.slices(part)].copy() for part in parts]
    return [_part(file, tensor, dtype, part) for part in parts]


def _part(file: io.RawIOBase, tensor: Tensor, dtype: np.dtype[Any], part: ShardBounds) -> np.ndarray[Any, Any]:
    array = np.empty(placement.lengths(part), dtype)
    view = array.reshape(-1).view(np.uint8).data
    axes, count = _run(tensor.shape, part)
    strides = [math.prod(tensor.shape[axis + 1 :]) * dtype.itemsize for axis in range(len(part))]
    length = count * dtype.itemsize
    begins = [range(*bounds) if axis < axes else bounds[:1] for axis, bounds in enumerate(part)]
    for number, at in enumerate(itertools.product(*begins) if view.nbytes else ()):
        start = tensor.start + sum(i * stride for i, stride in zip(at, strides, strict=True))
        _fill(file, view[number * length : (number + 1) * length], start, tensor)
    if dtype == np.bool_ and (array.view(np.uint8) > 1).any():
        raise ValueError(f"{tensor.file}: corrupted: the tensor {tensor.name!r} has bools that are neither 0 nor 1")
    return array


def _fill(file: io.RawIOBase, view: memoryview, start: int, tensor: Tensor) -> None:
    file.seek(start)
    done = 0
    while done < view.nbytes:
        count = file.readinto(view[done:])
        if not count:
            raise ValueError(
                f"{tensor.file}: is truncated: it ends inside the tensor {tensor.name!r}; did the file change?"
            )
        done += count


def _run(shape: Sequence[int], part: ShardBounds) -> tuple[int, int]:
    """Return the number of axes before the contiguous elements of a part, and the number of these elements."""
    axes = len(shape)
    while axes and part[axes - 1] == (0, shape[axes - 1]):
        axes -= 1
    axes = max(axes - 1, 0)
    return axes, math.prod(placement.lengths(part[axes:]))
