"""Which rows of which sources make up the batch of a step of a mixture, without the sources."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jstep.core.staircase import Staircase
from jstep.data import _permutation
from jstep.data._counts import Counts, Weights
from jstep.data._processes import Share
from jstep.data._sizes import Sizes
from jstep.data.sources import RowNumbers

# Row numbers made at once where batches follow each other, which hides the cost of NumPy's calls.
_LOOKAHEAD_ROWS = 16384


class Stream(NamedTuple):
    """The rows of one source, epoch after epoch.

    Attributes:
        num_rows: The rows of an epoch.
        seed: Determines their order, with the epoch.
        shuffle: Whether they have one of their own in each epoch.
    """

    num_rows: int
    seed: int
    shuffle: bool


class Mix(NamedTuple):
    """What a mixture is, but for its sources.

    Attributes:
        streams: The rows of each source.
        sizes: The rows of each batch.
        counts: The rows from each source among the first so many.
        share: This process's part of a batch.
        seed: Determines the order within batches, with the step.
        weights: What the counts follow, by step.
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
        source: The number of the source.
        indices: Where they are in this process's part of the batch, ascending.
        rows: Their numbers.
    """

    source: int
    indices: _permutation.Rows
    rows: RowNumbers


def derived_seed(seed: int, purpose: int, name: str = "") -> int:
    """A seed that depends on a purpose and a name, but on no other name and no order."""
    sequence = np.random.SeedSequence(seed, spawn_key=(purpose, *name.encode("utf-8", "surrogatepass")))
    return sum(int(word) << (32 * i) for i, word in enumerate(sequence.generate_state(4)))


class MixedRows:
    """The rows of steps, for one reader. What it keeps are caches of pure functions, which threads may share."""

    def __init__(self, mix: Mix) -> None:
        self._mix = mix
        self._streams = [_StreamReader(stream) for stream in mix.streams]
        self._domain = _permutation.domain(mix.sizes.runs[0].size)
        self._counts: tuple[int, tuple[int, ...]] = (0, (0,) * len(mix.streams))

    def of(self, step: int) -> Iterator[SourceRows]:
        """The rows of this process in the batch of a step, source by source."""
        mix = self._mix
        before, size = mix.sizes.before(step), mix.sizes.at(step)
        known, first = self._counts
        if known != before:
            first = mix.counts.at(before)
        after = mix.counts.at(before + size)
        self._counts = (before + size, after)
        low, high = mix.share.of(size)
        # The batch, were it not mixed, has the rows of one source after those of another.
        ends = np.cumsum([b - a for a, b in zip(first, after, strict=True)])
        sources = np.searchsorted(ends, self._order(step, size), side="right")
        for source in np.unique(sources[low:high]).tolist():
            indices = np.flatnonzero(sources[low:high] == source)
            # In their places, rows are in the order of the stream: those of a process are a stretch of it.
            start = first[source] + int(np.count_nonzero(sources[:low] == source))
            yield SourceRows(source, indices, self._streams[source].rows(start, len(indices)))

    def _order(self, step: int, size: int) -> _permutation.Rows:
        domain = self._domain
        if domain.n != size:
            self._domain = domain = _permutation.domain(size)
        return _permutation.permute(domain, _permutation.draw_keys(domain, self._mix.seed, step), np.arange(size))


class _StreamReader:
    """The rows of a source; a reader that goes on where it was has them made in advance."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._domain = _permutation.domain(stream.num_rows)
        self._keys = _permutation.Keys(self._domain, stream.seed)
        # The epoch, the offset of the first row, those made, and the offset after the last one asked for.
        self._block = (-1, 0, np.empty(0, np.intp), 0)

    def rows(self, start: int, count: int) -> RowNumbers:
        """Rows of the stream from number `start` on."""
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
        known, first, block, asked = self._block
        if known != epoch or not first <= offset <= offset + count <= first + len(block):
            # On several processes the rows of the others lie in between.
            goes_on = known == epoch and 0 <= offset - asked <= count
            made = min(_LOOKAHEAD_ROWS, self._stream.num_rows - offset) if goes_on else count
            positions = np.arange(offset, offset + max(made, count))
            first, block = offset, _permutation.permute(self._domain, self._keys.of(epoch), positions)
        self._block = (epoch, first, block, offset + count)
        return block[offset - first : offset - first + count]
