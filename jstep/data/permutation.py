"""Shuffling without a stored permutation: a keyed bijection of range(n).

`permute` evaluates one permutation of `range(n)` at any positions. It is a Feistel network over the digits (left,
right) of a number in base `width`, over `height · width ≥ n` numbers. An output of n or above is fed back in until it
is below n ("cycle walking": Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

A round adds to one digit a hash of the other: multiply-shift, mixed once more, with the keys of that round. It is not a
cipher; `tests/data/test_permutation.py` has its statistics.
"""

import functools
import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Words: TypeAlias = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]
Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]
RowNumbers: TypeAlias = Numbers | slice

# With sides below 2**12, 32-bit words hash each digit evenly to 16 bits, and are twice as fast.
_MAX_32 = 2**24
# A digit with few values has few functions, so small domains need more rounds to mix.
_SMALL = 1024
_SMALL_ROUNDS = 12
_ROUNDS = 6
# Row numbers to compute in one call when they are read in sequence, to amortize the overhead of NumPy.
_LOOKAHEAD_ROWS = 16384


class Domain(NamedTuple):
    """The key-independent parameters of a network on range(n), as 0-d arrays."""

    n: int
    rounds: int
    dtype: type[np.unsignedinteger[Any]]
    height: Words
    width: Words
    half: Words
    shift: Words
    mixer: Words


@functools.lru_cache(maxsize=1024)
def domain(n: int) -> Domain:
    low = max(math.isqrt(n), min(n, 2))
    # Nearly square, with height · width barely above n.
    height = min(range(low, min(low + 64, 2 * low) + 1), key=lambda h: h * _width(n, h))
    dtype, bits, mixer = (np.uint32, 32, 0x9E3779B1) if n <= _MAX_32 else (np.uint64, 64, 0x9E3779B97F4A7C15)
    words: Any = (np.array(x, dtype) for x in (height, _width(n, height), bits // 2, bits // 2 - 1, mixer))
    return Domain(n, _SMALL_ROUNDS if n < _SMALL else _ROUNDS, dtype, *words)


def _width(n: int, height: int) -> int:
    return max(-(-n // height), min(n, 2))


def draw_keys(domain: Domain, seed: int, stream: int) -> list[Words]:
    sequence = np.random.SeedSequence(seed, spawn_key=(stream,))
    keys = sequence.generate_state(2 * domain.rounds, domain.dtype)
    keys[::2] |= domain.dtype(1)  # multipliers are odd
    return [keys[i : i + 1].reshape(()) for i in range(keys.size)]


def permute(domain: Domain, keys: list[Words], positions: Numbers, *, inverse: bool = False) -> Numbers:
    numbers = _encipher(domain, keys, positions.astype(domain.dtype), inverse)
    outside = np.flatnonzero(numbers >= domain.n)
    while outside.size:
        numbers[outside] = _encipher(domain, keys, numbers[outside], inverse)
        outside = outside[numbers[outside] >= domain.n]
    return numbers.astype(np.intp)


def position_in_epoch(num_rows: int, seed: int, epoch: int, row: int) -> int:
    rows = domain(num_rows)
    return int(permute(rows, draw_keys(rows, seed, epoch), np.array([row]), inverse=True)[0])


def _encipher(domain: Domain, keys: list[Words], numbers: Words, inverse: bool) -> Words:
    _, rounds, _, side, other_side, half, shift, mixer = domain
    digit = numbers // other_side
    other = numbers - digit * other_side
    for r in reversed(range(rounds)) if inverse else range(rounds):
        if inverse:
            digit, other, side, other_side = other, digit, other_side, side
        # h = a hash of the other digit in range(side)
        h = other * keys[2 * r] + keys[2 * r + 1]
        h ^= h >> shift
        h *= mixer
        h = (h >> half) * side >> half
        # digit = (digit ± h) mod side; a negative difference wraps around
        if inverse:
            digit -= h
            np.minimum(digit, digit + side, out=digit)
        else:
            digit += h
            np.minimum(digit, digit - side, out=digit)
            digit, other, side, other_side = other, digit, other_side, side
    # After an even number of rounds the digits are in their original positions.
    return digit * other_side + other


class Lookahead:
    """Row numbers of a source in shuffled epochs, computed ahead in blocks; thread-safe."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self._domain = domain(num_rows)
        self._seed = seed
        self._keys: tuple[int, list[Words]] = (-1, [])  # an epoch, and its keys
        # The epoch, the position of the first line in it, the distance from line to line, and the lines.
        self._block: tuple[int, int, int, Numbers] = (-1, 0, 1, np.empty((0, 0), np.intp))

    def lines(self, epoch: int, start: int, width: int, distance: int, least: int = 1) -> Numbers:
        cached_epoch, first, apart, block = self._block
        line, between = divmod(start - first, apart)
        is_known = (epoch, width, distance) == (cached_epoch, block.shape[1], apart)
        if not is_known or between or not 0 <= line <= len(block) - least:
            passed = (epoch - cached_epoch) * self._domain.n + start - first
            count = least
            if 0 <= passed <= len(block) * apart + least * distance:  # read in sequence, perhaps with gaps
                count = max(least, min(_LOOKAHEAD_ROWS // max(width, 1), (self._domain.n - start) // distance))
            drawn, keys = self._keys
            keys = keys if drawn == epoch else draw_keys(self._domain, self._seed, epoch)
            self._keys = (epoch, keys)
            positions = start + np.arange(0, count * distance, distance)[:, None] + np.arange(width)
            block = permute(self._domain, keys, positions.ravel()).reshape(count, width)
            self._block = (epoch, start, distance, block)
            line = 0
        return block[line:]

    def stream(self, start: int, count: int, shuffle: bool) -> RowNumbers:
        pieces: list[RowNumbers] = []
        while count or not pieces:  # a process may have no rows of a small remainder
            epoch, offset = divmod(start, self._domain.n)
            taken = min(count, self._domain.n - offset)
            rows = slice(offset, offset + taken)
            pieces.append(self.lines(epoch, offset, 1, 1, taken)[:taken, 0] if shuffle else rows)
            start += taken
            count -= taken
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([np.arange(p.start, p.stop) if isinstance(p, slice) else p for p in pieces])
