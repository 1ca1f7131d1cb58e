"""Reading of tensors, or only the parts that the devices of this process hold, and their placement as leaves."""

import functools
import io
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.placement import (
    ShardBounds,
    bounds,
    lengths,
    local_parts,
    place,
    place_anywhere,
    slices,
    target_sharding,
)
from jstep.core.trees import is_floating
from jstep.weights.fit import Wanted
from jstep.weights.header import Tensor, dtype_of

_SHORT = 4096
"""Bytes of a run below which separate reads cost more than also reading the bytes between runs."""


def read_whole(file: io.RawIOBase, tensor: Tensor) -> np.ndarray[Any, Any]:
    """Read a whole tensor into new memory."""
    (array,) = read_parts(file, tensor, [tuple((0, size) for size in tensor.shape)])
    return array


def read_parts(file: io.RawIOBase, tensor: Tensor, parts: Sequence[ShardBounds]) -> list[np.ndarray[Any, Any]]:
    """Read parts of a tensor, each into new memory; each byte is read once.

    Args:
        file: The tensor's file, unbuffered.
        tensor: The tensor.
        parts: The bounds of the parts; no two of them share an element.

    Raises:
        ValueError: The file ends early, or holds bools that are neither 0 nor 1.
    """
    dtype = dtype_of(tensor.code)
    assert dtype is not None
    sizes = [math.prod(lengths(part)) for part in parts]
    if len(parts) > 1 and sum(sizes) * dtype.itemsize == tensor.nbytes and _run(tensor.shape, parts[0])[1] < _SHORT:
        whole = read_whole(file, tensor)
        return [whole[slices(part)].copy() for part in parts]
    return [_part(file, tensor, dtype, part) for part in parts]


def _part(file: io.RawIOBase, tensor: Tensor, dtype: np.dtype[Any], part: ShardBounds) -> np.ndarray[Any, Any]:
    array = np.empty(lengths(part), dtype)
    view = array.reshape(-1).view(np.uint8).data
    length = _run(tensor.shape, part)[1] * dtype.itemsize
    for number, start in enumerate(_starts(tensor.shape, part) if view.nbytes else ()):
        at = number * length
        _fill(file, view[at : at + length], tensor.start + start * dtype.itemsize, tensor)
    if dtype == np.bool_ and (array.view(np.uint8) > 1).any():
        raise ValueError(f"{tensor.file}: corrupted: the tensor {tensor.name!r} has bools that are neither 0 nor 1")
    return array


def _run(shape: Sequence[int], part: ShardBounds) -> tuple[int, int]:
    """Return the number of axes before the contiguous elements of a part, and the number of these elements."""
    axes = len(shape)
    while axes and part[axes - 1] == (0, shape[axes - 1]):
        axes -= 1
    axes = max(axes - 1, 0)
    return axes, math.prod(lengths(part[axes:]))


def _starts(shape: Sequence[int], part: ShardBounds) -> Iterator[int]:
    """Yield the index of the first element of each run, in order."""
    axes, _ = _run(shape, part)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    first = sum(begin * stride for (begin, _), stride in zip(part[axes:], strides[axes:], strict=True))
    for at in itertools.product(*(range(*one) for one in part[:axes])):
        yield first + sum(i * stride for i, stride in zip(at, strides, strict=False))


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


_logger = logging.getLogger("jstep")


def placed(wanted: Wanted, file: io.RawIOBase) -> Any:
    """Read a leaf from its file: each device its own part; parts that several devices hold are read once.

    Args:
        wanted: The leaf, with its tensor and no transform.
        file: The tensor's file, unbuffered.
    """
    tensor = wanted.tensor
    assert tensor is not None
    sharding = None if wanted.on_host else target_sharding(wanted.leaf, wanted.path)
    if sharding is None:
        return from_host(wanted, read_whole(file, tensor))
    parts = local_parts(wanted.shape, sharding)
    values = (_cast(wanted, array) for array in read_parts(file, tensor, parts))
    return place(wanted.shape, wanted.dtype, sharding, dict(zip(parts, values, strict=True)))


def from_host(wanted: Wanted, array: np.ndarray[Any, Any]) -> Any:
    """Return a leaf from the whole array on the host."""
    array = _cast(wanted, array)
    if wanted.on_host:
        return np.array(array)
    sharding = target_sharding(wanted.leaf, wanted.path)
    if sharding is None:
        return place_anywhere(array)
    parts = {part: array[slices(part)] for part in local_parts(wanted.shape, sharding)}
    return place(wanted.shape, wanted.dtype, sharding, parts)


def from_parts(wanted: Wanted, sharding: Any, parts: Iterable[tuple[Any, np.ndarray[Any, Any]]]) -> jax.Array:
    """Return a leaf from the parts of this process on the host, as pairs (index, values)."""
    values = {bounds(index, wanted.shape): _cast(wanted, part) for index, part in parts}
    return place(wanted.shape, wanted.dtype, sharding, values)


def _cast(wanted: Wanted, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Cast an array to the leaf's dtype; a warning is logged if finite numbers become infinite or NaN.

    Raises:
        ValueError: A Python number of the target cannot represent an integer.
    """
    if array.dtype == wanted.dtype:
        return array
    with np.errstate(all="ignore"):
        result = array.astype(wanted.dtype)
    if not is_floating(wanted.dtype):
        if (result != array).any():
            raise ValueError(
                f"target: {wanted.path!r} is {wanted.dtype} and cannot represent {array.max()}; enable jax_enable_x64"
            )
        return result
    if _largest(wanted.dtype) < _largest(array.dtype) and (lost := _finite(array) - _finite(result)):
        _logger.warning(
            "load_weights: %d finite numbers of %r are outside the range of %s", lost, wanted.path, wanted.dtype
        )
    return result


@functools.cache
def _largest(dtype: Any) -> float:
    return float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]


def _finite(array: np.ndarray[Any, Any]) -> int:
    return int(np.count_nonzero(np.isfinite(array)))
