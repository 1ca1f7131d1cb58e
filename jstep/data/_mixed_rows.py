"""The rows of each batch of a mixture."""

from typing import NamedTuple

import numpy as np

from jstep.core.staircase import Staircase
from jstep.data import _permutation
from jstep.data._counts import Counts, Weights
from jstep.data._permutation import Lookahead, RowNumbers
from jstep.data._sizes import Share, Sizes
from jstep.data._steps import count_of
from jstep.data.sequence import SourceRows

_ROWS, _ORDER = 1, 2
"""The purposes that seeds are derived for."""


class Stream(NamedTuple):
    """The endless sequence of rows of one source.

    Attributes:
        num_rows: The number of rows per epoch.
        seed: Determines the permutations, together with the epoch.
        shuffle: Whether the rows are permuted in each epoch.
    """

    num_rows: int
    seed: int
    shuffle: bool


class Mix(NamedTuple):
    """The definition of a mixture, without the data of its sources.

    Attributes:
        streams: The stream of rows of each source.
        sizes: The number of rows of each batch.
        counts: The number of rows from each source among the first T rows.
        share: This process's share of a batch.
        seed: Determines the order within batches, together with the step, and the seeds of the streams.
        weights: The weights of the sources, by step.
    """

    streams: tuple[Stream, ...]
    sizes: Sizes
    counts: Counts
    share: Share
    seed: int
    weights: Staircase[Weights]

    def reader(self, share: Share) -> "Reader":
        """Return a function from step to the rows of a share of its batch."""
        return Reader(self, share)

    def counts_of(self, steps: range) -> tuple[int, ...]:
        """Return the number of rows of each source in the batches of some steps; with a stride, step by step."""
        first = min(steps[0], steps[-1])
        stretches = [(first, first + count_of(steps))] if abs(steps.step) == 1 else ((one, one + 1) for one in steps)
        counts = (0,) * len(self.streams)
        for ends in stretches:
            low, high = (self.counts.at(self.sizes.before(step)) for step in ends)
            counts = tuple(count + b - a for count, a, b in zip(counts, low, high, strict=True))
        return counts


def stream_of(num_rows: int, seed: int, name: str, shuffle: bool) -> Stream:
    """Return the stream of a source, of the seed of a mixture."""
    return Stream(num_rows, _derived_seed(seed, _ROWS, name), shuffle)


def _derived_seed(seed: int, purpose: int, name: str = "") -> int:
    """Return a seed for a purpose and a name, independent of other names and of their order."""
    sequence = np.random.SeedSequence(seed, spawn_key=(purpose, *name.encode("utf-8", "surrogatepass")))
    return sum(int(word) << (32 * i) for i, word in enumerate(sequence.generate_state(4)))


class Reader:
    """A function from step to the rows of a share of its batch, for one iterator.

    Its state is a cache of pure functions that is replaced in one assignment, so threads may share it.
    """

    def __init__(self, mix: Mix, share: Share) -> None:
        self._mix, self._share, self._seed = mix, share, _derived_seed(mix.seed, _ORDER)
        self._ahead = [Lookahead(stream.num_rows, stream.seed) for stream in mix.streams]
        self._domain = _permutation.domain(mix.sizes.runs[0].size)
        self._counts: tuple[int, tuple[int, ...]] = (0, (0,) * len(mix.streams))

    def __call__(self, step: int) -> list[SourceRows]:
        """Return the rows of the batch of a step, source by source."""
        mix = self._mix
        before, size = mix.sizes.before(step), mix.sizes.at(step)
        known, first = self._counts
        if known != before:
            first = mix.counts.at(before)
        after = mix.counts.at(before + size)
        self._counts = (before + size, after)
        low, high = self._share.of(size)
        # Before mixing, the batch consists of the rows of the first source, then those of the second, and so on.
        ends = np.cumsum([b - a for a, b in zip(first, after, strict=True)])
        sources = np.searchsorted(ends, self._order(step, size), side="right")
        found = []
        for source in np.unique(sources[low:high]).tolist():
            indices = np.flatnonzero(sources[low:high] == source)
            # Mixing keeps the rows of a source in stream order, so those of a process are consecutive in the stream.
            start = first[source] + int(np.count_nonzero(sources[:low] == source))
            rows = _stream_rows(mix.streams[source], self._ahead[source], start, len(indices))
            found.append(SourceRows(source, indices, rows))
        return found

    def _order(self, step: int, size: int) -> _permutation.Rows:
        domain = self._domain
        if domain.n != size:
            self._domain = domain = _permutation.domain(size)
        return _permutation.permute(domain, _permutation.draw_keys(domain, self._seed, step), np.arange(size))


def _stream_rows(stream: Stream, ahead: Lookahead, start: int, count: int) -> RowNumbers:
    """Return `count` rows of a stream, from row `start` on."""
    pieces: list[RowNumbers] = []
    while count:
        epoch, offset = divmod(start, stream.num_rows)
        taken = min(count, stream.num_rows - offset)
        rows = slice(offset, offset + taken)
        pieces.append(ahead.lines(epoch, offset, 1, 1, taken)[:taken, 0] if stream.shuffle else rows)
        start, count = start + taken, count - taken
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate([np.arange(p.start, p.stop) if isinstance(p, slice) else p for p in pieces])
