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
from jstep.hooks.card_differences import changes
from jstep.hooks.cards import Start, read_starts
from jstep.stores.event_files import DataLossError, Series, read_series
from jstep.stores.run_record import Times, newest_with_step, read_timeline
from jstep.stores.timeline import STALL, START, fields_with
from jstep.stores.urls import is_url
from jstep.tools.cli import time_text
from jstep.tools.goodput import Goodput, by_start, sum_starts
from jstep.tools.own_events import events_of_run
from jstep.tools.run_summary import RunSummary, trained_start


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The files of a run. What cannot be read or shown is left out, and listed in `problems`."""

    run: RunSummary
    name: str
    color: int
    starts: Sequence[Start] = ()
    times: Sequence[Times] = ()
    series: Mapping[str, Series] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    stalls: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, run: RunSummary, name: str, color: int) -> "RunFiles":
        if run.error is not None:
            return cls(run, name, color, problems=[run.error])
        problems: list[str] = []
        known = functools.partial(_known, problems)
        starts = [item for item in known((), read_starts, run.path) if item.prefix == run.prefix]
        problems += [item.problem for item in starts if item.problem]
        words = "version", STALL
        lines = [item for item in known((), fields_with, run.path, *words) if item.get("prefix") == run.prefix]
        begun = [item for item in lines if item.get("kind") == START]
        files, not_shown = known(([], []), events_of_run, run.path, starts, begun)
        problems += not_shown
        times = known({}, read_timeline, run.path, run.prefix)
        series = known({}, read_series, files, lambda error: problems.append(_damaged(error)))
        return cls(
            run, name, color, starts, list(times.values()), _most(series, problems), problems,
            [item for item in lines if item.get("kind") == STALL and item.get("start") in times],
        )  # fmt: skip

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
        """Whether a card is invalid, so that its values cannot be compared."""
        return any(start.problem for start in self.starts)

    @property
    def card(self) -> dict[str, Any]:
        """The card of the start that the run is."""
        return trained_start(self.run, self.starts).card or {}

    @functools.cached_property
    def goodput(self) -> list[Goodput]:
        return by_start(self.times)

    def total(self) -> Goodput:
        return sum_starts(self.goodput)

    def spans(self) -> list[tuple[int, int] | None]:
        """The first and the last step of each start."""
        newest = [newest_with_step(lines) for lines in self.times]
        return [None if line is None else (line["step"][0], line["step"][1]) for line in newest]

    def ends(self) -> list[str]:
        """How each start of `times` ended; "" where that is not known any more."""
        known = [f"{start['status']}: {start['reason']}".rstrip(": ") for start in self.run.starts]
        return ([""] * len(self.times) + known)[len(known) :]

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
        for line in self.stalls:
            seconds, what = line.get("stalled"), truncate(str(line.get("what")), 200)
            yield f"process {line.get('process')} stalled for {seconds} s at step {line.get('step')}: {what}"
        spans = [span for span in self.spans() if span is not None]
        for before, now in itertools.pairwise(spans):
            if now[0] < before[1]:
                yield f"steps {now[0]} to {before[1]} were made again by a later start"
        cards = [start for start in self.starts if start.card is not None]
        for start, later in itertools.pairwise(cards):
            card = later.card or {}
            for change in itertools.chain(*changes(start.card or {}, card, card.get("step") or 0)):
                at = time_text(later.time or 0.0, " ", "seconds")
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
