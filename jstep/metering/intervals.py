"""The sums of metrics over intervals of steps, on their way to the host."""

import math
import threading
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jstep.core.meshes import internal_transfers
from jstep.metering.device_sums import Columns
from jstep.metering.numbers import is_ready, read_value

SumsAndCounts = dict[str, tuple[float, float]]
"""Name of a metric → its sum and number of steps that have it; of a `mean_of`, total and count."""


def add_pair(sums: SumsAndCounts, name: str, total: float, count: float) -> None:
    old_total, old_count = sums.get(name, (0.0, 0.0))
    sums[name] = (old_total + total, old_count + count)


def merge_sums(
    earlier: Mapping[str, tuple[float, float]], later: Mapping[str, tuple[float, float]]
) -> SumsAndCounts:
    merged = dict(earlier)
    for name, (total, count) in later.items():
        add_pair(merged, name, total, count)
    return merged


class BadStep(NamedTuple):
    step: int
    loss: float


class HostSums(NamedTuple):
    """The sums over some steps, on the host.

    Attributes:
        last: The last of the steps.
        bad: The first step with a loss that is not finite, and that loss.
        bad_gradient_step: The first step with a gradient norm that is not finite.
        skip_limit_step: The step at which too many consecutive updates had been skipped.
    """

    last: int
    sums: SumsAndCounts
    bad: BadStep | None = None
    bad_gradient_step: int | None = None
    skip_limit_step: int | None = None

    def merge(self, later: "HostSums") -> "HostSums":
        # Steps are counted from 1, so that `or` never takes one for None.
        return HostSums(
            last=later.last,
            sums=merge_sums(self.sums, later.sums),
            bad=self.bad or later.bad,
            bad_gradient_step=self.bad_gradient_step or later.bad_gradient_step,
            skip_limit_step=self.skip_limit_step or later.skip_limit_step,
        )


class Piece(NamedTuple):
    """The sums over the steps in (first, last].

    Attributes:
        array: The sums on the device, as `columns` says; None if no metric was on the device.
        host_sums: The sums of metrics that were numbers of the host.
    """

    first: int
    last: int
    columns: Columns
    array: Any
    host_sums: SumsAndCounts

    def totals(self) -> HostSums:
        """Return the sums; waits until they have arrived."""
        if self.array is None:
            return HostSums(self.last, self.host_sums)
        with internal_transfers():
            array = read_value(self.array)
        columns = self.columns
        blocks = columns.split(array)
        column_sums: list[float] = []
        for total, error in zip(blocks.totals, blocks.errors, strict=True):
            column_sum = float(total)
            # The error of an infinite sum is ∞ − ∞ = NaN, which would make it NaN, too.
            if math.isfinite(total):
                column_sum += float(error)
            column_sums.append(column_sum)

        # One column for each metric, and then one for the count of each `mean_of`.
        num_metrics = len(columns.names)
        totals = column_sums[:num_metrics]
        ratio_counts = dict(zip(columns.ratio_names, column_sums[num_metrics:], strict=True))
        sums = dict(self.host_sums)
        for i, name in enumerate(columns.names):
            count = float(blocks.counts[i])
            if name in ratio_counts:
                # A `mean_of` is divided by its own count, and has no value without one.
                count = ratio_counts[name]
                if count == 0:
                    continue
            add_pair(sums, name, totals[i], count)

        watched = blocks.watched
        bad_step = self._as_step(watched.bad_step)
        return HostSums(
            last=self.last,
            sums=sums,
            bad=None if bad_step is None else BadStep(bad_step, float(watched.bad_loss)),
            bad_gradient_step=self._as_step(watched.bad_gradient_step),
            skip_limit_step=self._as_step(watched.skip_limit_step),
        )

    def _as_step(self, index: Any) -> int | None:
        """Return a step from its index in this piece; None for −1."""
        return None if index < 0 else self.first + 1 + int(index)


class Interval:
    """The sums of an interval between two log lines, perhaps only those of `mean_of`.

    It has several pieces if other hooks cut it, or if the run changed its program in between.
    """

    def __init__(self, *, ratios_only: bool = False) -> None:
        self.ratios_only = ratios_only
        self.names: dict[str, None] = {}  # an ordered set
        self._merged: HostSums | None = None
        self._pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        columns = piece.columns
        names = [*columns.names, *piece.host_sums]
        if self.ratios_only:
            names = columns.ratio_names
            if not names:
                return
        self._pieces.append(piece)
        self.names |= dict.fromkeys(names)
        # Merge pieces that have arrived, so that a long interval with many cuts keeps few arrays.
        while len(self._pieces) > 1 and is_ready([self._pieces[0].array]):
            self._merge_oldest()

    def _merge_oldest(self) -> None:
        totals = self._pieces.pop(0).totals()
        if self.ratios_only:
            ratios = {name: pair for name, pair in totals.sums.items() if name in self.names}
            totals = totals._replace(sums=ratios)
        self._merged = totals if self._merged is None else self._merged.merge(totals)

    def is_ready(self) -> bool:
        return is_ready(piece.array for piece in self._pieces)

    @property
    def totals(self) -> HostSums | None:
        """The sums, None if the interval has no step; waits until they have arrived."""
        while self._pieces:
            self._merge_oldest()
        return self._merged

    def means(self, names: Collection[str]) -> dict[str, float]:
        totals = self.totals
        means: dict[str, float] = {}
        if totals is None:
            return means
        for name in names:
            if name in totals.sums:
                total, count = totals.sums[name]
                means[name] = total / count if count else math.nan
        return means


class NewestRatios:
    """The value of each `mean_of` in the newest piece that has it, for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: deque[Piece] = deque()
        self._values: dict[str, float] = {}

    def add(self, piece: Piece) -> None:
        if not piece.columns.ratios:
            return
        self._pieces.append(piece)
        with self._lock:
            # Not only in `newest_values`: until then, each piece keeps an array on the device.
            self._take_arrived()

    def newest_values(self) -> dict[str, float]:
        """Return the newest values that have arrived, without waiting."""
        with self._lock:
            self._take_arrived()
            return dict(self._values)

    def _take_arrived(self) -> None:
        while self._pieces and is_ready([self._pieces[0].array]):
            piece = self._pieces.popleft()
            sums = piece.totals().sums
            for name in piece.columns.ratio_names:
                if name in sums:
                    total, count = sums[name]
                    self._values[name] = total / count
