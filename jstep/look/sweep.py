"""What a page shows of runs: the files of each, the metric that ranks them, the options that vary, groups by seed."""

import dataclasses
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jstep.checkpoint.listing import possible_checkpoints
from jstep.core.checks import format_list, truncate
from jstep.core.drawing import COLORS, NEUTRAL, Mark, Numbers, thin
from jstep.look.cli import utc_text
from jstep.look.goodput import part_changes
from jstep.look.run_folder import RunFolder, run_folder, state_change_lines
from jstep.look.run_summary import RunSummary
from jstep.look.runs import differences_of, tree
from jstep.record.differences import SECTIONS, values_of
from jstep.record.stall_files import missing_threads, read_stalls
from jstep.stores.event_files import Series
from jstep.stores.urls import is_url

# The files of a run: its starts, its scalars, and what is odd about them.

_SKIPPED = "skipped"
"""The metric of a skipped update, as `training.metrics` names it, which imports JAX."""
_MAX_TAGS = 1000
"""How many scalars of a run are shown."""

Points = tuple[Numbers, Numbers]
"""Steps and values."""


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """What is shown of a run.

    Attributes:
        odd: What is odd, as sentences; also why some files are not shown.
        series: Tag → points, thinned.
        rewound: Tag → points that a later start made again.
    """

    run: RunSummary
    name: str
    folder: RunFolder
    odd: Sequence[str] = ()
    series: Mapping[str, Points] = dataclasses.field(default_factory=dict)
    rewound: Mapping[str, Sequence[Points]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, run: RunSummary, name: str, columns: int) -> "RunFiles":
        """Read the files of a run; whatever they hold, this raises nothing."""
        folder = RunFolder(run.path, run.prefix, ())
        if run.error is not None:
            return cls(run, name, folder, [run.error])
        problems = list[str]()
        series = dict[str, Series]()
        try:
            folder = run_folder(run.path, run.prefix)
            problems += folder.unreadable_starts
            problems += _oddities(run, folder)
            problems += folder.event_files[1]
            series = folder.series(lambda error: problems.append(f"{error}; what follows is not shown"))
            problems += [*_not_finite(series), *_skipped(series)]
        except Exception as error:
            is_plain = isinstance(error, OSError | ImportError | ValueError)
            problems.append(truncate(str(error) if is_plain else f"a file of it cannot be shown: {error!r}", 300))
        if len(series) > _MAX_TAGS:
            problems.append(f"it has {len(series)} scalars; the first {_MAX_TAGS} are shown")
        some = {tag: points for tag, points in itertools.islice(series.items(), _MAX_TAGS) if points.steps}
        return cls(
            run,
            name,
            folder,
            odd=list(dict.fromkeys(problems)),
            series={tag: _thinned(points.steps, points.values, columns) for tag, points in some.items()},
            rewound={tag: [_thinned(*old, columns) for old in points.rewound] for tag, points in some.items()},
        )

    def marks(self) -> list[Mark]:
        spans = [start["step"] for start in self.folder.valid_starts if start["step"]]
        marks = [Mark("start", first, f"start from step {first}") for first, _ in spans if first]
        stages = (self.folder.trained_with_card.get("card") or {}).get("stages") or {}
        known = {int(at): name for at, name in stages.items() if at.isdecimal() and len(at) < 19}
        marks += [Mark("stage", at, f"stage {name}") for at, name in known.items() if at]
        saves = [] if is_url(self.run.path) else possible_checkpoints(self.run.path, self.run.prefix)
        steps = [save[0] for save in saves if save[1]]
        return [*marks, *(Mark("checkpoint", step, f"checkpoint {step}") for step in steps)]


def _thinned(steps: Sequence[int], values: Sequence[float], columns: int) -> Points:
    x, y = np.asarray(steps, np.int64), np.asarray(values, float)
    kept = thin(x, y, columns)
    return x[kept], y[kept]


