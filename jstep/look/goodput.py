"""Goodput: the wall time of a run over all its starts, and the share of it that made progress."""

import dataclasses
import itertools
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jstep.core.stopwatch import (
    BEFORE,
    EVALUATING,
    HOOKS,
    PHASES,
    SAVING,
    STARTING,
    STEPPING,
    WAITING,
)
from jstep.core.tables import Tabular
from jstep.record.process_files import read_processes
from jstep.record.schema import ProcessRecord, Start
from jstep.record.starts import MAX_STARTS, find_starts, valid
from jstep.stores.urls import absolute, location

# The time of stepping is divided into the time of steps that the run kept, and of those it lost.
_PARTS = ("productive", "rewound", *(phase for phase in PHASES if phase != STEPPING), "down")
STALLED = "stalled"
"""The part to which stalls in any phase belong."""
_MAX_SLOW = 8
"""The number of slow processes that are shown."""


class SlowProcess(NamedTuple):
    """A process that spends at least twice the others' time a step in a part, in the newest start.

    `others` is the median of theirs.
    """

    process: int
    host: str | None
    part: str
    milliseconds: float
    others: float

    def row(self) -> tuple[str, str, str]:
        name = f"{self.part} of process {self.process} ({self.host})"
        return name, f"{self.milliseconds:.3g} ms a step", f"others {self.others:.3g}"


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Goodput(Tabular):
    """Breakdown of a run's wall time in seconds, from its first start to its record's last write.

    Attributes:
        productive: Time of the steps that led to the final state.
        rewound: Time of lost steps, because a later start resumed from before them.
        before: Time from the start of the process until its first call of `train`.
        starting: Time from the call until the first step returned, and of later compilations that
            the loop waited for.
        waiting: Time that the loop waited for batches.
        saving: Time that the loop waited for checkpoints.
        evaluating: Time of `EvaluationHook`s, including their callbacks.
        hooks: Time of all other hooks, and of the device while they waited for it.
        down: Time from the last write of one start to the next start.
        starts: Number of starts of the run.
        steps: Number of steps that led to the final state.
        stalled: Part → the seconds in which process 0 stalled there, which that part does not
            include.
        notes: Parts whose time a step changed by more than a factor of two, and starts that cannot
            be read, as sentences.
        computing: The seconds of `hooks` in which the device computed steps, by samples.
        processes: Number of processes of the newest start; the times are those of process 0.
        slow: The processes that spend twice as long as the others in `waiting`, `saving`,
            `evaluating` or `hooks`. In `stepping` each waits for the slowest.

    Example:
        >>> import jstep
        >>> print(jstep.Goodput(productive=70.0, starting=20.0, down=10.0, starts=2, steps=1000))
        goodput 70.0 %: 1000 steps in 100 s, 2 starts
          productive  70.000 s   70.0 %
          starting    20.000 s   20.0 %
          down        10.000 s   10.0 %
    """

    productive: float = 0.0
    rewound: float = 0.0
    starting: float = 0.0
    waiting: float = 0.0
    saving: float = 0.0
    evaluating: float = 0.0
    hooks: float = 0.0
    down: float = 0.0
    starts: int = 0
    steps: int = 0
    stalled: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    before: float = 0.0
    notes: Sequence[str] = dataclasses.field(default=(), hash=False)
    computing: float = 0.0
    processes: int = 1
    slow: Sequence[SlowProcess] = dataclasses.field(default=(), hash=False)

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part, whose sum is `total`; `stalled` is the sum of all stalls."""
        return {
            **{name: getattr(self, name) for name in _PARTS},
            STALLED: sum(self.stalled.values()),
        }

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fraction(self) -> float:
        """The goodput, productive / total; 0 if no time has elapsed."""
        return self.productive / self.total if self.total > 0 else 0.0

    def _title(self) -> str:
        starts = "start" if self.starts == 1 else "starts"
        whose = f", times of process 0 of {self.processes}" if self.processes > 1 else ""
        steps = f"{self.steps} steps in {self.total:.6g} s"
        return f"goodput {_percent(self.fraction)}: {steps}, {self.starts} {starts}{whose}"

    def _rows(self) -> list[tuple[str, str, str]]:
        figures: list[tuple[str, float]] = []
        for name, secs in self.parts.items():
            figures.append((name, secs))
            if name == HOOKS:
                figures.append(("  computing", self.computing))
            if name == STALLED:
                figures += [(f"  {part}", stalled) for part, stalled in self.stalled.items()]
        rows: list[tuple[str, str, str]] = []
        for name, secs in figures:
            if secs:
                rows.append((f"{name:<10}", f"{secs:.3f} s", f"{_percent(secs / self.total):>7}"))
        return [*rows, *(slow.row() for slow in self.slow[:_MAX_SLOW])]

    def _notes(self) -> Sequence[str]:
        return self.notes


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def goodput(directory: str | os.PathLike[str], prefix: str = "model") -> Goodput:
    """Account for all wall time of a run, over all its starts.

    The times, those of process 0, are in files in `starts/`, in the checkpoint_dir or else in the
    logdir. If a start was killed, up to its last second (ten below a URL) counts as `down`. The run
    may still be in progress.

    Equation: total = productive + rewound + before + starting + waiting + saving + evaluating +
    hooks + down + stalled.

    Args:
        directory: The directory of the checkpoints or the logdir, or its URL.
        prefix: The prefix of the run's checkpoints; several runs may share a directory.

    Returns:
        The seconds of each part.

    Raises:
        FileNotFoundError: There is no run.
        ValueError: No run there has this prefix, or none of its starts can be read.

    Example:
        >>> import jax.numpy as jnp, jstep, tempfile
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> state = jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> run = tempfile.mkdtemp()
        >>> state = jstep.train(train_step, state, [jnp.ones(())] * 9, 9, checkpoint_dir=run)
        >>> found = jstep.goodput(run)
        >>> is_exact = abs(sum(found.parts.values()) - found.total) < 1e-9
        >>> found.steps, found.starts, found.productive > 0, is_exact
        (9, 1, True, True)
    """
    where = absolute(location(directory, "directory"))
    runs = find_starts(where)
    if prefix not in runs:
        raise ValueError(
            f"prefix={prefix!r}: must be the prefix of a run in {where}, which has "
            f"{', '.join(map(repr, runs))}; give the checkpoint_prefix of the run"
        )
    starts = runs[prefix]
    total = goodput_of_starts(starts)
    newest = valid(starts)[-1]
    count = newest["processes"] or 1
    records = read_processes(where, prefix, newest["number"], count)
    return dataclasses.replace(total, processes=count, slow=slow_processes(newest, records))


def goodput_of_starts(starts: Sequence[Start]) -> Goodput:
    """Sum the times of all starts of a run, oldest first; some may be unreadable."""
    readable = valid(starts)
    if not readable:
        raise ValueError("none of its starts can be read")
    total = sum_of_all(goodput_by_start(readable))
    notes = part_changes(readable)
    notes += [f"start {start['number']} {start['problem']}" for start in starts if start["problem"]]
    if len(starts) == MAX_STARTS:
        notes.append(f"only the newest {MAX_STARTS} starts are counted")
    return dataclasses.replace(total, starts=len(starts), notes=notes)


def sum_of_all(items: Sequence[Goodput]) -> Goodput:
    """Sum the times of starts, or of runs."""
    sums: dict[str, Any] = {}
    for name in (*_PARTS, "computing", "starts", "steps"):
        sums[name] = sum(getattr(item, name) for item in items)
    stalled: dict[str, float] = {}
    for item in items:
        for part, secs in item.stalled.items():
            stalled[part] = stalled.get(part, 0.0) + secs
    return Goodput(**sums, stalled=stalled)


# The time of each start.


def goodput_by_start(starts: Sequence[Start]) -> list[Goodput]:
    """Account for the time of each start, and in `down` for that since the previous start."""
    found: list[Goodput] = []
    previous_end = starts[0]["began"] if starts else 0.0
    for start, kept_until in zip(starts, _kept_until(starts), strict=True):
        seconds: dict[str, Any] = dict.fromkeys(PHASES, 0.0) | start["seconds"]
        began = start["began"]
        seconds["down"] = max(0.0, began - previous_end)
        # If the process was already running before the previous start ended, that time is counted
        # once.
        overlap = max(0.0, previous_end - began)
        for phase in (BEFORE, STARTING):
            counted_twice = min(seconds[phase], overlap)
            seconds[phase] -= counted_twice
            overlap -= counted_twice
        previous_end = max(previous_end, began + sum(start["seconds"].values()))

        first, last = start["step"] or (0, 0)
        stepping = seconds.pop(STEPPING)
        kept = total_at(start, kept_until, stepping, column=SAVED_SECONDS)
        seconds["productive"] = kept
        seconds["rewound"] = stepping - kept
        # If no step was lost, all stalls are in `productive`, also one in a step after the last,
        # which never finished.
        stalled = _take_stalls(start, seconds, math.inf if kept_until == last else kept_until)
        computing = start["computing"] or 0.0
        steps = kept_until - first
        found.append(
            Goodput(**seconds, computing=computing, starts=1, steps=steps, stalled=stalled)
        )
    return found


def _kept_until(starts: Sequence[Start]) -> list[int]:
    """Return the last step of each start that no later start repeated."""
    kept: list[int] = []
    limit = math.inf
    for start in reversed(starts):
        first, last = start["step"] or (0, 0)
        kept.append(int(max(first, min(last, limit))))
        # A start that restored a checkpoint discards the steps after it, even if it took no step
        # itself. `last` is 0 if its steps are unknown, or if it is still at step 0.
        if last:
            limit = min(limit, first)
    kept.reverse()
    return kept


def _take_stalls(
    start: Start, seconds: dict[str, float], kept_until: float = math.inf
) -> dict[str, float]:
    """Move a start's stalls out of the seconds of its parts; return the stalled seconds by part.

    Args:
        start: The start that stalled.
        seconds: Seconds by part, which this reduces. It has either `stepping`, or `productive` and
            `rewound`, into which that was divided.
        kept_until: The step up to which a stall while stepping was in `productive`.
    """
    stalled: dict[str, float] = {}
    for stall in start["stalls"]:
        part = str(stall["part"])
        # `stepping` was divided already.
        if part == STEPPING and part not in seconds:
            part = "productive" if (stall["step"] or 0) <= kept_until else "rewound"
        # Not more than the part has: the record may be somebody else's, and the total must stay.
        moved = min(seconds.get(part, 0.0), stall["stalled"] or 0.0)
        if moved > 0:
            seconds[part] -= moved
            stalled[part] = stalled.get(part, 0.0) + moved
    return stalled


SAVED_SECONDS = 1
SAVED_EXAMPLES = 2
"""The columns of the entries of `Start["saved"]` that hold totals since the start began; column 0
is the step."""


def total_at(start: Start, step: float, final: float, column: int) -> float:
    """Interpolate a total of a start between its saves.

    Args:
        start: The start.
        step: The step at which the total is wanted.
        final: The total at its last step.
        column: `SAVED_SECONDS` or `SAVED_EXAMPLES`.
    """
    first, last = start["step"] or (0, 0)
    if step >= last:
        return final
    known: list[tuple[int, float]] = []
    for save in start["saved"]:
        total: Any = save[column]
        if first < save[0] < last and total is not None:
            known.append((save[0], total))
    totals = [(first, 0.0), *sorted(known), (last, final)]
    for (step_a, total_a), (step_b, total_b) in itertools.pairwise(totals):
        if step <= step_b:
            interpolated = total_a + (total_b - total_a) * (step - step_a) / (step_b - step_a)
            # The saves may be from a file of another program, and exceed the final total.
            return min(final, max(0.0, interpolated))
    return final


# The time of a step: what changed from start to start, and which processes are slow.

_MIN_STEPS = 10
"""The steps that a start must have taken for its times to be compared."""
_MIN_MILLISECONDS = 0.1
_MIN_SHARE = 0.01
"""A part is compared if it takes so many milliseconds a step, and this share of all parts."""


def milliseconds(start: Start) -> dict[str, float]:
    """Return the milliseconds per step of each repeated phase of a start; {} if it took no step."""
    secs = _repeated_phases(start["seconds"])
    stalled = _take_stalls(start, secs)
    secs[STALLED] = sum(stalled.values())
    return _milliseconds_per_step(secs, start["step"])


def _repeated_phases(seconds: Mapping[str, float]) -> dict[str, float]:
    return {phase: seconds.get(phase, 0.0) for phase in PHASES if phase not in (BEFORE, STARTING)}


def _milliseconds_per_step(
    secs: Mapping[str, float], span: tuple[int, int] | None
) -> dict[str, float]:
    steps = _step_count(span)
    if not steps:
        return {}
    return {phase: 1000 * value / steps for phase, value in secs.items()}


def _step_count(span: tuple[int, int] | None) -> int:
    return 0 if span is None else span[1] - span[0]


def part_changes(starts: Sequence[Start]) -> list[str]:
    """Name each part whose time a step changed by more than a factor of two between two starts."""
    changes: list[str] = []
    earlier: dict[str, float] | None = None
    for start in starts:
        span = start["step"]
        if span is None or _step_count(span) < _MIN_STEPS:
            continue
        times = milliseconds(start)
        if earlier is not None:
            least = max(
                _MIN_MILLISECONDS, _MIN_SHARE * max(sum(earlier.values()), sum(times.values()))
            )
            for part, value in times.items():
                is_similar = earlier[part] / 2 <= value <= 2 * earlier[part]
                if is_similar or max(earlier[part], value) < least:
                    continue
                change = f"{earlier[part]:.3g} → {value:.3g} ms a step"
                changes.append(f"{part}: {change} from step {span[0]} (start {start['number']}) on")
        earlier = times
    return changes


class _ProcessTimes(NamedTuple):
    host: str | None
    milliseconds: Mapping[str, float]


def slow_processes(start: Start, records: Sequence[ProcessRecord]) -> list[SlowProcess]:
    """Return the processes that spend twice as long as the others in a part, the slowest first.

    Args:
        start: A start, which process 0 has recorded.
        records: What its other processes have recorded.
    """
    processes: dict[int, _ProcessTimes] = {}
    if _step_count(start["step"]) >= _MIN_STEPS:
        processes[0] = _ProcessTimes(start["process"]["host"], milliseconds(start))
    for record in records:
        if _step_count(record["step"]) >= _MIN_STEPS:
            times = _milliseconds_per_step(_repeated_phases(record["seconds"]), record["step"])
            processes[record["index"]] = _ProcessTimes(record["process"]["host"], times)
    if len(processes) < 2:
        return []
    slow: list[SlowProcess] = []
    for process, (host, phase_times) in processes.items():
        least = max(_MIN_MILLISECONDS, _MIN_SHARE * sum(phase_times.values()))
        others = [other.milliseconds for index, other in processes.items() if index != process]
        for part in (WAITING, SAVING, EVALUATING, HOOKS):
            median = statistics.median(other[part] for other in others)
            if phase_times[part] >= 2 * median and phase_times[part] >= least:
                slow.append(SlowProcess(process, host, part, phase_times[part], median))
    return sorted(slow, key=lambda item: item.others - item.milliseconds)
