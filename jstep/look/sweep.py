"""What a page shows of runs: files, the metric that ranks them, varied options, seed groups."""

import dataclasses
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jstep.array_store.listing import possible_checkpoints
from jstep.core.checks import format_list, truncate
from jstep.core.tables import printable
from jstep.look.cli import utc_text
from jstep.look.goodput import part_changes
from jstep.look.run_folder import (
    OTHER_BATCH,
    RUNNING,
    RunFolder,
    RunFolders,
    empty_folder,
    last_step_text,
    overlap_lines,
    span_and_end,
    state_change_lines,
)
from jstep.look.run_summary import RunSummary
from jstep.look.runs import differences_of, status_text
from jstep.look.runs import tree as rows_of_tree
from jstep.record.differences import SECTIONS, values_of
from jstep.record.stall_files import missing_threads, read_stalls
from jstep.record.starts import FAILED, FINISHED, KILLED
from jstep.showing.drawing import COLORS, NEUTRAL, Mark, Numbers, thin
from jstep.stores.event_files import Series
from jstep.stores.urls import is_url

# The files of a run: its starts, its scalars, and what is unusual about them.

_SKIPPED = "skipped"
"""The metric of a skipped update, as `training.metrics` names it, which imports JAX."""
_MAX_ENDS = 10
"""How many ends of starts are named, the newest."""
_MAX_TAGS = 1000
"""How many scalars of a run are shown."""

Points = tuple[Numbers, Numbers]
"""Steps and values."""


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """What is shown of a run.

    Attributes:
        warnings: What failed, is lost or unusual, as sentences; also why some files are not shown.
        notes: What changed from start to start, as sentences.
        series: Tag → points, thinned.
        rewound: Tag → points that a later start made again.
    """

    run: RunSummary
    name: str
    folder: RunFolder
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    series: Mapping[str, Points] = dataclasses.field(default_factory=dict)
    rewound: Mapping[str, Sequence[Points]] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, run: RunSummary, folders: RunFolders, name: str, columns: int) -> "RunFiles":
        """Read the files of a run; whatever they hold, this raises nothing.

        Args:
            run: The run.
            folders: The folders of all runs on the page.
            name: Its name on the page.
            columns: The number of columns of its curves that are kept.
        """
        if run.error is not None:
            return cls(run, name, empty_folder(run.path, run.prefix), [run.error])
        warnings: list[str] = []
        notes: list[str] = []
        series: dict[str, Series] = {}
        folder = empty_folder(run.path, run.prefix)
        try:
            folder = folders.find(run.path, run.prefix)
            warnings += folder.unreadable_starts
            warnings += _warnings(run, folder)
            notes += _notes(folder)
            warnings += folder.event_files.problems
            series = folder.series(
                lambda error: warnings.append(f"{error}; what follows is not shown")
            )
            warnings += _not_finite(series)
            warnings += _skipped(series)
        except Exception as error:
            # A page of a hundred runs is not lost with one of them.
            is_plain = isinstance(error, OSError | ImportError | ValueError)
            text = str(error) if is_plain else f"a file of it cannot be shown: {error!r}"
            warnings.append(truncate(text, 300))
        if len(series) > _MAX_TAGS:
            warnings.append(f"it has {len(series)} scalars; the first {_MAX_TAGS} are shown")
        thinned: dict[str, Points] = {}
        rewound: dict[str, list[Points]] = {}
        for tag, points in itertools.islice(series.items(), _MAX_TAGS):
            if points.steps:
                thinned[tag] = _thinned(points.steps, points.values, columns)
                rewound[tag] = [_thinned(*old, columns) for old in points.rewound]
        unique = list(dict.fromkeys(warnings))
        return cls(run, name, folder, warnings=unique, notes=notes, series=thinned, rewound=rewound)

    def marks(self) -> list[Mark]:
        """The steps marked in a picture for starts, stages and checkpoints; none for step 0."""
        marks: list[Mark] = []
        for start in self.folder.valid_starts:
            first, _ = start["step"] or (0, 0)
            if first:
                marks.append(Mark("start", first, f"start from step {first}"))
        stages = (self.folder.start_with_setup.get("setup") or {}).get("stages") or {}
        for step, name in stages.items():
            # A step of more digits is not one that this package writes.
            if step.isdecimal() and len(step) < 19 and int(step):
                marks.append(Mark("stage", int(step), f"stage {name}"))
        if not is_url(self.run.path):
            # Of one step there may be two: the old one, while the new one replaces it.
            steps = dict.fromkeys(
                found.step for found in possible_checkpoints(self.run.path, self.run.prefix)
            )
            marks += [Mark("checkpoint", step, f"checkpoint {step}") for step in steps]
        return marks


