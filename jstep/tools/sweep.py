"""Many runs beside each other: the metric that ranks them, the options that vary, and groups that differ by a seed."""

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jstep.core.checks import format_list
from jstep.core.curves import COLORS, NEUTRAL, Numbers, thin
from jstep.stores.event_files import Series
from jstep.tools.run_files import RunFiles
from jstep.tools.run_summary import RunSummary
from jstep.tools.runs import differences_of, tree

_COLUMNS, _KNOTS = 100, 9
"""How many columns of a run's curves are kept, and how many points of its clock."""
_LEAST_NAMES = ("loss", "error", "perplexity")
"""Ends of the names of metrics that `KeepBest` minimizes by default."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A run of a page of many: what is shown of it, and nothing else of its files.

    Attributes:
        odd: What is odd, as sentences.
        series: Tag → steps and values, thinned once for all pictures.
        clock: Steps and the seconds since the first one.
        card: The card of its last start; None without a valid one.
        shares: The seconds of the parts of its time.
    """

    run: RunSummary
    name: str
    odd: Sequence[str]
    series: Mapping[str, tuple[Numbers, Numbers]]
    clock: Sequence[tuple[int, float]]
    card: Mapping[str, Any] | None
    shares: Mapping[str, float]
    goodput: float | None

    @classmethod
    def of(cls, run: RunSummary, name: str) -> "Row":
        left = RunFiles.of(run, name, 0)
        series = {tag: _thinned(points) for tag, points in left.series.items() if points.steps}
        total = left.part(None, left.total) if left.times else None
        longest = max(left.series.values(), key=lambda item: len(item.steps), default=None)
        return cls(
            run, name, left.odd(), series, _clock(longest),
            left.card if left.card and not left.is_damaged else None,
            {part: secs for part, secs in total.parts.items() if secs > 0} if total else {},
            total.fraction if total else run.goodput,
        )  # fmt: skip


def _thinned(series: Series) -> tuple[Numbers, Numbers]:
    steps, values = np.asarray(series.steps, np.int64), np.asarray(series.values, float)
    kept = thin(steps, values, _COLUMNS)
    return steps[kept], values[kept]


def _clock(series: Series | None) -> list[tuple[int, float]]:
    if series is None or len(series.steps) < 2:
        return []
    kept = np.unique(np.linspace(0, len(series.steps) - 1, _KNOTS).astype(int))
    seconds = np.maximum.accumulate(np.asarray(series.times)[kept] - series.times[0])
    return (
        [(series.steps[i], float(at)) for i, at in zip(kept, seconds, strict=True)]
        if np.isfinite(seconds).all()
        else []
    )


# The metric.


class Ranking(NamedTuple):
    """What runs are ranked by."""

    name: str
    is_max: bool

    def __str__(self) -> str:
        return f"{'greatest' if self.is_max else 'least'} {self.name}"

    @classmethod
    def of(cls, rows: Sequence[Row], name: str | None, mode: str | None) -> "Ranking":
        """The named metric, else that of a `KeepBest`, else the first one of an evaluation, else the loss."""
        there = dict.fromkeys(one for row in rows for one in (*row.run.metrics, *row.run.best, *row.series))
        if name is not None and name not in there:
            known = format_list(list(there), 30) or "none"
            raise ValueError(f"metric={name!r}: must be a metric of the runs; there are {known}")
        if name is None:
            kept = Counter(one for row in rows for one in row.run.best)
            prefixes = {prefix for row in rows for prefix in _evaluations(row.card)}
            first = (one for one in there if one.partition("/")[0] in prefixes or one.partition("/")[2] in there)
            name = kept.most_common(1)[0][0] if kept else next(first, "loss")
        return cls(name, {None: mode == "max", True: True, False: False}[_is_max(rows, name)])

    def best(self, row: Row) -> tuple[float, int] | None:
        """The best value of a run and its step, as `KeepBest` knows it, or of its points, or the last one."""
        value, at = row.run.best.get(self.name, (math.nan, 0))
        if math.isfinite(value):
            return value, at
        steps, values = row.series.get(self.name, (np.array([0]), np.array([math.nan])))
        if (finite := np.flatnonzero(np.isfinite(values))).size:
            found = finite[values[finite].argmax() if self.is_max else values[finite].argmin()]
            return float(values[found]), int(steps[found])
        last = row.run.metrics.get(self.name, math.nan)
        return (last, row.run.step) if math.isfinite(last) else None


def _evaluations(card: Mapping[str, Any] | None) -> list[str]:
    """The prefixes of the evaluations that a card names."""
    hooks = ((card or {}).get("arguments") or {}).get("hooks")
    named = [re.fullmatch(r"EvaluationHook\((.*)\)", str(hook)) for hook in (hooks if isinstance(hooks, list) else [])]
    return [match[1] for match in named if match]


def _is_max(rows: Sequence[Row], name: str) -> bool | None:
    """Whether `KeepBest` keeps the greatest value, by the values beside it; None if nothing is known."""
    above = below = 0
    for row in rows:
        best = row.run.best.get(name, (math.nan, 0))[0]
        others = np.r_[row.run.metrics.get(name, math.nan), row.series[name][1] if name in row.series else []]
        margin = 1e-6 * abs(best)
        above += int((best > others + margin).sum())
        below += int((best < others - margin).sum())
    if above == below:
        is_kept = any(name in row.run.best for row in rows)
        return False if is_kept and name.lower().endswith(_LEAST_NAMES) else None
    return above > below


