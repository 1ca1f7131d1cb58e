"""The rows of a batch in closed form: sizes and weights by step, counts up to a step, and their permutation."""

import bisect
import dataclasses
import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np

from jstep.core.checks import as_int, as_number, kind, shown

# Piecewise constant functions of the step: values that change at given steps, `{0: 64, 1000: 128}`.

T = TypeVar("T")


class Stage(NamedTuple, Generic[T]):
    """A range of steps with the same value.

    Attributes:
        first: The first step.
        stop: The step after the last one; None for the last stage, which has no end.
        value: The value.
    """

    first: int
    stop: int | None
    value: T


@dataclasses.dataclass(frozen=True)
class Staircase(Generic[T]):
    """A piecewise constant function of the step.

    Attributes:
        firsts: The first step of each stage, ascending; the first is 0.
        values: The value of each stage.
    """

    firsts: tuple[int, ...]
    values: tuple[T, ...]

    def index(self, step: int) -> int:
        """Return the index of the stage that contains a step ≥ 0."""
        return bisect.bisect_right(self.firsts, step) - 1

    def at(self, step: int) -> T:
        """Return the value at a step ≥ 0."""
        return self.values[self.index(step)]

    def edge_after(self, step: int) -> int | None:
        """Return the first step of the next stage after `step`; None in the last stage."""
        following = self.index(step) + 1
        return self.firsts[following] if following < len(self.firsts) else None

    def stages(self) -> Iterator[Stage[T]]:
        """Yield the stages in order."""
        stops: tuple[int | None, ...] = (*self.firsts[1:], None)
        for first, stop, value in zip(self.firsts, stops, self.values, strict=True):
            yield Stage(first, stop, value)


def staircase(given: Mapping[Any, Any], argument: str, check: Callable[[Any, str], T]) -> Staircase[T]:
    """Convert a mapping from step to value to a staircase.

    Args:
        given: The user's mapping.
        argument: The name of the argument, for errors.
        check: `check(value, name)` returns the validated value, or raises an error that includes `name`.

    Raises:
        ValueError: The mapping is empty, has no step 0, or a negative step.
        TypeError: A step is not an integer.
    """
    if not given:
        raise ValueError(f"{argument}={{}}: expected a value for step 0 at least, as in {{0: …}}, got an empty mapping")
    found = {as_int(step, f"{argument}: a step", 0): step for step in given}
    if 0 not in found:
        raise ValueError(f"{argument}: expected a value for step 0, got values for the steps {shown(sorted(found))}")
    firsts = tuple(sorted(found))
    return Staircase(firsts, tuple(check(given[found[first]], f"{argument}[{first}]") for first in firsts))


def constant(value: T) -> Staircase[T]:
    """Return a staircase with a single value."""
    return Staircase((0,), (value,))


def as_staircase(given: Any, argument: str, check: Callable[[Any, str], T]) -> Staircase[T]:
    """As `staircase`; anything that is not a mapping is a constant value."""
    if isinstance(given, Mapping):
        return staircase(given, argument, check)
    return constant(check(given, argument))


# The steps of a batch sequence: all of them, a slice, or the rest after skips.

NO_END = 2**128
"""Sentinel for an endless sequence, larger than any step."""


