"""Mixtures of sources: batches by step whose rows come from several sources, by weight."""

from collections.abc import Mapping
from typing import Any

from jstep.core.checks import as_bool, as_int, as_text, kind, shown
from jstep.core.staircase import Staircase, as_staircase
from jstep.data._merged import check_same_structure, merge
from jstep.data._mixed_rows import Mix, MixedRows, Stream, derived_seed
from jstep.data._processes import Share, given_process
from jstep.data._sizes import Run, Sizes, sizes_of
from jstep.data._steps import NO_END, Steps, count_of, steps_of
from jstep.data._weights import as_weights, counts_of
from jstep.data.sequence import BatchSequence
from jstep.data.sources import Rows, open_rows

_ROWS, _ORDER = 1, 2
"""What seeds are derived for."""


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
    """Batches by step whose rows come from several sources, in proportions that may change with the step.

    Batch N is a pure function of the seed and N, as those of `jstep.batches`. Rows come one after the
    other, each from one source, so that after T rows

        |rows from source s − ideal of s| ≤ (number of sources − 1) / 2

    at every T, in exact arithmetic; the ideal is the sum of weight of s / sum of weights over the rows.
    Counts never decrease, and changing weights or sizes from step M on leaves all batches before M
    bitwise as they were. A batch costs the same at any N.

    Each source has epochs and permutations of its own, without end. They depend on the seed and on the
    name of the source, so that they stay as they are when other sources come or go. The rows of a batch
    are in an order that depends on the seed and N, so that the part of each process is a sample of the
    mixture. The global batch does not depend on the number of processes.

    Args:
        sources: Name → what `jstep.batches` takes: an array, a tree of arrays, or an object with items.
            Batches of all have one structure; leaves have the same dtypes and shapes.
        batch_size: Rows of a batch, over all processes together; a number, or a mapping from step to
            number, such as `{0: 64, 1000: 128}`.
        weights: Name → weight for each source, or a mapping from step to such mappings. Weights need not
            sum to 1. 0 means no row, whatever the source is owed from the stages before.
        seed: Determines all orders; not negative.
        shuffle: Whether the rows of a source come in random order; otherwise they come as they lie, and
            are mixed with those of other sources all the same.
        process_index: This process's index; by default `jax.process_index()`, asked at the first
            batch.
        process_count: The number of processes, likewise.

    Returns:
        A `Mixture`: index it, slice it, `skip` batches, iterate over it, or start anywhere by
        `from_step(N)`. `rows_before(N)` is how many rows of each source came before batch N.

    Raises:
        ValueError: Sources differ in the structure, dtypes or shapes of batches; names of weights and
            sources differ; a weight is negative or not finite, or all are 0; or a number is out of range.
        TypeError: An argument is of another type; or a source has no length or cannot be indexed.

    Example:
        >>> import numpy as np, jstep
        >>> web, code = np.arange(100), -np.arange(1, 11)
        >>> weights = {0: {"web": 3, "code": 1}, 10: {"web": 1, "code": 1}}
        >>> mix = jstep.mixture({"web": web, "code": code}, batch_size=8, weights=weights)
        >>> int((mix[0] < 0).sum()), int((mix[10] < 0).sum())
        (2, 4)
        >>> mix.rows_before(1_000_000)
        {'web': 4000020, 'code': 3999980}

    Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980): sequences that keep to
        weights; the rule for one stage is Webster's.
    """
    rows = _open(sources)
    names = sorted(rows)
    stairs = as_staircase(batch_size, "batch_size", lambda value, name: as_int(value, name, 1))
    sizes = _sizes(stairs)
    stages = as_weights(weights, names)
    seed, shuffle = as_int(seed, "seed", 0), as_bool(shuffle, "shuffle")
    share = Share(stairs, given_process(process_index, process_count))
    streams = tuple(Stream(len(rows[name]), derived_seed(seed, _ROWS, name), shuffle) for name in names)
    mix = Mix(streams, sizes, counts_of(stages, sizes), share, derived_seed(seed, _ORDER), stages)
    return Mixture(mix, rows, seed, steps_of([range(NO_END)]))