# Options, and runs that differ by a seed.


class Option(NamedTuple):
    """An option that varies: its name on the page, its whole name, and the value of each run, None without one."""

    short: str
    name: str
    values: Sequence[Any]

    @property
    def is_number(self) -> bool:
        """Whether all of its values are finite numbers."""
        return all(is_number(value) for value in self.values if value is not None)


def is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 if isinstance(value, int) else math.isfinite(value)


def value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


_TAKEN = ("name", "status", "step", "at step", "range", "wall time", "goodput")
"""The heads of other columns."""


def options(differ: Mapping[str, Sequence[Any]]) -> list[Option]:
    """The options that vary, those of `config` first; of the others not hashes, nor what repeats an earlier one."""
    found: dict[str, list[str | None]] = {}
    for name in sorted(differ, key=lambda name: not name.startswith("config: ")):
        texts = [None if value is None else value_text(value) for value in differ[name]]
        is_known = any(
            all(text in (None, other) for text, other in zip(texts, others, strict=True)) for others in found.values()
        )
        if name.startswith("config: ") or not (name.endswith("hash") or is_known):
            found[name] = texts
    names = list(found)
    tails = {name: [part for part in re.split(r": |[\[\].]", name) if part] or [name] for name in names}
    short = {name: tail[-1] for name, tail in tails.items()}
    often = Counter(short.values())
    for name in names:
        if often[short[name]] > 1 or short[name] in _TAKEN:
            short[name] = name.partition(": ")[2] if name.startswith("config: ") else name
    return [Option(short[name], name, differ[name]) for name in names]


def is_seed(name: str) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return re.search(r"(?<![a-z])seeds?(?![a-z])", words) is not None


def seed_groups(rows: Sequence[Row], differ: Mapping[str, Sequence[Any]]) -> list[list[int]]:
    """Indices of runs, two or more, that have the same parent and differ in nothing but their seeds."""
    fixed = [values for name, values in differ.items() if not is_seed(name)]
    seeds = [values for name, values in differ.items() if is_seed(name)]
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if row.card is not None:
            same = json.dumps([row.run.parent, *[values[i] for values in fixed]], default=str)
            groups.setdefault(same, []).append(i)
    return [
        group for group in groups.values()
        if any(len({json.dumps(values[i], default=str) for i in group}) > 1 for values in seeds)
    ]  # fmt: skip


# All of it.


class Line(NamedTuple):
    """A line of the table: a run, or a group above its runs. `block` is the outermost group around it, -1 for none."""

    members: Sequence[int]
    is_group: bool
    depth: int
    block: int


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a page of many runs shows.

    Attributes:
        best: The best value of each run, and its step.
        colors: The color of each run: its place among the best ten, or `NEUTRAL`.
        differ: Name → the value of each run.
        groups: Runs that differ by a seed.
    """

    rows: Sequence[Row]
    metric: Ranking
    best: Sequence[tuple[float, int] | None]
    colors: Sequence[int]
    differ: Mapping[str, Sequence[Any]]
    options: Sequence[Option]
    groups: Sequence[Sequence[int]]

    @classmethod
    def of(cls, rows: Sequence[Row], name: str | None, mode: str | None) -> "Sweep":
        metric = Ranking.of(rows, name, mode)
        best = [metric.best(row) for row in rows]
        sign = -1.0 if metric.is_max else 1.0
        ranked = sorted(range(len(rows)), key=lambda i: math.inf if (of := best[i]) is None else sign * of[0])
        colors = [NEUTRAL] * len(rows)
        for place, i in enumerate(ranked[:COLORS]):
            colors[i] = place
        differ = differences_of([row.card for row in rows])
        return cls(rows, metric, best, colors, differ, options(differ), seed_groups(rows, differ))

    def ranked(self) -> list[int]:
        """The runs in color, from the best."""
        return sorted((i for i, color in enumerate(self.colors) if color != NEUTRAL), key=self.colors.__getitem__)

    def lines(self) -> list[Line]:
        """The lines of the table: branches below their parents, runs of a group below its line."""
        index = {id(row.run): i for i, row in enumerate(self.rows)}
        ordered = [(index[id(run)], depth) for _, run, depth in tree([row.run for row in self.rows])]
        places = {i: place for place, (i, _) in enumerate(ordered)}
        group_of = {i: (min(map(places.__getitem__, group)), group) for group in self.groups for i in group}
        above: list[tuple[tuple[int, ...], int, int]] = []  # of the ancestors: places, extra depth and block
        keyed: dict[tuple[int, ...], Line] = {}
        for i, depth in ordered:
            del above[depth:]
            key, extra, block = above[-1] if above else ((), 0, -1)
            if i in group_of:
                first, group = group_of[i]
                key, block = (*key, first), first if block < 0 else block
                keyed[key] = Line(group, True, depth + extra, block)
                extra += 1
            key = (*key, places[i])
            keyed[key] = Line([i], False, depth + extra, block)
            above.append((key, extra, block))
        return [keyed[key] for key in sorted(keyed)]
