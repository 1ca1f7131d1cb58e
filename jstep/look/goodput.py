"""Goodput: the wall time of a run over all its starts, and the share of it that made progress."""

import argparse
import dataclasses
import itertools
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jstep.core.stopwatch import BEFORE, EVALUATING, HOOKS, PHASES, SAVING, STARTING, STEPPING, WAITING
from jstep.core.tables import Tabular
from jstep.look.cli import Command, answer
from jstep.record.process_files import read_processes
from jstep.record.schema import ProcessRecord, Start
from jstep.record.starts import MAX_STARTS, find_starts, valid
from jstep.stores.urls import absolute, location

_ALL = ("productive", "rewound", *(phase for phase in PHASES if phase != STEPPING), "down")
STALLED = "stalled"
"""The part to which stalls in any phase belong."""
_MAX_SLOW = 8
"""The number of slow processes that are shown."""


class SlowProcess(NamedTuple):
    """A process that spends at least twice the milliseconds a step of the others in a part, in the newest start.

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
    """Breakdown of the wall time of a run in seconds, from its first start to the last write of its record.

    Attributes:
        productive: Time of the steps that led to the final state.
        rewound: Time of lost steps, because a later start resumed from before them.
        before: Time from the start of the process until its first call of `train`.
        starting: Time from the call until the first step returned, and of later compilations that the loop waited for.
        waiting: Time that the loop waited for batches.
        saving: Time that the loop waited for checkpoints.
        evaluating: Time of `EvaluationHook`s, including their callbacks.
        hooks: Time of all other hooks, and of the device while they waited for it.
        down: Time from the last write of one start to the next start.
        starts: Number of starts of the run.
        steps: Number of steps that led to the final state.
        stalled: Part → the seconds in which process 0 stalled there, which that part does not include.
        notes: Parts whose time a step changed by more than a factor of two, and starts that cannot be read, as
            sentences.
        computing: The seconds of `hooks` in which the device computed steps, by samples.
        processes: Number of processes of the newest start; the times are those of process 0.
        slow: The processes that spend twice as long as the others in `waiting`, `saving`, `evaluating` or `hooks`. In
            `stepping` each waits for the slowest.

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
        return {**{name: getattr(self, name) for name in _ALL}, STALLED: sum(self.stalled.values())}

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
        rows = list[tuple[str, float]]()
        for name, secs in self.parts.items():
            rows.append((name, secs))
            rows += [("  computing", self.computing)] if name == HOOKS else []
            rows += [(f"  {part}", of_part) for part, of_part in self.stalled.items()] if name == STALLED else []
        shown = [(f"{name:<10}", f"{secs:.3f} s", f"{_percent(secs / self.total):>7}") for name, secs in rows if secs]
        return [*shown, *(slow.row() for slow in self.slow[:_MAX_SLOW])]

    def _notes(self) -> Sequence[str]:
        return self.notes


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def goodput(directory: str | os.PathLike[str], prefix: str = "model") -> Goodput:
    """Account for all wall time of a run, over all its starts.

    The times, those of process 0, are in files in `starts/`, in the checkpoint_dir or else in the logdir. If a start
    was killed, up to its last second (ten below a URL) counts as `down`. The run may still be in progress.

    Equation: total = productive + rewound + before + starting + waiting + saving + evaluating + hooks + down + stalled.

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
        >>> found.steps, found.starts, found.productive > 0, abs(sum(found.parts.values()) - found.total) < 1e-9
        (9, 1, True, True)
    """
    where = absolute(location(directory, "directory"))
    of_runs = find_starts(where)
    if prefix not in of_runs:
        raise ValueError(
            f"prefix={prefix!r}: must be the prefix of a run in {where}, which has {', '.join(map(repr, of_runs))}; "
            "give the checkpoint_prefix of the run"
        )
    found, newest = goodput_of_starts(of_runs[prefix]), valid(of_runs[prefix])[-1]
    count = newest["processes"] or 1
    records = read_processes(where, prefix, newest["number"], count)
    return dataclasses.replace(found, processes=count, slow=slow_processes(newest, records))


def goodput_of_starts(starts: Sequence[Start]) -> Goodput:
    known = valid(starts)
    if not known:
        raise ValueError("none of its starts can be read")
    of_starts = goodput_by_start(known)
    names = (*_ALL, "computing", "steps")
    stalled_parts = dict.fromkeys(itertools.chain.from_iterable(start.stalled for start in of_starts))
    stalled = {part: sum(start.stalled.get(part, 0.0) for start in of_starts) for part in stalled_parts}
    notes = part_changes(known)
    notes += [f"start {start['number']} {start['problem']}" for start in starts if start["problem"]]
    notes += [f"only the newest {MAX_STARTS} starts are counted"] if len(starts) == MAX_STARTS else []
    sums: dict[str, Any] = {name: sum(getattr(start, name) for start in of_starts) for name in names}
    return Goodput(**sums, starts=len(starts), stalled=stalled, notes=notes)


_MIN_STEPS, _MIN_MS, _MIN_SHARE = 10, 0.1, 0.01
"""The minimum steps of a start, and the minimum milliseconds and share of a part, whose times are compared."""


def milliseconds(start: Start) -> dict[str, float]:
    """Return the milliseconds per step of each repeated phase of a start; {} if it took no step."""
    secs = _repeated(start["seconds"])
    secs[STALLED] = sum(_take_stalls(start, secs).values())
    return _per_step(secs, start["step"])


def _repeated(seconds: Mapping[str, float]) -> dict[str, float]:
    return {phase: seconds.get(phase, 0.0) for phase in PHASES if phase not in (BEFORE, STARTING)}


def _per_step(secs: Mapping[str, float], steps: tuple[int, int] | None) -> dict[str, float]:
    first, last = steps or (0, 0)
    return {phase: 1000 * value / (last - first) for phase, value in secs.items()} if last > first else {}


