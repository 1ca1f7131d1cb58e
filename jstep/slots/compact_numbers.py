"""Compact numbers: integer codes with a scale per block of an axis, bfloat16 and 8-bit remainders.

Codes of signed values are proportional to the square root of the value, codes of squares to the
fourth root. Rounding alternates, so that the mean of the decoded values is exact.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jstep.core.trees import Array

SMALLEST_BLOCK = 32
KINDS = {
    "mean": np.dtype("int8"),
    "slow": np.dtype("int16"),
    "square": np.dtype("uint8"),
    "weight": None,
}
"""Kind of a slot's values → the dtype of its codes; None for bfloat16 with a remainder."""
_TINY = np.float32(2.0**-126)
_ALMOST = np.float32(1 - 2.0**-20)
_GOLDEN = 0x9E3779B9
_PRIMES = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1


class Blocks(NamedTuple):
    axis: int
    size: int


class Turn(NamedTuple):
    step: Any
    salt: Any


@functools.cache
def choose_blocks(shape: tuple[int, ...], near: int) -> Blocks:
    """The blocks of an array: see the argument `block` of `compact`."""
    for axis in reversed(range(len(shape))):
        if not shape[axis]:
            continue
        divisors = [size for size in range(SMALLEST_BLOCK, 2 * near + 1) if shape[axis] % size == 0]
        if divisors:
            return Blocks(axis, min(divisors, key=lambda size: abs(size - near)))
    return Blocks(len(shape) - 1, shape[-1])


def blocks_between(shape: tuple[int, ...], scales: tuple[int, ...]) -> Blocks:
    """The blocks of codes of a shape, from the shape of their scales."""
    axis = next((i for i in range(len(shape)) if shape[i] != scales[i]), len(shape) - 1)
    return Blocks(axis, shape[axis] // scales[axis])


def split_blocks(x: Array, blocks: Blocks) -> Array:
    """A view in which the elements of a block have a separate axis."""
    return x.reshape(_split(x.shape, blocks))


def _expand_over_elements(x: Array, blocks: Blocks, shape: tuple[int, ...]) -> Array:
    expanded = jnp.broadcast_to(jnp.expand_dims(x, blocks.axis + 1), _split(shape, blocks))
    return expanded.reshape(shape)


def _split(shape: tuple[int, ...], blocks: Blocks) -> tuple[int, ...]:
    return (
        *shape[: blocks.axis],
        shape[blocks.axis] // blocks.size,
        blocks.size,
        *shape[blocks.axis + 1 :],
    )


def decode(codes: Array, scales: Array, flat: bool = False) -> Array:
    """The values of codes, in float32; `flat` computes without a view of the blocks."""
    blocks = blocks_between(codes.shape, scales.shape)
    # If the view and the array are both used, XLA's GPU compiler does the same work twice and
    # stores the results. On CPUs the view is faster.
    viewed = codes if flat else split_blocks(codes, blocks)
    unit = np.float32(1 / int(np.iinfo(codes.dtype).max))
    c = viewed.astype(jnp.int32).astype(jnp.float32) * unit
    # Only codes of squares are unsigned.
    if codes.dtype == jnp.uint8:
        unscaled = jnp.square(jnp.square(c))
    else:
        unscaled = c * jnp.abs(c)
    if flat:
        factors = _expand_over_elements(scales, blocks, codes.shape)
    else:
        factors = jnp.expand_dims(scales, blocks.axis + 1)
    return (unscaled * factors).reshape(codes.shape)


def encode(
    x: Array, blocks: Blocks, dtype: DTypeLike, fractions: object = 0.5
) -> tuple[Array, Array]:
    """The codes of a dtype of `KINDS`, and the scales, of a float32 array.

    Codes are rounded up above the thresholds `fractions` in [0, 1); 0.5 rounds to nearest.
    """
    scales = block_scales(x, blocks)
    return quantize(x, scales, blocks, dtype, fractions), scales


def block_scales(x: Array, blocks: Blocks) -> Array:
    """The largest absolute value of each block, at least the smallest normal number."""
    # Compare bits: the largest belong to the largest number, or to a NaN, which a float reduction
    # may drop on CPUs.
    bits = jax.lax.bitcast_convert_type(jnp.abs(split_blocks(x, blocks)), jnp.int32)
    largest = jax.lax.reduce(bits, _TINY.view(np.int32), jax.lax.max, (blocks.axis + 1,))
    return jax.lax.bitcast_convert_type(largest, jnp.float32)


def quantize(
    x: Array, scales: Array, blocks: Blocks, dtype: DTypeLike, fractions: Any, flat: bool = False
) -> Array:
    """The codes of an array with known scales; see `encode` and `decode`."""
    if flat:
        share = x / _expand_over_elements(scales, blocks, x.shape)
    else:
        share = split_blocks(x, blocks) * jnp.expand_dims(1 / scales, blocks.axis + 1)
        if isinstance(fractions, jax.Array):
            fractions = split_blocks(fractions, blocks)
    # Another kernel may have computed the scales, but the share of the largest value must be 1.
    share = jnp.where(jnp.abs(share) > _ALMOST, jnp.sign(share), share)
    # Only codes of squares are unsigned.
    code = _square_codes if dtype == jnp.uint8 else _signed_codes
    codes = code(share, fractions, int(np.iinfo(dtype).max))
    return codes.astype(jnp.int32).astype(dtype).reshape(x.shape)


# A value is between the decoded values of two codes, n and n + 1. Its share of this distance, and
# not that of its root, decides how it is rounded, so that the mean of the decoded values is exact.


def _signed_codes(share: Array, fractions: Any, largest: int) -> Array:
    square = jnp.abs(share) * np.float32(largest**2)
    n = jnp.floor(jnp.sqrt(square))
    size = jnp.floor(n + (square - n * n) / (2 * n + 1) + fractions)  # (n + 1)² − n²
    return jnp.where(share < 0, -1.0, 1.0) * jnp.minimum(size, largest)


def _square_codes(share: Array, fractions: Any, largest: int) -> Array:
    fourth = jnp.maximum(share, 0) * np.float32(largest**4)
    n = jnp.floor(jnp.sqrt(jnp.sqrt(fourth)))
    square = n * n
    step = (2 * n + 1) * (2 * square + 2 * n + 1)  # (n + 1)⁴ − n⁴
    code = jnp.floor(n + (fourth - square * square) / step + fractions)
    # Above 0, because a divisor of 0 would make the next update infinite.
    return jnp.clip(code, jnp.where(share > 0, 1.0, 0.0), largest)


def fractions_at(shape: tuple[int, ...], turn: Turn, first: tuple[Any, ...] | None = None) -> Array:
    """A number in [0, 1) for each element.

    It is a hash of the element's position, moved by the golden ratio in each step.
    """
    n = jnp.zeros(shape, jnp.uint32)
    n = n + jnp.asarray(turn.salt).astype(jnp.uint32) * jnp.uint32(0x85EBCA6B)
    for axis in range(len(shape)):
        position = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        if first is not None:
            position = position + jnp.asarray(first[axis]).astype(jnp.uint32)
        n = n + position * jnp.uint32(_PRIMES[axis % len(_PRIMES)])
    n = (n ^ (n >> 16)) * jnp.uint32(0x7FEB352D)
    n = (n ^ (n >> 15)) * jnp.uint32(0x846CA68B)
    n = (n ^ (n >> 16)) + jnp.asarray(turn.step).astype(jnp.uint32) * jnp.uint32(_GOLDEN)
    return (n >> 8).astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-24)