def _open(sources: Any) -> dict[str, Rows]:
    if not isinstance(sources, Mapping):
        raise TypeError(f"sources={shown(sources)}: expected a mapping from name to source, got {kind(sources)}")
    if not sources:
        raise ValueError("sources={}: expected one source at least, got none")
    names = [as_text(name, "sources: a name") for name in sources]
    rows = {name: open_rows(sources[name], "sources", name) for name in names}
    # Two rows, for what takes a list of indices is told from what does not by them.
    check_same_structure({name: each.take(slice(0, min(2, len(each)))) for name, each in rows.items()})
    return rows


def _sizes(sizes: Staircase[int]) -> Sizes:
    runs, before = [], 0
    for first, stop, size in sizes.stages():
        run = Run(first, NO_END if stop is None else stop, size, 1, size, before)
        runs.append(run)
        before = run.before_step(run.stop)
    return sizes_of(runs)


class Mixture(BatchSequence):
    """What `mixture` returns: a sequence of batches by step, without end.

    Steps count from 0; negative ones do not count from the end but raise IndexError. A slice is again
    such a sequence, numbered from 0, whose batches are made when they are asked for. Iterators are
    independent of each other.
    """

    def __init__(self, mix: Mix, rows: dict[str, Rows], seed: int, steps: Steps) -> None:
        self._mix = mix
        self._rows = rows
        self._seed = seed
        super().__init__(mix.sizes, steps)

    def _reader(self) -> "Reader":
        return Reader(self._mix, self._rows)

    def _with(self, steps: Steps) -> "Mixture":
        return Mixture(self._mix, self._rows, self._seed, steps)

    def _rows_and_share(self) -> tuple[Rows, Share]:
        return next(iter(self._rows.values())), self._mix.share

    def _definition(self) -> dict[str, Any]:
        mix, names = self._mix, sorted(self._rows)
        weights = mix.weights.by_step(lambda of: dict(zip(names, map(float, of), strict=True)))
        return {
            "rows": self.num_rows,
            "batch_size": mix.share.sizes.by_step(),
            "weights": weights,
            "seed": self._seed,
            "shuffle": mix.streams[0].shuffle,
        }

    def __repr__(self) -> str:
        each = ", ".join(f"{name} ({count} rows)" for name, count in self.num_rows.items())
        order = "shuffled by" if self._mix.streams[0].shuffle else "in order, mixed by"
        return f"<Mixture of {shown(self.batch_size)} from {each}, {order} seed {self._seed}, {self._extent()}>"

    @property
    def num_rows(self) -> dict[str, int]:
        """The number of rows of each source."""
        return {name: len(rows) for name, rows in self._rows.items()}

    def rows_before(self, step: int) -> dict[str, int]:
        """How many rows of each source the batches before number `step` have, over all processes together.

        It costs the same for any step, but for a slice with a stride, whose steps are gone through.

        Args:
            step: A step, or the number of all steps. Batches that were skipped or sliced away are not counted.

        Raises:
            IndexError: `step` is negative or past the end.
        """
        total = dict.fromkeys(self._rows, 0)
        for _, part in self._steps.numbered(0, self._as_step(step, end=1)):
            stretches = [(min(part[0], part[-1]), count_of(part))] if abs(part.step) == 1 else ((s, 1) for s in part)
            for first, steps in stretches:
                ends = (self._mix.counts.at(self._sizes.before(at)) for at in (first, first + steps))
                for name, low, high in zip(sorted(total), *ends, strict=True):
                    total[name] += high - low
        return total


class Reader:
    """The batches of steps, for one reader."""

    def __init__(self, mix: Mix, rows: dict[str, Rows]) -> None:
        self._sources = [rows[name] for name in sorted(rows)]
        self._mixed = MixedRows(mix)

    def __call__(self, step: int) -> Any:
        """The batch of a step."""
        parts, indices = [], []
        for taken in self._mixed.of(step):
            parts.append(self._sources[taken.source].take(taken.rows))
            indices.append(taken.indices)
        return merge(parts, indices)
