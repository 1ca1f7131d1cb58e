"""Shuffling without a stored permutation: a keyed bijection of range(n).

`permute` evaluates one permutation of `range(n)` at any positions. It is a Feistel network over the
digits (left, right) of a number in base `width`, over `height · width ≥ n` numbers. An output of n
or above is fed back in until it is below n ("cycle walking": Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002).

A round adds to one digit a hash of the other: multiply-shift, mixed once more, with the keys of
that round. It is not a cipher; `tests/data/test_permutation.py` has its statistics.
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
# Row numbers to compute in one call when they are read in sequence, to amortize NumPy's overhead.
_LOOKAHEAD_ROWS = 16384


class Domain(NamedTuple):
    """The key-independent parameters of a network on range(n), as 0-d arrays, fastest for ufuncs.

    Attributes:
        rounds: The number of rounds, which is even.
        dtype: The kind of the words that it computes with.
        height: The number of values of the left digit.
        width: The number of values of the right digit.
        half: Half the bits of a word.
        shift: The shift of the hash.
        mixer: The odd number by which the hash multiplies.
    """

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
    dtype: type[np.unsignedinteger[Any]]
    if n <= _MAX_32:
        dtype = np.uint32
        half = 16
        mixer = 0x9E3779B1
    else:
        dtype = np.uint64
        half = 32
        mixer = 0x9E3779B97F4A7C15
    return Domain(
        n,
        rounds=_SMALL_ROUNDS if n < _SMALL else _ROUNDS,
        dtype=dtype,
        height=np.array(height, dtype),
        width=np.array(_width(n, height), dtype),
        half=np.array(half, dtype),
        shift=np.array(half - 1, dtype),
        mixer=np.array(mixer, dtype),
    )


def _width(n: int, height: int) -> int:
    return max(-(-n // height), min(n, 2))


def draw_keys(domain: Domain, seed: int, stream: int) -> list[Words]:
    """Return the keys of permutation number `stream` of a seed: a pair for each round."""
    sequence = np.random.SeedSequence(seed, spawn_key=(stream,))
    keys = sequence.generate_state(2 * domain.rounds, domain.dtype)
    keys[::2] |= domain.dtype(1)  # multipliers are odd
    return [keys[i : i + 1].reshape(()) for i in range(keys.size)]


def permute(
    domain: Domain, keys: list[Words], positions: Numbers, *, inverse: bool = False
) -> Numbers:
    """Return the numbers at positions of a permutation of range(n), or positions of numbers."""
    numbers = _encipher(domain, keys, positions.astype(domain.dtype), inverse)
    indices = np.flatnonzero(numbers >= domain.n)
    while indices.size:
        numbers[indices] = _encipher(domain, keys, numbers[indices], inverse)
        indices = indices[numbers[indices] >= domain.n]
    return numbers.astype(np.intp)


def position_in_epoch(num_rows: int, seed: int, epoch: int, row: int) -> int:
    """Return the position of a row in a shuffled epoch."""
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


class _Block(NamedTuple):
    """Lines of row numbers, computed together.

    Attributes:
        start: The position of the first line in the epoch.
        distance: The distance from line to line, in positions.
    """

    epoch: int
    start: int
    distance: int
    lines: Numbers

    def line_of(self, epoch: int, start: int, width: int, distance: int) -> int | None:
        """Return the number of the block's line that begins at a position; None if none does."""
        if (epoch, width, distance) != (self.epoch, self.lines.shape[1], self.distance):
            return None
        line, offset = divmod(start - self.start, self.distance)
        if offset != 0 or line < 0:
            return None
        return line


class Lookahead:
    """Row numbers of a source in shuffled epochs, computed ahead in blocks when read in sequence.

    Its caches are replaced in one assignment, so threads may share it.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        self._domain = domain(num_rows)
        self._seed = seed
        self._keys: tuple[int, list[Words]] = (-1, [])  # an epoch, and its keys
        self._block = _Block(-1, 0, 1, np.empty((0, 0), np.intp))

    def lines(self, epoch: int, start: int, width: int, distance: int, least: int = 1) -> Numbers:
        """Return `least` or more lines of `width` row numbers from `start`, `distance` apart.

        Other processes have the rows in between.
        """
        block = self._block
        line = block.line_of(epoch, start, width, distance)
        if line is not None and line + least <= len(block.lines):
            return block.lines[line:]
        count = least
        # Read in sequence if the position is in the block, or not far behind its end.
        from_start = (epoch - block.epoch) * self._domain.n + start - block.start
        if 0 <= from_start <= len(block.lines) * block.distance + least * distance:
            lines_left = (self._domain.n - start) // distance
            count = max(least, min(_LOOKAHEAD_ROWS // max(width, 1), lines_left))
        positions = start + np.arange(0, count * distance, distance)[:, None] + np.arange(width)
        lines = permute(self._domain, self._keys_of(epoch), positions.ravel()).reshape(count, width)
        self._block = _Block(epoch, start, distance, lines)
        return lines

    def _keys_of(self, epoch: int) -> list[Words]:
        drawn_epoch, keys = self._keys
        if drawn_epoch != epoch:
            keys = draw_keys(self._domain, self._seed, epoch)
            self._keys = (epoch, keys)
        return keys

    def stream(self, start: int, count: int, shuffle: bool) -> RowNumbers:
        """Return `count` row numbers from a position in the endless stream of epochs."""
        pieces: list[RowNumbers] = []
        while count or not pieces:  # a process may have no rows of a small remainder
            epoch, offset = divmod(start, self._domain.n)
            taken = min(count, self._domain.n - offset)
            if shuffle:
                pieces.append(self.lines(epoch, offset, 1, 1, taken)[:taken, 0])
            else:
                pieces.append(slice(offset, offset + taken))
            start += taken
            count -= taken
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(
            [np.arange(p.start, p.stop) if isinstance(p, slice) else p for p in pieces]
        )