def _oddities(run: RunSummary, folder: RunFolder) -> Iterator[str]:
    if run.status not in ("finished", "running"):
        yield f"it is {run.status}: {run.reason}".rstrip(": ")
    if (refused := run.refused) is not None:
        what = f"{refused['status']}: {refused['reason']}".rstrip(": ")
        yield f"the start that ended {utc_text(refused['time'])} took no step: {what}"
    for stall in (stall for start in folder.valid_starts for stall in start["stalls"]):
        seconds, what = stall.get("stalled"), truncate(str(stall.get("what")), 200)
        yield f"process {stall.get('process')} stalled for {seconds} s at step {stall.get('step')}: {what}"
    ended, _ = read_stalls(run.path, run.prefix, ended=True)
    for waiting in (process for process in ended if process["stall"]):
        yield f"before it ended, process {waiting['process']} was {truncate(waiting['what'], 200)}: {waiting['line']}"
    yield from missing_threads(ended)
    spans = [start["step"] for start in folder.valid_starts if start["step"]]
    for earlier, later in itertools.pairwise(spans):
        if later[0] < earlier[1]:
            yield f"steps {later[0]} to {earlier[1]} were made again by a later start"
    yield from part_changes(folder.valid_starts)
    for start in folder.facts_with_changes:
        for line in state_change_lines(start):
            yield f"its state was {truncate(line, 300)} (start {start['number']})"
        for change in start["changes"] or ():
            yield f"changed before the start of {utc_text(start['began'])}: {truncate(change, 300)}"


def _not_finite(series: Mapping[str, Series]) -> Iterator[str]:
    for tag, points in series.items():
        bad = np.flatnonzero(~np.isfinite(points.values))
        if bad.size:
            count, first = len(points.steps), points.steps[bad[0]]
            yield f"{tag} is not finite at {bad.size} of {count} points, first at step {first}"


def _skipped(series: Mapping[str, Series]) -> Iterator[str]:
    """Name the step since which all updates are skipped, unless it is the loss scale's."""
    points = series.get(_SKIPPED)
    streak = [] if points is None else list(itertools.takewhile(lambda value: value == 1, reversed(points.values)))
    if points is not None and len(streak) > 1:
        first = points.steps[-len(streak)]
        yield f"all {len(streak)} logged updates from step {first} on were skipped, as they were not finite"


# The metric.


class Ranking(NamedTuple):
    """The metric by which runs are ranked, and whether its largest or its smallest value is the best."""

    name: str
    is_max: bool

    def __str__(self) -> str:
        return f"{'greatest' if self.is_max else 'least'} {self.name}"

    @classmethod
    def of(cls, rows: Sequence[RunFiles], name: str | None, mode: str | None) -> "Ranking":
        """The named metric, else that of a `KeepBest`, else the first one of an evaluation, else the loss."""
        names = dict.fromkeys(tag for row in rows for tag in (*row.run.metrics, *row.run.best, *row.series))
        if name is not None and name not in names:
            known = format_list(list(names), 30) or "none"
            raise ValueError(f"metric={name!r}: must be a metric of the runs; there are {known}")
        if name is None:
            kept = Counter(tag for row in rows for tag in row.run.best)
            prefixes = {prefix for row in rows for prefix in _evaluations(row.folder.trained_with_card)}
            first = (tag for tag in names if tag.partition("/")[0] in prefixes or tag.partition("/")[2] in names)
            name = kept.most_common(1)[0][0] if kept else next(first, "loss")
        return cls(name, {None: mode == "max", True: True, False: False}[_is_max(rows, name)])

    def best(self, row: RunFiles) -> tuple[float, int] | None:
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


def _evaluations(start: Mapping[str, Any]) -> list[str]:
    hooks = ((start.get("card") or {}).get("arguments") or {}).get("hooks")
    named = [re.fullmatch(r"EvaluationHook\((.*)\)", str(hook)) for hook in (hooks if isinstance(hooks, list) else [])]
    return [match[1] for match in named if match]


