"""The sources and row numbers of each batch of a mixture."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jstep.core.staircase import Staircase
from jstep.data import _permutation
from jstep.data._counts import Counts, Weights
from jstep.data._processes import Share
from jstep.data._sizes import Sizes
from jstep.data.sources import RowNumbers

# Row numbers to compute at once when batches are read in sequence, to amortize the overhead of NumPy calls.
_LOOKAHEAD_ROWS = 16384


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
        seed: Determines the order within batches, together with the step.
        weights: The weights of the sources, by step.
    """

    streams: tuple[Stream, ...]
    sizes: Sizes
    counts: Counts
    share: Share
    seed: int
    weights: Staircase[Weights]


class SourceRows(NamedTuple):
    """Rows of one source in a batch.

    Attributes:
        source: The index of the source.
        indices: Their indices in this process's part of the batch, ascending.
        rows: Their row numbers in the source.
    """

    source: int
    indices: _permutation.Rows
    rows: RowNumbers


def derived_seed(seed: int, purpose: int, name: str = "") -> int:
    """Return a seed for a purpose and a name, independent of other names and of their order."""
    sequence = np.random.SeedSequence(seed, spawn_key=(purpose, *name.encode("utf-8", "surrogatepass")))
    return sum(int(word) << (32 * i) for i, word in enumerate(sequence.generate_state(4)))


class MixedRows:
    """The rows of each step, for one iterator. Its state is a cache of pure functions, which threads may share."""

    def __init__(self, mix: Mix) -> None:
        self._mix = mix
        self._streams = [_StreamReader(stream) for stream in mix.streams]
        self._domain = _permutation.domain(mix.sizes.runs[0].size)
        self._counts: tuple[int, tuple[int, ...]] = (0, (0,) * len(mix.streams))

    def of(self, step: int) -> Iterator[SourceRows]:
        """Yield this process's rows in the batch of a step, source by source."""
        mix = self._mix
        before, size = mix.sizes.before(step), mix.sizes.at(step)
        known, first = self._counts
        if known != before:
            first = mix.counts.at(before)
        after = mix.counts.at(before + size)
        self._counts = (before + size, after)
        low, high = mix.share.of(size)
        # Before mixing, the batch consists of the rows of the first source, then those of the second, and so on.
        ends = np.cumsum([b - a for a, b in zip(first, after, strict=True)])
        sources = np.searchsorted(ends, self._order(step, size), side="right")
        for source in np.unique(sources[low:high]).tolist():
            indices = np.flatnonzero(sources[low:high] == source)
            # Mixing keeps the rows of a source in stream order, so those of a process are consecutive in the stream.
            start = first[source] + int(np.count_nonzero(sources[:low] == source))
            yield SourceRows(source, indices, self._streams[source].rows(start, len(indices)))

    def _order(self, step: int, size: int) -> _permutation.Rows:
        domain = self._domain
        if domain.n != size:
            self._domain = domain = _permutation.domain(size)
        return _permutation.permute(domain, _permutation.draw_keys(domain, self._mix.seed, step), np.arange(size))


class _StreamReader:
    """The row numbers of a source, computed ahead in blocks when they are read in sequence."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._domain = _permutation.domain(stream.num_rows)
        self._keys = _permutation.Keys(self._domain, stream.seed)
        # The epoch, the offset of the first row, the computed rows, and the offset after the last requested row.
        self._block = (-1, 0, np.empty(0, np.intp), 0)

    def rows(self, start: int, count: int) -> RowNumbers:
        """Return `count` rows of the stream, from row `start` on."""
        pieces: list[RowNumbers] = []
        while count:
            epoch, offset = divmod(start, self._stream.num_rows)
            taken = min(count, self._stream.num_rows - offset)
            pieces.append(self._of_epoch(epoch, offset, taken))
            start, count = start + taken, count - taken
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([np.arange(p.start, p.stop) if isinstance(p, slice) else p for p in pieces])

    def _of_epoch(self, epoch: int, offset: int, count: int) -> RowNumbers:
        if not self._stream.shuffle:
            return slice(offset, offset + count)
        known, first, block, end = self._block
        if known != epoch or not first <= offset <= offset + count <= first + len(block):
            # With several processes, the rows of the other processes are in between.
            is_sequential = known == epoch and 0 <= offset - end <= count
            made = min(_LOOKAHEAD_ROWS, self._stream.num_rows - offset) if is_sequential else count
            positions = np.arange(offset, offset + max(made, count))
            first, block = offset, _permutation.permute(self._domain, self._keys.of(epoch), positions)
        self._block = (epoch, first, block, offset + count)
        return block[offset - first : offset - first + count]