def split_halves(x: Array, fractions: Any = 0.5) -> tuple[Array, Array]:
    """Split a float32 into a bfloat16 and its next 8 bits, rounded half up."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    finite = jnp.isfinite(x)
    dropped = jnp.asarray(fractions * np.float32(256)).astype(jnp.int32)
    bits = jnp.where(finite, (bits + dropped) & ~0xFF, bits)
    high = jnp.where(finite, (bits + 0x8000) & ~0xFFFF, bits)
    low = jnp.where(finite, (bits - high) >> 8, 0)
    top = jax.lax.bitcast_convert_type(high, jnp.float32).astype(jnp.bfloat16)
    return top, low.astype(jnp.int8)


def join_halves(top: Array, low: Array) -> Array:
    """The float32 of a bfloat16 and its remainder.

    If the bfloat16 was changed, the result is within half its last place.
    """
    whole = top.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(whole, jnp.int32)
    # A parameter that the user set to 0 keeps its sign: the old remainder may be negative.
    size = jnp.maximum((bits & 0x7FFFFFFF) + low.astype(jnp.int32) * 256, 0)
    sum_of_both = jax.lax.bitcast_convert_type(size | (bits & ~0x7FFFFFFF), jnp.float32)
    return jnp.where(jnp.isfinite(whole), sum_of_both, whole)


def decode_leaf(stored: Any, half: Any, flat: bool = False) -> Any:
    """The values of a leaf; half=None if it is stored in one array."""
    if half is None:
        return stored
    if stored.dtype == jnp.bfloat16:
        return join_halves(stored, half)
    return decode(stored, half, flat)