def _take_stalls(start: Start, seconds: dict[str, float], kept_until: float = math.inf) -> dict[str, float]:
    """Move the stalls of a start out of the seconds of its parts; return the stalled seconds by part."""
    stalled: dict[str, float] = {}
    for stall in start["stalls"]:
        part = str(stall["part"])
        if part == STEPPING and part not in seconds:
            part = "productive" if (stall["step"] or 0) <= kept_until else "rewound"
        taken = min(seconds.get(part, 0.0), stall["stalled"] or 0.0)
        if taken > 0:
            seconds[part] -= taken
            stalled[part] = stalled.get(part, 0.0) + taken
    return stalled


def slow_processes(start: Start, records: Sequence[ProcessRecord]) -> list[SlowProcess]:
    """Return the processes that spend twice as long as the others in a part, the slowest first."""
    hosts = {0: start["process"]["host"]} | {record["index"]: record["process"]["host"] for record in records}
    spans = {0: start["step"] or (0, 0)} | {record["index"]: record["step"] or (0, 0) for record in records}
    times = {0: milliseconds(start)}
    times |= {record["index"]: _per_step(_repeated(record["seconds"]), record["step"]) for record in records}
    times = {process: times[process] for process, (first, last) in spans.items() if last - first >= _MIN_STEPS}
    found = list[SlowProcess]()
    for process, by_part in times.items() if len(times) > 1 else ():
        least = max(_MIN_MS, _MIN_SHARE * sum(by_part.values()))
        for part in (WAITING, SAVING, EVALUATING, HOOKS):
            others = statistics.median(other[part] for index, other in times.items() if index != process)
            if by_part[part] >= 2 * others and by_part[part] >= least:
                found.append(SlowProcess(process, hosts[process], part, by_part[part], others))
    return sorted(found, key=lambda slow: slow.others - slow.milliseconds)


def part_changes(starts: Sequence[Start]) -> list[str]:
    """Name each part whose time a step changed by more than a factor of two between two starts."""
    spans = [(start, start["step"] or (0, 0), milliseconds(start)) for start in starts]
    found = list[str]()
    for (_, _, earlier), (start, (first, _), later) in itertools.pairwise(
        span for span in spans if span[1][1] - span[1][0] >= _MIN_STEPS
    ):
        least = max(_MIN_MS, _MIN_SHARE * max(sum(earlier.values()), sum(later.values())))
        for part, value in later.items():
            if not earlier[part] / 2 <= value <= 2 * earlier[part] and max(earlier[part], value) >= least:
                change = f"{earlier[part]:.3g} → {value:.3g} ms a step"
                found.append(f"{part}: {change} from step {first} (start {start['number']}) on")
    return found


def goodput_by_start(starts: Sequence[Start]) -> list[Goodput]:
    found: list[Goodput] = []
    ended = starts[0]["began"] if starts else 0.0
    for start, kept_until in zip(starts, _kept_until(starts), strict=True):
        seconds: dict[str, Any] = dict.fromkeys(PHASES, 0.0) | start["seconds"]
        began, stepping = start["began"], seconds.pop(STEPPING)
        down = max(0.0, began - ended)
        # If the process was already running before the previous start ended, that time is counted once.
        overlap = max(0.0, ended - began)
        for phase in (BEFORE, STARTING):
            cut = min(seconds[phase], overlap)
            seconds[phase], overlap = seconds[phase] - cut, overlap - cut
        ended = max(ended, began + sum(start["seconds"].values()))
        first, final = start["step"] or (0, 0)
        kept = total_at(start, kept_until, stepping, 1)
        seconds |= {"productive": kept, "rewound": stepping - kept, "down": down}
        stalled = _take_stalls(start, seconds, math.inf if kept_until == final else kept_until)
        computing, steps = start["computing"] or 0.0, kept_until - first
        found.append(Goodput(**seconds, computing=computing, starts=1, steps=steps, stalled=stalled))
    return found


def _kept_until(starts: Sequence[Start]) -> list[int]:
    """Return the last step of each start that no later start repeated."""
    limit, steps = math.inf, list[int]()
    for first, last in (start["step"] or (0, 0) for start in reversed(starts)):
        steps.append(int(max(first, min(last, limit))))
        limit = min(limit, first) if last else limit
    return steps[::-1]


def total_at(start: Start, step: float, final: float, column: int) -> float:
    """A total of a start at a step: `final` is its last value, `column` its column in the saves."""
    first, last = start["step"] or (0, 0)
    if step >= last:
        return final
    saved: list[Any] = start["saved"]
    saves = [(save[0], save[column]) for save in saved if first < save[0] < last and save[column] is not None]
    for (a, low), (b, high) in itertools.pairwise([(first, 0.0), *sorted(saves), (last, final)]):
        if step <= b:
            return min(final, max(0.0, low + (high - low) * (step - a) / (b - a)))
    return final


# `goodput` of the command line.


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "the checkpoint_dir of a run, or its logdir if it has none (several: a line of JSON for each)"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=what)
    parser.add_argument("--prefix", default="model", help="the prefix of the run's checkpoints (default: model)")


def _print_goodput(arguments: argparse.Namespace) -> int:
    return max(_print_one(path, arguments) for path in arguments.paths)


def _print_one(path: str, arguments: argparse.Namespace) -> int:
    result = goodput(path, arguments.prefix)
    fields = {**vars(result), "total": result.total, "fraction": result.fraction}
    lines = [f"{path}:", str(result)] if len(arguments.paths) > 1 else [str(result)]
    return answer(arguments, {name: value for name, value in fields.items() if value or value == 0}, lines)


GOODPUT = Command(_add_arguments, _print_goodput)
