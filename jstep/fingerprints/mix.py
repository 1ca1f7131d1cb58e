"""Arithmetic of fingerprints: 32-bit words are mixed with their position and summed modulo 2^32 in two lanes.

An element is a pair of words (low, high); high is 0 for elements of 32 bits or fewer. At each position a 64-bit
bijection maps the pair to the two lanes, so that a change of one element always changes the sums, and a change of
several with probability 1 − 2⁻⁶⁴. Sums do not depend on order, so shards and chunks may be summed separately.
"""

import hashlib
from typing import Any

import numpy as np

U = np.uint32
STRIDE = 0x9E3779B9
"""2^32 divided by the golden ratio; odd, so that all positions up to 2^32 have different keys."""
SECOND = 0x7F4A7C15
HIGH = 0xC2B2AE3D
HALF = 0x27D4EB2F
MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
MASK = 0xFFFFFFFF


def scrambled(x: Any) -> Any:
    """The finalizer of MurmurHash3, a 32-bit bijection with full avalanche."""
    x = (x ^ (x >> U(16))) * U(MULTIPLIERS[0])
    x = (x ^ (x >> U(13))) * U(MULTIPLIERS[1])
    return x ^ (x >> U(16))


def lanes(low: Any, high: Any, key: Any) -> tuple[Any, Any]:
    """Compute the two lanes of elements.

    Args:
        low: The low words, uint32.
        high: The high words, uint32; None if all are 0.
        key: The keys of the positions: `position · STRIDE` modulo 2^32, uint32.
    """
    first = scrambled(low ^ key)
    second = first + (key ^ U(SECOND))
    second = scrambled(second if high is None else second + high)
    return first + second, second


def lanes_in_place(low: Any, high: Any, key: Any, first: Any, spare: Any) -> tuple[Any, Any]:
    """As `lanes`, for NumPy arrays: writes the results to `first` and `key`, and overwrites `spare`."""
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
    """Return how many elements of the last axes 32 bits can index: all of them, except in huge arrays."""
    size = 1
    for length in reversed(shape):
        if size * length > 2**32:
            break
        size *= length
    return size


def leaf_key(path: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Hash a leaf's path, dtype and shape to four words."""
    text = "\0".join((path, dtype, ",".join(map(str, shape))))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, person=b"jstep").digest()
    return np.frombuffer(digest, "<u4").astype(U)


def sealed(sums: Any, key: Any) -> Any:
    """Compute the fingerprints of leaves from the sums over their elements, by a bijection for each leaf.

    Args:
        sums: The sums of the two lanes, uint32 `[..., 2]`.
        key: The keys from `leaf_key`, uint32 `[..., 4]`.
    """
    a, b = sums[..., 0] ^ key[..., 0], sums[..., 1] ^ key[..., 1]
    a = a + scrambled(b + key[..., 2])
    b = b + scrambled(a + key[..., 3])
    a = a + scrambled(b ^ key[..., 0])
    b = b + scrambled(a ^ key[..., 1])
    return a, b