def _thinned(steps: Sequence[int], values: Sequence[float], columns: int) -> Points:
    x = np.asarray(steps, np.int64)
    y = np.asarray(values, float)
    kept = thin(x, y, columns)
    return x[kept], y[kept]


def _warnings(run: RunSummary, folder: RunFolder) -> Iterator[str]:
    """Say what failed and what is lost, before what else is unusual."""
    yield from folder.newest_checkpoint.problems
    if run.status not in (FINISHED, RUNNING, FAILED, KILLED):
        # What failed or was killed is among the starts.
        yield status_text(run)
    yield from _failed_starts(folder.facts)
    yield from _lost_steps(folder.facts)
    for start in folder.valid_starts:
        if start["other_batch"] is not None:
            yield f"batch {start['other_batch']} {OTHER_BATCH} (start {start['number']})"
    yield from _stall_warnings(run, folder)
    yield from overlap_lines(folder.facts)


def _failed_starts(starts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Name the starts that failed, were killed or took no step; consecutive like ones together."""
    ends: list[tuple[str, list[int]]] = []
    for start in starts:
        has_ended = start["ended"] is not None
        took_steps = start["first"] is not None
        if not has_ended or (took_steps and start["status"] not in (FAILED, KILLED)):
            continue
        text = span_and_end(start)
        if ends and ends[-1][0] == text and ends[-1][1][-1] == start["number"] - 1:
            ends[-1][1].append(start["number"])
        else:
            ends.append((text, [start["number"]]))
    if len(ends) > _MAX_ENDS:
        earlier = sum(len(numbers) for _, numbers in ends[:-_MAX_ENDS])
        yield f"{earlier} earlier starts failed, were killed or took no step"
    for text, numbers in ends[-_MAX_ENDS:]:
        name = f"start {numbers[0]}"
        if len(numbers) > 1:
            name = f"starts {numbers[0]} to {numbers[-1]}"
        yield f"{name}: {text}"


def _lost_steps(starts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    spans: list[str] = []
    trained = [start for start in starts if start["first"] is not None]
    for earlier, later in itertools.pairwise(trained):
        if later["first"] < earlier["last"]:
            spans.append(f"{later['first']} to {last_step_text(earlier)}")
    if spans:
        yield f"steps {format_list(spans, 10)} were made again by a later start"


def _notes(folder: RunFolder) -> Iterator[str]:
    """Say what changed from start to start."""
    for facts in folder.facts_with_changes:
        for line in state_change_lines(facts):
            yield f"its state was {truncate(line, 300)} (start {facts['number']})"
        for change in facts["changes"] or ():
            yield f"changed before the start of {utc_text(facts['began'])}: {truncate(change, 300)}"
    yield from part_changes(folder.valid_starts)


def _stall_warnings(run: RunSummary, folder: RunFolder) -> Iterator[str]:
    for start in folder.valid_starts:
        for stall in start["stalls"]:
            what = truncate(str(stall.get("what")), 200)
            yield (
                f"process {stall.get('process')} stalled for {stall.get('stalled')} s at step "
                f"{stall.get('step')}: {what}"
            )
    ended, _ = read_stalls(run.path, run.prefix, ended=True)
    for process in ended:
        if process["stall"]:
            what = truncate(process["what"], 200)
            yield f"before it ended, process {process['process']} was {what}: {process['line']}"
    yield from missing_threads(ended)


def _not_finite(series: Mapping[str, Series]) -> Iterator[str]:
    for tag, points in series.items():
        bad = np.flatnonzero(~np.isfinite(points.values))
        if bad.size:
            count = len(points.steps)
            first = points.steps[bad[0]]
            yield f"{tag} is not finite at {bad.size} of {count} points, first at step {first}"


def _skipped(series: Mapping[str, Series]) -> Iterator[str]:
    """Name the step since which all updates are skipped, unless only one, as by a loss scale."""
    points = series.get(_SKIPPED)
    if points is None:
        return
    count = 0
    while count < len(points.values) and points.values[-1 - count] == 1:
        count += 1
    if count > 1:
        yield (
            f"all {count} logged updates from step {points.steps[-count]} on were skipped, as they "
            "were not finite"
        )


# The metric.


class Ranking(NamedTuple):
    """The metric that ranks runs, and whether its largest or its smallest value is the best."""

    name: str
    is_max: bool

    def __str__(self) -> str:
        return f"{'greatest' if self.is_max else 'least'} {self.name}"

    @classmethod
    def choose(cls, rows: Sequence[RunFiles], name: str | None, mode: str | None) -> "Ranking":
        """Choose the metric that ranks the runs.

        It is the named one, else that of a `KeepBest`, else the first one of an evaluation, else
        the loss.
        """
        names: dict[str, None] = {}
        for row in rows:
            names |= dict.fromkeys([*row.run.metrics, *row.run.best, *row.series])
        if name is None:
            name = _default_metric(rows, names)
        elif name not in names:
            known = format_list(list(map(printable, names)), 30) or "none"
            raise ValueError(f"metric={name!r}: must be a metric of the runs; there are {known}")
        is_max = _is_max(rows, name)
        # The mode of a `KeepBest` comes before the argument, which is for metrics without one.
        return cls(name, mode == "max" if is_max is None else is_max)

    def best(self, row: RunFiles) -> tuple[float, int] | None:
        """A run's best value and its step, as `KeepBest` knows it, of its points, or the last."""
        value, step = row.run.best.get(self.name, (math.nan, 0))
        if math.isfinite(value):
            return value, step
        if self.name in row.series:
            steps, values = row.series[self.name]
            finite = np.flatnonzero(np.isfinite(values))
            if finite.size:
                among = values[finite].argmax() if self.is_max else values[finite].argmin()
                index = finite[among]
                return float(values[index]), int(steps[index])
        last = row.run.metrics.get(self.name, math.nan)
        return (last, row.run.step) if math.isfinite(last) else None


def _default_metric(rows: Sequence[RunFiles], names: Collection[str]) -> str:
    kept = Counter(tag for row in rows for tag in row.run.best)
    if kept:
        return kept.most_common(1)[0][0]
    prefixes: set[str] = set()
    for row in rows:
        prefixes |= _evaluations(row.folder.start_with_setup)
    for tag in names:
        prefix, _, metric = tag.partition("/")
        # `validation/loss` beside `loss` is of an evaluation, whatever its hook is called.
        if prefix in prefixes or metric in names:
            return tag
    return "loss"


def _evaluations(start: Mapping[str, Any]) -> set[str]:
    """The prefixes of the metrics of evaluations, from the text of the hooks."""
    setup = start.get("setup") or {}
    hooks = (setup.get("arguments") or {}).get("hooks")
    prefixes: set[str] = set()
    if not isinstance(hooks, list):
        return prefixes
    for hook in hooks:
        match = re.fullmatch(r"EvaluationHook\((.*)\)", str(hook))
        if match is not None:
            prefixes.add(match[1])
    return prefixes


def _is_max(rows: Sequence[RunFiles], name: str) -> bool | None:
    """Whether the newest `KeepBest` of a metric keeps the greatest value; None if there is none."""
    is_max: bool | None = None
    for row in rows:
        for start in row.folder.valid_starts:
            if name not in start["kept"]:
                continue
            mode = start["kept"][name]["mode"]
            if mode is not None:
                is_max = mode == "max"
    return is_max


# Options, and runs that differ by a seed.


def is_finite_number(value: object) -> bool:
    # Not `isinstance`, as a bool is an int; and not `math.isfinite`, which an int of many digits
    # overflows.
    return type(value) in (int, float) and abs(value) < 1e300  # type: ignore[arg-type]


def value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def varied_options(
    rows: Sequence[RunFiles], differences: Mapping[str, Sequence[Any]]
) -> dict[str, Sequence[Any]]:
    """Short name → the values of each option of configs that varies.

    If no run has a config, they are those of hyperparameters.
    """
    if any(row.run.config for row in rows):
        names = [name for name in differences if name.startswith(SECTIONS["config"])]
    else:
        numbers = _hyperparameters(rows)
        names = [name for name in differences if name in numbers]
    paths = [name.removeprefix(SECTIONS["config"]) for name in names]
    # Counted once, and not for each name: somebody else's config may have as many as a file can
    # hold.
    keys = Counter(path.rpartition("/")[2] for path in paths)
    varied: dict[str, Sequence[Any]] = {}
    for name, path in zip(names, paths, strict=True):
        key = path.rpartition("/")[2]
        is_unique = keys[key] == 1 and key not in _TAKEN
        varied[key if is_unique else path] = differences[name]
    return varied


def _hyperparameters(rows: Sequence[RunFiles]) -> set[str]:
    """The names of numbers that programs were compiled with."""
    numbers: set[str] = set()
    for row in rows:
        if not row.folder.start_with_setup:
            continue
        for name, (section, value) in values_of(row.folder.start_with_setup).items():
            if section == "programs" and is_finite_number(value):
                numbers.add(name)
    return numbers


_TAKEN = ("name", "status", "step", "at step", "wall time", "goodput")
"""The heads of other columns."""


def is_seed(name: str) -> bool:
    """Whether a name has the word seed, as `data_seed` and `dataSeed` do, and `seeded` does not."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return re.search(r"(?<![a-z])seeds?(?![a-z])", words) is not None


def seed_groups(
    rows: Sequence[RunFiles], differences: Mapping[str, Sequence[Any]]
) -> list[list[int]]:
    """Indices of runs, two or more, that have the same parent and differ only in their seeds."""
    seeds = [values for name, values in differences.items() if is_seed(name)]
    others = [values for name, values in differences.items() if not is_seed(name)]
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        # A run that is not known to have trained has only None as differences, and is in no group.
        if row.folder.start_with_setup:
            key = json.dumps([row.run.parent, *[values[i] for values in others]], default=str)
            groups.setdefault(key, []).append(i)
    found: list[list[int]] = []
    for group in groups.values():
        seeds_of_runs = {tuple(str(values[i]) for values in seeds) for i in group}
        if len(seeds_of_runs) > 1:
            found.append(group)
    return found


# All of it.


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a page shows.

    Attributes:
        best: The best value of each run, and its step.
        colors: The color of each run: its place among the best ten, or `NEUTRAL`.
        differences: Name of what differs → its value in each run, None without one.
        options: The same of the options that vary.
        groups: Indices of runs that differ only by a seed.
    """

    rows: Sequence[RunFiles]
    metric: Ranking
    best: Sequence[tuple[float, int] | None]
    colors: Sequence[int]
    differences: Mapping[str, Sequence[Any]]
    options: Mapping[str, Sequence[Any]]
    groups: Sequence[Sequence[int]]

    @classmethod
    def build(cls, rows: Sequence[RunFiles], name: str | None, mode: str | None) -> "Sweep":
        metric = Ranking.choose(rows, name, mode)
        best = [metric.best(row) for row in rows]

        def rank(i: int) -> float:
            value = best[i]
            if value is None:
                return math.inf
            return -value[0] if metric.is_max else value[0]

        colors = [NEUTRAL] * len(rows)
        best_first = sorted(range(len(rows)), key=rank)
        for color, i in enumerate(best_first[:COLORS]):
            colors[i] = color
        differences = differences_of([row.folder.start_with_setup for row in rows])
        return cls(
            rows=rows,
            metric=metric,
            best=best,
            colors=colors,
            differences=differences,
            options=varied_options(rows, differences),
            groups=seed_groups(rows, differences),
        )

    def ranked(self) -> list[int]:
        """The indices of the runs that have a color, the best first."""
        colored = [i for i, color in enumerate(self.colors) if color != NEUTRAL]
        return sorted(colored, key=lambda i: self.colors[i])

    def tree(self) -> list[tuple[int, int]]:
        """The runs in the table's order, branches below parents: index and depth of each."""
        index = {id(row.run): i for i, row in enumerate(self.rows)}
        return [
            (index[id(row.run)], row.depth) for row in rows_of_tree([row.run for row in self.rows])
        ]
