"""What a page shows of the files of a run: its starts, its scalars, and what is odd about them."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jstep.checkpoint.listing import possible_checkpoints
from jstep.core.checks import truncate
from jstep.core.drawing import Mark, Numbers, thin
from jstep.look.cli import utc_text
from jstep.look.goodput import part_changes
from jstep.look.run_folder import RunFolder, run_folder
from jstep.look.run_summary import RunSummary
from jstep.look.starts import state_change_lines
from jstep.record.stall_files import missing_threads, read_stalls
from jstep.stores.event_files import Series
from jstep.stores.urls import is_url

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
