"""The arithmetic of a fingerprint: words of 32 bits, mixed with their position, summed modulo 2^32 in two lanes.

An element is a pair of words (low, high), the high one 0 where it has 32 bits or fewer. At each position the pair
goes through a bijection of 64 bits into the two lanes, so that a change of one element always changes the sums, and
of several with a chance of 1 − 2⁻⁶⁴. Sums do not depend on the order, so that shards and pieces may be summed apart.
"""

import hashlib
from typing import Any

import numpy as np

U = np.uint32
STRIDE = 0x9E3779B9
"""Odd, so that positions up to 2^32 get keys that all differ: 2^32 divided by the golden ratio."""
SECOND = 0x7F4A7C15
HIGH = 0xC2B2AE3D
HALF = 0x27D4EB2F
MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
MASK = 0xFFFFFFFF


def scrambled(x: Any) -> Any:
    """A bijection of 32 bits in which every bit depends on every other: the finalizer of MurmurHash3."""
    x = (x ^ (x >> U(16))) * U(MULTIPLIERS[0])
    x = (x ^ (x >> U(13))) * U(MULTIPLIERS[1])
    return x ^ (x >> U(16))


def lanes(low: Any, high: Any, key: Any) -> tuple[Any, Any]:
    """The two lanes of elements.

    Args:
        low: Their low words, uint32.
        high: Their high words, uint32; None where all are 0.
        key: Of their positions: `position · STRIDE` modulo 2^32, uint32.
    """
    first = scrambled(low ^ key)
    second = first + (key ^ U(SECOND))
    second = scrambled(second if high is None else second + high)
    return first + second, second


def lanes_in_place(low: Any, high: Any, key: Any, first: Any, spare: Any) -> tuple[Any, Any]:
    """As `lanes`, of NumPy arrays: the results lie in `first` and `key`, and `spare` is written over."""
    np.bitwise_xor(low, key, out=first)
    _scramble(first, spare)
    np.bitwise_xor(key, U(SECOND), out=key)
    np.add(first, key, out=key)
    if high is not None:
        np.add(key, high, out=key)
    _scramble(key, spare)
    np.add(first, key, out=first)
    return first, key


def _scramble(x: Any, spare: Any) -> None:
    for shift, multiplier in zip((16, 13), MULTIPLIERS, strict=True):
        np.right_shift(x, U(shift), out=spare)
        np.bitwise_xor(x, spare, out=x)
        np.multiply(x, U(multiplier), out=x)
    np.right_shift(x, U(16), out=spare)
    np.bitwise_xor(x, spare, out=x)


def split_at(shape: tuple[int, ...]) -> int:
    """How many elements the last axes hold that 32 bits can number: all of them, but in huge arrays."""
    size = 1
    for length in reversed(shape):
        if size * length > 2**32:
            break
        size *= length
    return size


def leaf_key(path: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Four words that stand for a leaf's path, dtype and shape."""
    text = "\0".join((path, dtype, ",".join(map(str, shape))))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, person=b"jstep").digest()
    return np.frombuffer(digest, "<u4").astype(U)


def sealed(sums: Any, key: Any) -> Any:
    """The fingerprints of leaves, from the sums over their elements: a bijection for each leaf.

    Args:
        sums: Of the two lanes, uint32 `[..., 2]`.
        key: From `leaf_key`, uint32 `[..., 4]`.
    """
    a, b = sums[..., 0] ^ key[..., 0], sums[..., 1] ^ key[..., 1]
    a = a + scrambled(b + key[..., 2])
    b = b + scrambled(a + key[..., 3])
    a = a + scrambled(b ^ key[..., 0])
    b = b + scrambled(a ^ key[..., 1])
    return a, b
