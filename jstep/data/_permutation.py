"""Shuffling without a stored permutation: a keyed bijection of range(n).

`permute` evaluates one permutation of `range(n)` at any positions, in time and memory proportional to
the number of positions. It is a Feistel network over the digits (left, right) of a number in base
`width`, that is, over `height · width ≥ n` numbers. An output of n or above is fed back in until it is
below n, which preserves the bijection ("cycle walking": Black and Rogaway, "Ciphers with arbitrary
finite domains", 2002, method 2 and their generalized Feistel network). The sides are chosen such that
this is rarely needed.

A round adds to one digit a hash of the other: multiply-shift, mixed once more, with the keys of that
round. It is not a cipher, but passes as a random permutation in the statistics of
tests/test_permutation.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Words: TypeAlias = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]
Rows: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]

# With sides below 2**12, 32-bit words hash each digit evenly to 16 bits, and are twice as fast.
_MAX_32 = 2**24
# A digit with few values has few functions, so small domains need more rounds to mix.
_SMALL, _SMALL_ROUNDS, _ROUNDS = 1024, 12, 6


class Domain(NamedTuple):
    """The key-independent parameters of a network on range(n); words are 0-d arrays, which are fastest for ufuncs."""

    n: int
    rounds: int
    dtype: type[np.unsignedinteger[Any]]
    height: Words
    width: Words
    half: Words
    shift: Words
    mixer: Words


def domain(n: int) -> Domain:
    """Return the domain for n ≥ 1 numbers."""
    low = max(math.isqrt(n), min(n, 2))
    # Nearly square, with height · width barely above n.
    height = min(range(low, min(low + 64, 2 * low) + 1), key=lambda h: h * _width(n, h))
    dtype, bits, mixer = (np.uint32, 32, 0x9E3779B1) if n <= _MAX_32 else (np.uint64, 64, 0x9E3779B97F4A7C15)
    words: Any = (np.array(x, dtype) for x in (height, _width(n, height), bits // 2, bits // 2 - 1, mixer))
    return Domain(n, _SMALL_ROUNDS if n < _SMALL else _ROUNDS, dtype, *words)


def _width(n: int, height: int) -> int:
    return max(-(-n // height), min(n, 2))


def draw_keys(domain: Domain, seed: int, stream: int) -> list[Words]:
    """Return the keys of permutation number `stream` of a seed: a pair for each round, as 0-d arrays."""
    sequence = np.random.SeedSequence(seed, spawn_key=(stream,))
    keys = sequence.generate_state(2 * domain.rounds, domain.dtype)
    keys[::2] |= domain.dtype(1)  # multipliers are odd
    return [keys[i : i + 1].reshape(()) for i in range(keys.size)]


class Keys:
    """The keys of the streams of a seed, with a cache of the last requested ones."""

    def __init__(self, domain: Domain, seed: int) -> None:
        self._domain, self._seed = domain, seed
        self._known: tuple[int, list[Words]] = (-1, [])  # replaced in one assignment, so threads may share it

    def of(self, stream: int) -> list[Words]:
        """Return the keys of a stream."""
        known, keys = self._known
        if known != stream:
            keys = draw_keys(self._domain, self._seed, stream)
            self._known = (stream, keys)
        return keys


def permute(domain: Domain, keys: list[Words], positions: Rows) -> Rows:
    """Return the numbers at `positions` of the permutation; positions must be in range(n)."""
    numbers = _encipher(domain, keys, positions.astype(domain.dtype))
    outside = np.flatnonzero(numbers >= domain.n)
    while outside.size:
        numbers[outside] = _encipher(domain, keys, numbers[outside])
        outside = outside[numbers[outside] >= domain.n]
    return numbers.astype(np.intp)


def _encipher(domain: Domain, keys: list[Words], numbers: Words) -> Words:
    _, rounds, _, side, other_side, half, shift, mixer = domain
    digit = numbers // other_side
    other = numbers - digit * other_side
    h, t = np.empty_like(numbers), np.empty_like(numbers)
    for r in range(rounds):
        # h = a hash of the other digit in range(side)
        np.multiply(other, keys[2 * r], h)
        np.add(h, keys[2 * r + 1], h)
        np.right_shift(h, shift, t)
        np.bitwise_xor(h, t, h)
        np.multiply(h, mixer, h)
        np.right_shift(h, half, h)
        np.multiply(h, side, h)
        np.right_shift(h, half, h)
        # digit = (digit + h) mod side; a negative difference wraps around
        np.add(digit, h, digit)
        np.subtract(digit, side, t)
        np.minimum(digit, t, out=digit)
        digit, other, side, other_side = other, digit, other_side, side
    # After an even number of rounds the digits are in their original positions.
    np.multiply(digit, other_side, digit)
    np.add(digit, other, digit)
    return digit
