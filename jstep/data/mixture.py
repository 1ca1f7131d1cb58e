"""Weighted mixtures of data sources, as batches by step."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jstep.core.checks import as_bool, as_int, as_text, kind, shown
from jstep.core.trees import leaves_with_paths, quoted, structure
from jstep.data import _permutation
from jstep.data._counts import Counts, Weights, as_weights, counts_of
from jstep.data._permutation import Lookahead, RowNumbers
from jstep.data._sizes import Run, Share, Sizes, given_process
from jstep.data._steps import NO_END, count_of, steps_of
from jstep.data.sequence import BatchSequence, SourceRows
from jstep.data.sources import Rows, open_rows
from jstep.data.staircase import Staircase, as_staircase

_ROWS, _ORDER = 1, 2
"""The purposes that seeds are derived for."""


def mixture(
    sources: Mapping[str, Any],
    batch_size: int | Mapping[int, int],
    weights: Mapping[str, float] | Mapping[int, Mapping[str, float]],
    seed: int = 0,
    shuffle: bool = True,
    *,
    process_index: int | None = None,
    process_count: int | None = None,
) -> "Mixture":
    """Batches by step that mix several sources in given proportions, which may change with the step.

    Batch N is a pure function of the seed and N, as with `jstep.batches`. The proportions hold throughout
    the run, not just on average: after the first T rows, for every T and in exact arithmetic,

        |rows from source s − ideal of s| ≤ (number of sources − 1) / 2

    where the ideal of s is the sum over these rows of (weight of s / sum of weights). Counts never
    decrease. Changing the weights or sizes from step M on leaves all batches before M bitwise unchanged.
    The cost of a batch does not depend on N.

    Each source has its own endless sequence of epochs and permutations. They depend only on the seed and
    the name of the source, so adding or removing other sources does not change them. The rows of a batch
    are shuffled by the seed and N, so the part of each process is a sample of the mixture. The global
    batch does not depend on the number of processes.

    Args:
        sources: Mapping from name to a source as in `jstep.batches`: an array, a tree of arrays, or an
            object with items. The rows of all sources must have the same structure, dtypes and shapes.
        batch_size: Global batch size, over all processes: a number, or a mapping from step to number,
            such as `{0: 64, 1000: 128}`.
        weights: Mapping from the name of each source to its weight, or from step to such mappings. Weights
            need not sum to 1. A source of weight 0 gives no rows, even if it is behind its ideal from
            earlier stages.
        seed: Determines all orders; must not be negative.
        shuffle: Whether to shuffle the rows of each source; otherwise they keep their order within the
            source, but batches are still mixed.
        process_index: The index of this process; by default `jax.process_index()`, which is called
            when the first batch is read.
        process_count: The number of processes; by default `jax.process_count()`, which is
            called when the first batch is read.

    Returns:
        A `Mixture`: index it, slice it, `skip` batches, iterate over it, or start anywhere by
        `from_step(N)`. `rows_before(N)` is the number of rows of each source before batch N.

    Raises:
        ValueError: Sources differ in the structure, dtypes or shapes of their rows; the names of weights
            and sources differ; a weight is negative or not finite, or all are 0; or a number is out of range.
        TypeError: An argument has the wrong type, or a source has no length or cannot be indexed.

    Example:
        >>> import numpy as np, jstep
        >>> web, code = np.arange(100), -np.arange(1, 11)
        >>> weights = {0: {"web": 3, "code": 1}, 10: {"web": 1, "code": 1}}
        >>> mix = jstep.mixture({"web": web, "code": code}, batch_size=8, weights=weights)
        >>> int((mix[0] < 0).sum()), int((mix[10] < 0).sum())
        (2, 4)
        >>> mix.rows_before(1_000_000)
        {'web': 4000020, 'code': 3999980}

    Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980), on sequences with given
        proportions; the rule within one stage is Webster's.
    """
    rows = _open(sources)
    names = sorted(rows)
    stairs = as_staircase(batch_size, "batch_size", lambda value, name: as_int(value, name, 1))
    sizes = _sizes(stairs)
    stages = as_weights(weights, names)
    seed, shuffle = as_int(seed, "seed", 0), as_bool(shuffle, "shuffle")
    share = Share(stairs, given_process(process_index, process_count))
    streams = tuple(_stream_of(len(rows[name]), seed, name, shuffle) for name in names)
    mix = _Mix(streams, sizes, counts_of(stages, sizes), share, seed, stages)
    return Mixture(mix, rows, steps_of([range(NO_END)]))


def _open(sources: Any) -> dict[str, Rows]:
    if not isinstance(sources, Mapping):
        raise TypeError(f"sources={shown(sources)}: expected a mapping from name to source, got {kind(sources)}")
    if not sources:
        raise ValueError("sources={}: expected at least one source, got none")
    names = [as_text(name, "sources: a name") for name in sources]
    rows = {name: open_rows(sources[name], "sources", name) for name in names}
    # Two rows, because they show whether `__getitem__` of a source takes a list of indices.
    _check_same_structure({name: each.take(slice(0, min(2, len(each)))) for name, each in rows.items()})
    return rows


def _check_same_structure(samples: Mapping[str, Any]) -> None:
    """Check that the rows of all sources fit into one batch.

    Args:
        samples: A batch of each source, by name.

    Raises:
        ValueError: The sources differ in structure, or a leaf in dtype or row shape.
    """
    (name, sample), *others = samples.items()
    first = dict(leaves_with_paths(sample))
    for other, batch in others:
        leaves = dict(leaves_with_paths(batch))
        for path in [*leaves, *first]:
            if path not in first or path not in leaves:
                has, lacks = (other, name) if path in leaves else (name, other)
                raise ValueError(
                    f"sources: expected batches of one structure, got a leaf at {quoted(path)} from {has!r} and none "
                    f"from {lacks!r}"
                )
            a, b = _described(leaves[path]), _described(first[path])
            if a != b:
                raise ValueError(
                    f"sources: expected batches of one dtype and shape, got {a} for a row of {quoted(path)} from "
                    f"{other!r} and {b} from {name!r}; cast, pad or crop them first"
                )
        if structure(batch) != structure(sample):
            raise ValueError(
                f"sources: expected batches of one structure, got {structure(batch)} from {other!r} and "
                f"{structure(sample)} from {name!r}"
            )


def _described(leaf: Any) -> str:
    dtype = "text" if getattr(leaf.dtype, "kind", "V") in "SU" else str(leaf.dtype)  # strings may differ in length
    return f"{dtype}{list(leaf.shape[1:])}"


def _sizes(sizes: Staircase[int]) -> Sizes:
    runs, before = [], 0
    for first, stop, size in sizes.stages():
        run = Run(first, NO_END if stop is None else stop, size, 1, size, before)
        runs.append(run)
        before = run.before_step(run.stop)
    return Sizes(tuple(runs))


class Mixture(BatchSequence):
    """An endless sequence of batches by step, as returned by `mixture`.

    Steps count from 0. A negative step does not count from the end but raises IndexError. A slice is a
    lazy sequence of the same kind, numbered from 0. Iterators are independent of each other.
    """

    def _definition(self) -> dict[str, Any]:
        return {"rows": self.num_rows, "seed": self._plan.seed, "shuffle": self._plan.streams[0].shuffle}

    def __repr__(self) -> str:
        each = ", ".join(f"{name} ({count} rows)" for name, count in self.num_rows.items())
        order = "shuffled by" if self._plan.streams[0].shuffle else "in order, mixed by"
        return f"<Mixture of {shown(self.batch_size)} from {each}, {order} seed {self._plan.seed}, {self._extent()}>"

    @property
    def num_rows(self) -> dict[str, int]:
        """The number of rows of each source."""
        return {name: len(rows) for name, rows in self._rows.items()}

    def rows_before(self, step: int) -> dict[str, int]:
        """Return the number of rows of each source in the batches before `step`, over all processes.

        The cost does not depend on the step, except for a slice with a stride, for which it is linear.

        Args:
            step: A step, or the total number of steps. Batches that were skipped or sliced away are not counted.

        Raises:
            IndexError: `step` is negative or past the end.
        """
        counts = self._counts_before(step)
        return {name: counts[name] for name in self._rows}


class _Stream(NamedTuple):
    """The endless sequence of rows of one source.

    Attributes:
        num_rows: The number of rows per epoch.
        seed: Determines the permutations, together with the epoch.
        shuffle: Whether the rows are permuted in each epoch.
    """

    num_rows: int
    seed: int
    shuffle: bool


class _Mix(NamedTuple):
    """The definition of a mixture, without the data of its sources.

    Attributes:
        streams: The stream of rows of each source.
        sizes: The number of rows of each batch.
        counts: The number of rows from each source among the first T rows.
        share: This process's share of a batch.
        seed: Determines the order within batches, together with the step, and the seeds of the streams.
        weights: The weights of the sources, by step.
    """

    streams: tuple[_Stream, ...]
    sizes: Sizes
    counts: Counts
    share: Share
    seed: int
    weights: Staircase[Weights]

    def reader(self, share: Share) -> "_Reader":
        """Return a function from step to the rows of a share of its batch."""
        return _Reader(self, share)

    def counts_of(self, steps: range) -> tuple[int, ...]:
        """Return the number of rows of each source in the batches of some steps; with a stride, step by step."""
        first = min(steps[0], steps[-1])
        stretches = [(first, first + count_of(steps))] if abs(steps.step) == 1 else ((one, one + 1) for one in steps)
        counts = (0,) * len(self.streams)
        for ends in stretches:
            low, high = (self.counts.at(self.sizes.before(step)) for step in ends)
            counts = tuple(count + b - a for count, a, b in zip(counts, low, high, strict=True))
        return counts


def _stream_of(num_rows: int, seed: int, name: str, shuffle: bool) -> _Stream:
    """Return the stream of a source, of the seed of a mixture."""
    return _Stream(num_rows, _derived_seed(seed, _ROWS, name), shuffle)


def _derived_seed(seed: int, purpose: int, name: str = "") -> int:
    """Return a seed for a purpose and a name, independent of other names and of their order."""
    sequence = np.random.SeedSequence(seed, spawn_key=(purpose, *name.encode("utf-8", "surrogatepass")))
    return sum(int(word) << (32 * i) for i, word in enumerate(sequence.generate_state(4)))


class _Reader:
    """A function from step to the rows of a share of its batch, for one iterator.

    Its state is a cache of pure functions that is replaced in one assignment, so threads may share it.
    """

    def __init__(self, mix: _Mix, share: Share) -> None:
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


def _stream_rows(stream: _Stream, ahead: Lookahead, start: int, count: int) -> RowNumbers:
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