class Steps:
    """The steps of a sequence, numbered from 0 in order.

    Args:
        parts: Consecutive ranges of steps.

    Attributes:
        parts: Those that are not empty.
        firsts: The number of the first step of each part.
        count: The number of steps; meaningless if the sequence is endless.
    """

    def __init__(self, parts: Iterable[range]) -> None:
        self.parts = tuple(filter(None, parts))
        *self.firsts, self.count = itertools.accumulate(map(count_of, self.parts), initial=0)

    @property
    def is_endless(self) -> bool:
        """Whether the sequence is endless."""
        return bool(self.parts) and self.parts[-1].step > 0 and self.parts[-1].stop >= NO_END

    def __getitem__(self, number: int) -> int:
        part = bisect.bisect_right(self.firsts, number) - 1
        return self.parts[part][number - self.firsts[part]]

    def sliced(self, given: slice) -> "Steps":
        """Return the steps of a slice with a non-negative start and stop."""
        numbers = range(self.count)[given]
        windows = list(zip(self.parts, self.firsts, strict=True))
        found = []
        for part, first in windows if numbers.step > 0 else reversed(windows):
            inner = within(numbers, first, first + count_of(part))
            start, stride = part.start + (inner.start - first) * part.step, part.step * inner.step
            found.append(range(start, start + count_of(inner) * stride, stride))
        return Steps(found)

    def skipped(self, start: int, stop: int) -> "Steps":
        """Return the steps without those numbered `start` up to `stop`."""
        return Steps([*self.sliced(slice(start)).parts, *self.sliced(slice(stop, None)).parts])

    def numbered(self, start: int, stop: int | None = None) -> Iterator[tuple[int, range]]:
        """Yield the ranges of steps numbered `start` up to `stop`, each with its first number."""
        for i in range(max(bisect.bisect_right(self.firsts, start) - 1, 0), len(self.parts)):
            first, part = self.firsts[i], self.parts[i]
            low = max(start - first, 0)
            high = count_of(part) if stop is None else min(stop - first, count_of(part))
            if high > low:
                yield first + low, part[low:high]

    def changes(self, stages: Iterable[tuple[int, int | None, T]]) -> dict[int, T]:
        """Return the values of stages by the step number from which they hold.

        Args:
            stages: The first step of each stage, the step after its last one or None for no end, and its value.
        """
        found: dict[int, T] = {}
        ascending, last = list(stages), None
        for number, part in self.numbered(0):
            for first, stop, value in ascending if part.step > 0 else reversed(ascending):
                inner = within(part, first, NO_END if stop is None else stop)
                if inner and value != last:
                    last = found[number + (inner.start - part.start) // part.step] = value
        return found


def count_of(numbers: range) -> int:
    """Return the length of a range; `len` fails for large ones."""
    return max(0, -((numbers.start - numbers.stop) // numbers.step))


def within(numbers: range, low: int, high: int) -> range:
    """Return the numbers of a range with low ≤ number < high, in their order."""
    start, stride = numbers.start, numbers.step
    # low ≤ start + stride·i < high holds for first ≤ i < last.
    if stride > 0:
        first, last = -((start - low) // stride), -((start - high) // stride)
    else:
        first, last = (start - high) // -stride + 1, (start - low) // -stride + 1
    return numbers[max(first, 0) : max(last, 0)]


# The number of rows of each batch, in closed form over runs of steps, and the share of each process.


class Run(NamedTuple):
    """Consecutive steps of one batch size, except for the last batch of each epoch.

    Attributes:
        first: The first step.
        stop: The step after the last.
        size: Rows per batch.
        period: Steps per epoch; the first epoch begins at `first`.
        last: Rows of the last batch of each epoch.
        before: Rows of all batches before `first`.
        epoch: The epoch of `first`, if the sequence has epochs.
        offset: The number of rows of that epoch that were used before.
    """

    first: int
    stop: int
    size: int
    period: int
    last: int
    before: int
    epoch: int = 0
    offset: int = 0

    def before_step(self, step: int) -> int:
        """Return the rows of all batches before a step of the run, or before its end."""
        steps = step - self.first
        return self.before + steps * self.size - steps // self.period * (self.size - self.last)

    def at(self, step: int) -> int:
        """Return the rows of the batch of a step."""
        return self.last if (step - self.first) % self.period == self.period - 1 else self.size

    def first_other(self, steps: range, size: int) -> int | None:
        """Return the first of some steps of the run whose batch has another size than `size`, or None."""
        if steps.step == 1:
            end_of_epoch = steps.start + (self.first - 1 - steps.start) % self.period
            candidates: Iterable[int] = (steps.start, steps.start + 1, end_of_epoch)
        else:
            candidates = steps[: self.period if self.last != self.size else 1]  # then sizes repeat
        return next((step for step in candidates if step in steps and self.at(step) != size), None)


_FIRST = operator.attrgetter("first")


class Sizes(NamedTuple):
    """The rows of each batch, as consecutive runs without gaps."""

    runs: tuple[Run, ...]

    def number_of(self, step: int) -> int:
        """Return the number of the run that contains a step; the last run for the step after the end."""
        return bisect.bisect_right(self.runs, step, key=_FIRST) - 1

    def run_of(self, step: int) -> Run:
        """Return the run that contains a step; the last run for the step after the end."""
        return self.runs[self.number_of(step)]

    def at(self, step: int) -> int:
        """Return the rows of the batch of a step."""
        return self.run_of(step).at(step)

    def before(self, step: int) -> int:
        """Return the rows of all batches before a step."""
        return self.run_of(step).before_step(step)

    def split(self, steps: range) -> Iterator[tuple[range, Run]]:
        """Split steps into ranges within one run each, in their order."""
        if not steps:
            return
        ends = self.number_of(steps[0]), self.number_of(steps[-1])
        for i in range(ends[0], ends[1] + 1) if steps.step > 0 else range(ends[0], ends[1] - 1, -1):
            inner = within(steps, self.runs[i].first, self.runs[i].stop)
            if inner:
                yield inner, self.runs[i]


class Share:
    """This process's share of each batch.

    Args:
        sizes: The batch size by step; each a multiple of the number of processes.
        process: The index of this process and the number of processes; None to query JAX at the first batch.

    Attributes:
        sizes: The batch size by step.

    Raises:
        ValueError: A size is not a multiple of the number of processes. With several stages, the message names
            the stage.
    """

    def __init__(self, sizes: Staircase[int], process: tuple[int, int] | None) -> None:
        if process:
            _check_divides(sizes, process[1])
        self.sizes, self._process = sizes, process

    def of(self, size: int) -> tuple[int, int]:
        """Return the first and the last (exclusive) of this process's rows in a batch of `size`."""
        if self._process is None:
            # Deferred, because this initializes JAX's backends, and jax.distributed must be initialized before.
            _check_divides(self.sizes, jax.process_count())
            self._process = (jax.process_index(), jax.process_count())
        index, count = self._process
        return index * size // count, (index + 1) * size // count


def _check_divides(sizes: Staircase[int], count: int) -> None:
    """Check that processes can share batches evenly."""
    for stage in sizes.stages():
        if stage.value % count:
            name = "batch_size" if len(sizes.values) == 1 else f"batch_size[{stage.first}]"
            raise ValueError(
                f"{name}={stage.value}: must be a multiple of {count}, the number of processes that share a batch"
            )


def given_process(index: Any, count: Any) -> tuple[int, int] | None:
    """Return the validated arguments `process_index` and `process_count`; None if both are None."""
    if index is None and count is None:
        return None
    if index is None or count is None:
        raise ValueError(f"process_index={index!r}, process_count={count!r}: give both of them, or neither")
    index, count = as_int(index, "process_index"), as_int(count, "process_count")
    if not 0 <= index < count:
        raise ValueError(f"process_index={index}: must be in range({count}), as process_count={count}")
    return index, count


# The weights of a mixture, and the number of rows that come from each source, in exact arithmetic.
#
# `counts` returns how many of the first T rows are from each source. Consider a stage that begins with counts c and
# ideals I, and whose weights w sum to 1. A fluid flows into the sources at one row per time unit. It first fills the
# sources that are furthest behind, measured by c - I, until they are level with the next, and then follows the weights:
#
#     F_s(t) = max(c_s, I_s + w_s·t + level(t)),   sum of F_s(t) = sum of c_s + t
#
# Row j of a source is due when F_s = j + 1/2, and rows are taken in the order in which they are due. Counts therefore
# never decrease and do not depend on later stages. The level never falls within a stage, because a waiting source is
# ahead of its ideal. It follows that the errors c - I of any k of n sources sum to at most k·(n - k)/2, for any weights
# and stages (levelling keeps the bound, and rounding adds at most b·(m - b)/2 for b of m sources that are level): a
# single source is never further than (n - 1)/2 from its ideal.

Weights = tuple[Fraction, ...]
"""The weight of each source; they sum to 1."""

_HALF = Fraction(1, 2)
_PRECISION = 2**128
"""Errors are carried from stage to stage in units of 1/_PRECISION row, which bounds the length of all numbers."""


class Phase(NamedTuple):
    """A period in which every source fills at a constant rate, with floor((offset + rate·t) / unit) rows at time t.

    Attributes:
        start: The time at which it begins, in rows since the stage began.
        unit: The common denominator of offsets and rates.
        offsets: The offset of each source.
        rates: The rate of each source; 0 for a waiting one.
    """

    start: Fraction
    unit: int
    offsets: tuple[int, ...]
    rates: tuple[int, ...]


class CountStage(NamedTuple):
    """A stage with constant weights.

    Attributes:
        first: The number of rows before the stage.
        phases: The phases of the stage.
        slack: The number of sources with a positive weight; rounding shifts rows by up to half of that.
    """

    first: int
    phases: tuple[Phase, ...]
    slack: int

    def counts(self, rows: int) -> tuple[int, ...]:
        """Return the number of rows from each source among the first `rows`."""
        # Twice a time at which at most `rows` rows are due: rounding up adds half a row for each source.
        twice = max(2 * (rows - self.first) - self.slack, 0)
        number = bisect.bisect_right(self.phases, Fraction(twice, 2), key=lambda phase: phase.start) - 1
        phase = self.phases[number]
        found = [
            (2 * offset + rate * twice) // (2 * phase.unit)
            for offset, rate in zip(phase.offsets, phase.rates, strict=True)
        ]
        missing = rows - sum(found)  # fewer than there are sources
        due = [(self._due(source, count, number), source) for source, count in enumerate(found)] if missing else []
        heapq.heapify(due)
        for _ in range(missing):
            source = due[0][1]  # of those that are due at the same time, the first
            found[source] += 1
            heapq.heapreplace(due, (self._due(source, found[source], number), source))
        return tuple(found)

    def _due(self, source: int, count: int, number: int) -> Fraction | float:
        """Return when row number `count` of a source is due, from a phase on; infinity if never."""
        for i, phase in enumerate(self.phases[number:], number + 1):
            if phase.rates[source]:
                time = Fraction((count + 1) * phase.unit - phase.offsets[source], phase.rates[source])
                if i == len(self.phases) or time <= self.phases[i].start:
                    return time
        return math.inf


class Counts:
    """The number of rows from each source among the first T rows.

    Args:
        stages: The number of rows before each stage, ascending from 0, and its weights.
    """

    def __init__(self, stages: Sequence[tuple[int, Weights]]) -> None:
        self._stages: list[CountStage] = []
        counts = (0,) * len(stages[0][1])
        ideals: list[Fraction] = [Fraction(0)] * len(counts)
        previous = stages[0]
        for first, weights in stages:
            if self._stages:
                grown = [i + w * (first - previous[0]) for i, w in zip(ideals, previous[1], strict=True)]
                counts = self._stages[-1].counts(first)
                errors = [round((c - i) * _PRECISION) for c, i in zip(counts, grown, strict=True)]
                ideals = [c - Fraction(e, _PRECISION) for c, e in zip(counts, errors, strict=True)]
            self._stages.append(CountStage(first, _phases(counts, ideals, weights), sum(w > 0 for w in weights)))
            previous = first, weights

    def at(self, rows: int) -> tuple[int, ...]:
        """Return the number of rows from each source among the first `rows`."""
        return self._stages[bisect.bisect_right(self._stages, rows, key=lambda stage: stage.first) - 1].counts(rows)


def _phases(counts: tuple[int, ...], ideals: list[Fraction], weights: Weights) -> tuple[Phase, ...]:
    excess = [c - i for c, i in zip(counts, ideals, strict=True)]
    waiting = {s for s, weight in enumerate(weights) if weight > 0}
    level, time = min(excess[s] for s in waiting), Fraction(0)
    filling: set[int] = set()
    found = []
    while True:
        filling |= {s for s in waiting if excess[s] - weights[s] * time <= level}
        waiting -= filling
        rise = (1 - sum(weights[s] for s in filling)) / Fraction(len(filling))
        at_zero = [
            (i + level - rise * time if s in filling else c) + _HALF
            for s, (c, i) in enumerate(zip(counts, ideals, strict=True))
        ]
        rates = [w + rise if s in filling else Fraction(0) for s, w in enumerate(weights)]
        unit = math.lcm(*(x.denominator for x in (*at_zero, *rates)))
        found.append(Phase(time, unit, tuple(int(x * unit) for x in at_zero), tuple(int(x * unit) for x in rates)))
        if not waiting:
            return tuple(found)
        # A waiting source has an excess of excess - weight·time, a filling one an excess of level.
        times = [(excess[s] - level + rise * time) / (weights[s] + rise) for s in waiting]
        level, time = level + rise * (min(times) - time), min(times)


def as_weights(given: Any, names: Sequence[str]) -> Staircase[Weights]:
    """Return the weights of each stage, normalized to sum to 1, in the order of `names`.

    Args:
        given: Name → weight, or step → such a mapping.
        names: The names of the sources.

    Raises:
        TypeError: `given` is not a mapping of numbers.
        ValueError: A name is missing or unknown, a weight is negative or not finite, or all are 0.
    """
    known = set(names)

    def check(value: Any, argument: str) -> Weights:
        if not isinstance(value, Mapping):
            raise TypeError(
                f"{argument}={shown(value)}: expected a mapping from the name of each source to its weight, got "
                f"{kind(value)}"
            )
        missing = [name for name in names if name not in value]
        unknown = [name for name in value if name not in known]
        if missing or unknown:
            found = [f"none for {shown(missing)}"] * bool(missing) + [f"one for {shown(unknown)}"] * bool(unknown)
            raise ValueError(
                f"{argument}={shown(value)}: expected a weight for each of the sources {shown(list(names))}, got "
                f"{' and '.join(found)}; a source that gives no rows has the weight 0"
            )
        exact = [Fraction(as_number(value[name], f"{argument}[{name!r}]", low=0)) for name in names]
        if not any(exact):
            raise ValueError(f"{argument}={shown(value)}: expected a weight above 0 for at least one source, got none")
        total = sum(exact)
        return tuple(weight / total for weight in exact)

    if isinstance(given, Mapping) and any(not isinstance(k, str) or isinstance(v, Mapping) for k, v in given.items()):
        return staircase(given, "weights", check)
    return constant(check(given, "weights"))


def counts_of(weights: Staircase[Weights], sizes: Sizes) -> Counts:
    """Return the counts of rows from each source, for weights that change at given steps."""
    # A stage with the same weights as the previous one continues its order.
    stages: list[tuple[int, Weights]] = []
    for first, _, value in weights.stages():
        if not stages or stages[-1][1] != value:
            stages.append((sizes.before(first), value))
    return Counts(stages)


# Shuffling without a stored permutation: a keyed bijection of range(n).
#
# `permute` evaluates one permutation of `range(n)` at any positions, in time and memory proportional to
# the number of positions. It is a Feistel network over the digits (left, right) of a number in base
# `width`, that is, over `height · width ≥ n` numbers. An output of n or above is fed back in until it is
# below n, which preserves the bijection ("cycle walking": Black and Rogaway, "Ciphers with arbitrary
# finite domains", 2002, method 2 and their generalized Feistel network). The sides are chosen such that
# this is rarely needed.
#
# A round adds to one digit a hash of the other: multiply-shift, mixed once more, with the keys of that
# round. It is not a cipher, but passes as a random permutation in the statistics of
# tests/test_permutation.

Words: TypeAlias = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]
Rows: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]
RowNumbers: TypeAlias = Rows | slice
"""Row numbers in any order, or a contiguous range of them."""

# With sides below 2**12, 32-bit words hash each digit evenly to 16 bits, and are twice as fast.
_MAX_32 = 2**24
# A digit with few values has few functions, so small domains need more rounds to mix.
_SMALL, _SMALL_ROUNDS, _ROUNDS = 1024, 12, 6
# Row numbers to compute at once when they are read in sequence, to amortize the overhead of NumPy calls.
_LOOKAHEAD_ROWS = 16384


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


class Lookahead:
    """Row numbers of a source in shuffled epochs, computed ahead in blocks when they are read in sequence.

    Its state is a cache of pure functions that is replaced in one assignment, so threads may share it.

    Args:
        num_rows: The number of rows of an epoch.
        seed: Determines the permutations, together with the epoch.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        self._domain = domain(num_rows)
        self._seed = seed
        self._keys: tuple[int, list[Words]] = (-1, [])  # an epoch, and its keys
        # The epoch, the position of the first line in it, the distance from line to line, and the lines.
        self._block: tuple[int, int, int, Rows] = (-1, 0, 1, np.empty((0, 0), np.intp))

    def lines(self, epoch: int, start: int, width: int, distance: int, least: int = 1) -> Rows:
        """Return the row numbers at positions of an epoch, as lines of an array.

        Args:
            epoch: The epoch.
            start: The position at which the first line begins.
            width: The number of positions in a line.
            distance: The distance from the beginning of a line to the next, for the rows of other processes.
            least: The number of lines that are needed; there may be more.
        """
        known, first, apart, block = self._block
        line, between = divmod(start - first, apart)
        is_known = (epoch, width, distance) == (known, block.shape[1], apart)
        if not is_known or between or not 0 <= line <= len(block) - least:
            passed = (epoch - known) * self._domain.n + start - first
            count = least
            if 0 <= passed <= len(block) * apart + least * distance:  # read in sequence, perhaps with gaps
                count = max(least, min(_LOOKAHEAD_ROWS // max(width, 1), (self._domain.n - start) // distance))
            drawn, keys = self._keys
            keys = keys if drawn == epoch else draw_keys(self._domain, self._seed, epoch)
            self._keys = (epoch, keys)
            positions = start + np.arange(0, count * distance, distance)[:, None] + np.arange(width)
            block = permute(self._domain, keys, positions.ravel()).reshape(count, width)
            self._block, line = (epoch, start, distance, block), 0
        return block[line:]

    def stream(self, start: int, count: int, shuffle: bool) -> RowNumbers:
        """Return `count` rows of the endless sequence of epochs, from row `start` on; in order without `shuffle`."""
        pieces: list[RowNumbers] = []
        while count:
            epoch, offset = divmod(start, self._domain.n)
            taken = min(count, self._domain.n - offset)
            rows = slice(offset, offset + taken)
            pieces.append(self.lines(epoch, offset, 1, 1, taken)[:taken, 0] if shuffle else rows)
            start, count = start + taken, count - taken
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([np.arange(p.start, p.stop) if isinstance(p, slice) else p for p in pieces])