def _is_max(rows: Sequence[RunFiles], name: str) -> bool | None:
    """Whether a `KeepBest` keeps the greatest value; None if there is none."""
    modes = [start["kept"][name]["mode"] for row in rows for start in row.folder.valid_starts if name in start["kept"]]
    return next((mode == "max" for mode in reversed(modes) if mode is not None), None)


# Options, and runs that differ by a seed.


def is_finite_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # type: ignore[arg-type]


def value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def options(rows: Sequence[RunFiles], differ: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Short name → the values of an option of configs that varies; where no run has a config, of a hyperparameter."""
    names = [name for name in differ if name.startswith(SECTIONS["config"])]
    if not any(row.run.config for row in rows):
        cards = (row.folder.trained_with_card for row in rows)
        every = [item for start in cards if start for item in values_of(start).items()]
        numbers = {name for name, (section, value) in every if section == "programs" and is_finite_number(value)}
        names = [name for name in differ if name in numbers]
    paths = [name.removeprefix(SECTIONS["config"]) for name in names]
    last = [path.rpartition("/")[2] for path in paths]
    short = [key if last.count(key) == 1 and key not in _TAKEN else path for key, path in zip(last, paths, strict=True)]
    return {key: differ[name] for key, name in zip(short, names, strict=True)}


_TAKEN = ("name", "status", "step", "at step", "range", "wall time", "goodput")
"""The heads of other columns."""


def is_seed(name: str) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return re.search(r"(?<![a-z])seeds?(?![a-z])", words) is not None


def seed_groups(rows: Sequence[RunFiles], differ: Mapping[str, Sequence[Any]]) -> list[list[int]]:
    """Indices of runs, two or more, that have the same parent and differ only in their seeds."""
    fixed = [values for name, values in differ.items() if not is_seed(name)]
    seeds = [values for name, values in differ.items() if is_seed(name)]
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if row.folder.trained_with_card:
            key = json.dumps([row.run.parent, *[values[i] for values in fixed]], default=str)
            groups.setdefault(key, []).append(i)
    return [group for group in groups.values() if any(len({str(values[i]) for i in group}) > 1 for values in seeds)]


# All of it.


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a page shows.

    Attributes:
        best: The best value of each run, and its step.
        options: Name of an option that varies → its value in each run, None without one.
        colors: The color of each run: its place among the best ten, or `NEUTRAL`.
        groups: Runs that differ by a seed.
    """

    rows: Sequence[RunFiles]
    metric: Ranking
    best: Sequence[tuple[float, int] | None]
    colors: Sequence[int]
    differ: Mapping[str, Sequence[Any]]
    options: Mapping[str, Sequence[Any]]
    groups: Sequence[Sequence[int]]

    @classmethod
    def of(cls, rows: Sequence[RunFiles], name: str | None, mode: str | None) -> "Sweep":
        metric = Ranking.of(rows, name, mode)
        best = [metric.best(row) for row in rows]
        sign = -1.0 if metric.is_max else 1.0
        ranked = sorted(range(len(rows)), key=lambda i: math.inf if (value := best[i]) is None else sign * value[0])
        colors = [NEUTRAL] * len(rows)
        for place, i in enumerate(ranked[:COLORS]):
            colors[i] = place
        differ = differences_of([row.folder.trained_with_card for row in rows])
        return cls(rows, metric, best, colors, differ, options(rows, differ), seed_groups(rows, differ))

    def ranked(self) -> list[int]:
        return sorted((i for i, color in enumerate(self.colors) if color != NEUTRAL), key=self.colors.__getitem__)

    def tree(self) -> list[tuple[int, int]]:
        """The runs in the order of the table, branches below their parents: index and depth of each."""
        index = {id(row.run): i for i, row in enumerate(self.rows)}
        return [(index[id(row.run)], row.depth) for row in tree([row.run for row in self.rows])]
