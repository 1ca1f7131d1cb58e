"""The files of a run, for a page: its starts, times and scalars, and what is odd about them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jstep.checkpoint.listing import entries
from jstep.core.checks import truncate
from jstep.core.curves import Mark
from jstep.hooks.start_differences import changes
from jstep.stores.event_files import DataLossError, Series, read_series
from jstep.stores.starts import Start, read_starts
from jstep.stores.urls import is_url
from jstep.tools.cli import time_text
from jstep.tools.goodput import Goodput, by_start, of_run
from jstep.tools.own_events import events_of_run
from jstep.tools.run_summary import RunSummary, start_with_card


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The files of a run. What cannot be read or shown is left out, and listed in `problems`."""

    run: RunSummary
    name: str
    color: int
    starts: Sequence[Start] = ()
    series: Mapping[str, Series] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, run: RunSummary, name: str, color: int) -> "RunFiles":
        if run.error is not None:
            return cls(run, name, color, problems=[run.error])
        problems: list[str] = []
        known = functools.partial(_known, problems)
        every = known({}, read_starts, run.path).get(run.prefix, ())
        problems += [f"its start {item['number']} {item['problem']}" for item in every if item.get("problem")]
        starts = [item for item in every if not item.get("problem")]
        files, not_shown = known(([], []), events_of_run, run.path, starts)
        problems += not_shown
        series = known({}, read_series, files, lambda error: problems.append(_damaged(error)))
        return cls(run, name, color, starts, _most(series, problems), problems)

    def part(self, nothing: Any, function: Callable[..., Any], *args: Any) -> Any:
        """Return a part of the page, or `nothing` if the run's files hold what cannot be shown."""
        try:
            return function(*args)
        except Exception as error:
            problem = f"a part of it cannot be shown, since its files hold what jstep does not write: {error!r}"
            self.problems.append(truncate(problem, 300))
            return nothing

    @property
    def is_damaged(self) -> bool:
        """Whether a start cannot be read, so that its values cannot be compared."""
        return not self.starts

    @property
    def card(self) -> dict[str, Any]:
        """The card of the start that the run is."""
        return self.trained.get("card") or {}

    @property
    def trained(self) -> Start:
        return start_with_card(self.starts, self.run.start)

    @functools.cached_property
    def goodput(self) -> list[Goodput]:
        return by_start(self.starts)

    def total(self) -> Goodput:
        return of_run(self.starts) if self.starts else Goodput()

    def spans(self) -> list[tuple[int, int] | None]:
        """The first and the last step of each start."""
        return [None if (at := start.get("step")) is None else (at[0], at[1]) for start in self.starts]

    def ends(self) -> list[str]:
        """How each start ended; "" where that is not known any more."""
        known = [f"{start['status']}: {start['reason']}".rstrip(": ") for start in self.run.starts]
        return ([""] * len(self.starts) + known)[len(known) :]

    def options(self) -> dict[str, Mapping[str, Any]]:
        """The config of the run; where starts that took steps differ, each with its steps."""
        found: list[tuple[int, int, Mapping[str, Any]]] = []
        for start in self.run.starts:
            if start["first"] is not None and start["config"] is not None:
                first = found.pop()[0] if found and found[-1][2] == start["config"] else start["first"]
                found.append((first, start["last"], start["config"]))
        if len(found) < 2:
            return {"config": self.run.config} if self.run.config else {}
        return {f"config, steps {first} to {last}": config for first, last, config in found}

    def marks(self) -> list[Mark]:
        """The run's starts, stages and checkpoints on the axis."""
        marks = [Mark("start", at[0], f"{self.name}: start from step {at[0]}") for at in self.spans() if at and at[0]]
        stages = self.card.get("stages") or {}
        marks += [
            Mark("stage", int(at), f"{self.name}: stage {name}")
            for at, name in stages.items()
            if at.isdecimal() and int(at) > 0
        ]
        if not is_url(self.run.path):
            steps = [step for step, is_whole, _ in entries(self.run.path, self.run.prefix) if is_whole]
            marks += [Mark("checkpoint", step, f"{self.name}: checkpoint {step}") for step in steps]
        return [mark._replace(color=self.color) for mark in marks]

    def odd(self) -> list[str]:
        """Return what is odd, each once."""
        more = self.part([], lambda: list(self._oddities()))
        return list(dict.fromkeys([*self.problems, *more]))

    def _oddities(self) -> Iterator[str]:
        if self.run.status not in ("finished", "running", "unreadable"):
            yield f"it is {self.run.status}: {self.run.reason}".rstrip(": ")
        if (refused := self.run.refused) is not None:
            what = f"{refused['status']}: {refused['reason']}".rstrip(": ")
            yield f"the start that ended {time_text(refused['time'], ' ', 'seconds')} took no step: {what}"
        for line in [line for start in self.starts for line in start.get("stalls") or ()]:
            seconds, what = line.get("stalled"), truncate(str(line.get("what")), 200)
            yield f"process {line.get('process')} stalled for {seconds} s at step {line.get('step')}: {what}"
        spans = [span for span in self.spans() if span is not None]
        for before, now in itertools.pairwise(spans):
            if now[0] < before[1]:
                yield f"steps {now[0]} to {before[1]} were made again by a later start"
        for start, later in itertools.pairwise([start for start in self.starts if start.get("card")]):
            for change in changes(start, later).lines:
                at = time_text(later["opened"], " ", "seconds")
                yield f"changed before the start of {at}: {truncate(change, 300)}"
        for tag, series in self.series.items():
            bad = np.flatnonzero(~np.isfinite(series.values))
            if bad.size:
                first = series.steps[bad[0]]
                yield f"{tag} is not finite at {bad.size} of {len(series.steps)} points, first at step {first}"


def _known(problems: list[str], nothing: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function that reads files, which may be missing and may hold anything, or `nothing`."""
    try:
        return function(*args)
    except Exception as error:
        is_plain = isinstance(error, OSError | ImportError | ValueError)
        problems.append(truncate(str(error) if is_plain else f"a file of it cannot be read: {error!r}", 300))
        return nothing


def _damaged(error: DataLossError) -> str:
    return f"{error}; what follows is not shown"


_MAX_TAGS = 1000


def _most(series: Mapping[str, Series], problems: list[str]) -> dict[str, Series]:
    """Return the series with points, as many as a page can have."""
    some = {tag: item for tag, item in series.items() if item.steps or item.rewound}
    if len(some) > _MAX_TAGS:
        problems.append(f"it has {len(some)} scalars; the first {_MAX_TAGS} are shown")
    return dict(itertools.islice(some.items(), _MAX_TAGS))
