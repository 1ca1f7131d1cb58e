"""The folder of a run: its starts, the facts about each, also as text, and what it has logged."""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jstep.array_store.listing import misnaming_text
from jstep.array_store.manifest import CorruptedCheckpointError
from jstep.array_store.store import Store
from jstep.checkpoint.names import open_store
from jstep.core.checks import format_bytes, format_list, truncate
from jstep.core.stopwatch import EVALUATING, HOOKS, SAVING, STARTING, WAITING
from jstep.core.tables import printable
from jstep.look.cli import SHOWN, first_lines, local_text, local_zone, table
from jstep.look.goodput import milliseconds
from jstep.record.differences import changes
from jstep.record.schema import Start
from jstep.record.stall_files import exit_reason, read_stalls
from jstep.record.starts import (
    KILLED,
    find_starts,
    has_trained,
    last_trained,
    load_setup,
    original_of,
    path_of,
    read_starts,
    recorded_run,
    valid,
)
from jstep.stores.event_files import DataLossError, Series, Writer, event_files, read_series
from jstep.stores.files import is_directory, seconds_since_write
from jstep.stores.owners import is_alive
from jstep.stores.untrusted import RecordedRun
from jstep.stores.urls import is_url, join_path, split_path

RUNNING = "running"
HANGS = "hangs"
UNREADABLE = "unreadable"
MEMORY = ("host_bytes", "host_peak_bytes", "peak_bytes")
_SILENT = 120.0
"""Seconds after which a run on another host, whose file does not change, counts as dead."""
_RECORDED_FACTS = (
    "exception",
    "config",
    "argv",
    "commit",
    "edits",
    "devices",
    "directory",
    "state_changes",
    *MEMORY,
)
"""The facts about a start that are fields of its file."""
_DERIVED_FACTS = (
    "began",
    "ended",
    "first",
    "last",
    "status",
    "reason",
    "host",
    "pid",
    "saved",
    "milliseconds",
    "first_batch",
    "phase",
)


class EventFiles(NamedTuple):
    """The paths of the event files of a run, and why others are not read, as sentences."""

    paths: Sequence[str]
    problems: Sequence[str]


class NewestCheckpoint(NamedTuple):
    """The newest checkpoint of a run.

    Attributes:
        path: Its path; None without one.
        problems: Why those above it cannot be restored, as sentences. A restart raises an error
            until they are set aside.
    """

    path: str | None
    problems: Sequence[str]


class Logdirs(NamedTuple):
    """The logdirs of a run.

    Attributes:
        readable: Those that may be opened.
        foreign: Those that somebody else recorded, and that lead away from the run.
    """

    readable: Sequence[str]
    foreign: Sequence[str]


@dataclasses.dataclass(frozen=True, eq=False)
class RunFolder:
    """The folder of a run with one prefix of checkpoints.

    Everything but its starts, oldest first, is read when it is first used, and once: a page asks
    for it several times.

    Attributes:
        open_store: Returns the store of its checkpoints: one for all runs of a directory, which
            lists it once.
    """

    path: str
    prefix: str
    starts: Sequence[Start]
    open_store: Callable[[], Store]

    @functools.cached_property
    def valid_starts(self) -> list[Start]:
        return valid(self.starts)

    @functools.cached_property
    def original(self) -> str | None:
        """The directory that it was copied from, where its process may live, or None."""
        return original_of(self.path, self.starts)

    @functools.cached_property
    def representative(self) -> Start:
        """The start that represents the run: the newest that took a step, or else the newest."""
        return last_trained(self.valid_starts) or self.valid_starts[-1]

    @functools.cached_property
    def start_with_setup(self) -> Mapping[str, Any]:
        """The newest start with a setup, up to the one that represents the run, or {}."""
        for start in reversed(self.valid_starts):
            if start["number"] > self.representative["number"]:
                continue
            loaded = load_setup(self.path, start)
            if loaded["setup"]:
                return loaded
        return {}

    @property
    def unreadable_starts(self) -> list[str]:
        """A sentence for each start that cannot be read."""
        return [
            f"its start {start['number']} {start['problem']}"
            for start in self.starts
            if start["problem"]
        ]

    @functools.cached_property
    def newest_checkpoint(self) -> NewestCheckpoint:
        newest: str | None = None
        problems: list[str] = []
        with contextlib.suppress(Exception):
            store = self.open_store()
            newest_step = -1
            for step, path in store.newest_first(self.prefix):
                try:
                    found = store.manifest(path).step
                except CorruptedCheckpointError:
                    problems.append(f"{split_path(path)[1]} is corrupted")
                    continue
                except Exception:
                    found = step  # it may be intact: of a later version, or out of reach
                if found == step:
                    newest = path
                    newest_step = step
                    break
                problems.append(
                    f"{split_path(path)[1]}: {misnaming_text(self.prefix, step, found)}"
                )
            for path, why in store.find_broken(self.prefix, newest_step):
                problems.append(f"{split_path(path)[1]} is corrupted: {why}")
        return NewestCheckpoint(newest, problems)

    # What is known of its starts.

    @functools.cached_property
    def facts(self) -> list[dict[str, Any]]:
        """The facts about each start, by the names of `RunSummary.starts`."""
        return [self._make_facts(start) for start in self.starts]

    def facts_of(self, start: Start) -> dict[str, Any]:
        return next(facts for facts in self.facts if facts["number"] == start["number"])

    def _make_facts(self, start: Start) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "number": start["number"],
            **dict.fromkeys([*_DERIVED_FACTS, *_RECORDED_FACTS]),
            "problem": start["problem"] or None,
        }
        if start["problem"]:
            return facts | {
                "status": UNREADABLE,
                "reason": f"its start {start['number']} {start['problem']}",
                "devices": "",
            }
        living = self._status_of_living(start)
        if living is not None:
            facts["status"], facts["reason"] = living
        else:
            facts["status"], facts["reason"] = start["end"] or self._status_of_killed(start)
            facts["ended"] = start["now"]
            if facts["status"] == KILLED and not self.original:
                facts["phase"] = start["phase"]
        facts |= {
            "began": start["began"],
            "host": start["process"].get("host"),
            "pid": start["process"].get("pid"),
            "milliseconds": milliseconds(start),
        }
        if start["step"] and has_trained(start):
            facts["first"], facts["last"] = start["step"]
            facts["first_batch"] = _first_batch(start)
        if start["saved"]:
            facts["saved"] = start["saved"][-1][0]
        for name in _RECORDED_FACTS:
            facts[name] = start.get(name)
        return facts

    def _status_of_living(self, start: Start) -> tuple[str, str] | None:
        """Return status and reason of a living start; None if it ended or its process is gone."""
        # Not in a copy: its process may live, but writes to the original.
        if self.original or start["end"] is not None:
            return None
        process = start["process"]
        alive = is_alive(process)
        if alive is None:
            # The process is on another host.
            alive = self._silent_seconds(start) < _SILENT
        if not alive:
            return None
        with contextlib.suppress(OSError):
            stalls, _ = read_stalls(self.path, self.prefix)
            for stall in stalls:
                # The PID of process 0 tells this start from others; PIDs of other processes are not
                # recorded.
                is_other_process = stall["process"] != 0
                is_same_pid = stall["pid"] == process.get("pid")
                if stall["stall"] and (is_other_process or is_same_pid):
                    where = f"process {stall['process']} at step {stall.get('step')}"
                    return HANGS, f"{where}: {stall['what']}"
        return RUNNING, ""

    def _silent_seconds(self, start: Start) -> float:
        """Return how long ago a start wrote its file."""
        if not is_url(self.path):
            with contextlib.suppress(OSError):
                return abs(seconds_since_write(path_of(self.path, self.prefix, start["number"])))
        return time.time() - start["now"]

    def _status_of_killed(self, start: Start) -> tuple[str, str]:
        """Return the status and the reason of a start that could not record its end."""
        if self.original:
            return KILLED, f"a copy of {self.original}"
        return KILLED, exit_reason(self.path, self.prefix, start["began"])

    @functools.cached_property
    def facts_with_changes(self) -> list[dict[str, Any]]:
        """The facts, with `changes` since the previous start with a setup; None for the first."""
        found: list[dict[str, Any]] = []
        previous: dict[str, Any] = {}
        for start, start_facts in zip(self.starts, self.facts, strict=True):
            facts: dict[str, Any] = {"prefix": self.prefix, **start_facts, "changes": None}
            found.append(facts)  # `changes`, or another problem, is filled in below
            current: dict[str, Any] = {} if start["problem"] else {**load_setup(self.path, start)}
            if not current.get("setup"):
                problem = "has no setup file: what it was given is not known"
                facts["problem"] = start["problem"] or problem
                continue
            if previous:
                lines = changes(previous, current).lines
                if start["other_batch"] is not None:
                    lines.append(f"batch {start['other_batch']} {OTHER_BATCH}")
                facts["changes"] = lines
            if not current["setup"].get("programs") and previous:
                # A start without a step has compiled nothing, so the next one is compared with the
                # latest programs.
                programs = previous["setup"].get("programs")
                current = {**current, "setup": {**current["setup"], "programs": programs}}
            previous = current
        return found

    # What it has logged.

    @functools.cached_property
    def event_files(self) -> EventFiles:
        """Its event files, wherever they are, in the order of their names and so of their times."""
        files: dict[str, str] = {}
        others: list[str] = []
        run_ids = {start["run"] for start in self.valid_starts}
        for directory in dict.fromkeys([self.path, *self.logdirs.readable]):
            for path in event_files(directory) if is_directory(directory) else ():
                name = split_path(path)[1]
                run_id = Writer.parse(name).run
                # A user's writer names no run.
                if run_id is None or run_id in run_ids:
                    files[name] = path
                else:
                    others.append(name)
        problems: list[str] = []
        for logdir in self.logdirs.foreign:
            problems.append(
                f"its logdir {truncate(logdir, 200)} is not read, as it is neither below the "
                "directory of the run nor beside it; move the event files into that directory to "
                "see its curves"
            )
        if others:
            problems.append(f"event files of other runs are not shown: {format_list(others, 5)}")
        return EventFiles([files[name] for name in sorted(files)], problems)

    def recorded_run(self, start: Start) -> RecordedRun:
        return recorded_run(self.path, start, self.starts, self.original)

    @functools.cached_property
    def logdirs(self) -> Logdirs:
        readable: dict[str, None] = {}
        foreign: dict[str, None] = {}
        for start in self.valid_starts:
            logdir = start["logdir"]
            if logdir is None:
                continue
            directory = self.recorded_run(start).find(logdir)
            if directory is None:
                foreign[logdir] = None
            else:
                readable[directory] = None
        return Logdirs(list(readable), list(foreign))

    def series(
        self, on_corrupted: Callable[[DataLossError], None] = lambda error: None
    ) -> dict[str, Series]:
        """Return the scalars of its event files by tag."""
        return read_series(self.event_files.paths, on_corrupted)

    def losses(self) -> dict[int, float]:
        """The losses that it recorded by step, in event files and as the last of each start."""
        losses: dict[int, float] = {}
        for start in self.valid_starts:
            if start["end"] is not None and start["step"] is not None and "loss" in start["values"]:
                losses[start["step"][1]] = start["values"]["loss"]
        with contextlib.suppress(OSError, ValueError, ImportError):
            logged = self.series().get("loss")
            if logged is not None:
                losses |= dict(zip(logged.steps, logged.values, strict=True))
        return losses


def run_folders(path: str) -> list[RunFolder]:
    """Return the runs of a directory or bucket, one for each prefix."""
    return _folders(path, read_starts(path))


def find_run_folders(path: str) -> list[RunFolder]:
    return _folders(path, find_starts(path))


def _folders(path: str, starts_of_prefix: Mapping[str, Sequence[Start]]) -> list[RunFolder]:
    @functools.cache
    def open_listed() -> Store:
        store = open_store(path)
        store.list_once()
        return store

    return [
        RunFolder(path, prefix, starts, open_listed) for prefix, starts in starts_of_prefix.items()
    ]


def run_folder(path: str, prefix: str) -> RunFolder:
    """Return the run of a directory with a prefix, without starts if there is none."""
    starts = read_starts(path, prefix).get(prefix, ())
    return dataclasses.replace(empty_folder(path, prefix), starts=starts)


def empty_folder(path: str, prefix: str) -> RunFolder:
    """Return a folder without starts."""
    return RunFolder(path, prefix, (), functools.partial(open_store, path))


class RunFolders:
    """The folders of many runs; a directory is read once, also if several runs are in it."""

    def __init__(self) -> None:
        self._by_path: dict[str, dict[str, RunFolder]] = {}

    def find(self, path: str, prefix: str) -> RunFolder:
        """Return what `run_folder` does."""
        if path not in self._by_path:
            self._by_path[path] = {folder.prefix: folder for folder in run_folders(path)}
        return self._by_path[path].get(prefix) or empty_folder(path, prefix)


def logged_states(path: str, folders: Sequence[RunFolder]) -> dict[int, str]:
    """A directory's fingerprints by step: those in it, or else in a logdir of its runs."""
    from jstep.logs.fingerprint_log import FINGERPRINTS_FILE, read_log  # it imports JAX

    directories = [path]
    for folder in folders:
        directories += folder.logdirs.readable
    for directory in dict.fromkeys(directories):
        with contextlib.suppress(OSError, ValueError):
            log = read_log(join_path(directory, FINGERPRINTS_FILE))
            return {step: entry.state for step, entry in log.entries.items()}
    return {}


# The starts as text: what each of them changed, and a table of them.

_SHOWN_STEPS = 10
"""Up to how many steps of a change of the state are all listed."""
NOT_COMPARED = "not compared: files and data"
_MAX_END = 60
"""The number of characters of a start's end in a table; the whole follows below it."""
_OVERLAP_SECS = 1.0
"""By how much a start must have begun too early to be named; its time of the clock is not exact."""
OTHER_BATCH = "does not match the one read before the restart"
_EQUAL = "equal"
_DIFFERS = "differs"
_NOT_COMPARED = "not compared"


def _first_batch(start: Start) -> str | None:
    """Return how a restart's first batch compares with the one before; None in older records."""
    if not start["step"] or start["step"][0] == 0:
        return None
    if start["other_batch"] is not None:
        return _DIFFERS
    if start["compared_batch"] is None:
        return None
    return _EQUAL if start["compared_batch"] else _NOT_COMPARED


def first_batch_lines(start: Mapping[str, Any]) -> list[str]:
    """Describe the first batch of a restart; one that differs is among the changes."""
    if start["changes"] is None:
        return []
    if start["first_batch"] == _EQUAL:
        return [f"batch {start['first']} is the one read before the restart"]
    if start["first_batch"] == _NOT_COMPARED:
        return [f"batch {start['first']} was not compared with the one before the restart"]
    return []


def lines_of_changes(starts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Describe what each start changed; starts are items of `RunFolder.facts_with_changes`."""
    several = len({start["prefix"] for start in starts}) > 1
    for start in starts:
        lead = f"{start['prefix']}: " if several else ""
        if start["problem"]:
            yield f"{lead}its start {start['number']} {start['problem']}"
            continue
        lines = start["changes"]
        if lines is None:
            what = "the first start"
        elif lines:
            what = "changed since the previous start:"
        else:
            what = "nothing has changed"
        where = "without a step" if start["first"] is None else f"from step {start['first']}"
        yield f"{lead}{local_text(start['began'])}, {where}: {what}"
        yield from first_lines(lines or [])
        yield from first_lines(first_batch_lines(start))
        for line in state_change_lines(start):
            yield f"  its state was {line}"
    if any(start["changes"] == [] for start in starts):
        yield NOT_COMPARED


def state_change_lines(start: Mapping[str, Any]) -> list[str]:
    """Describe when the body of the loop, or a hook, replaced which leaves of the state."""
    lines: list[str] = []
    for change in start["state_changes"] or ():
        count = change["count"]
        steps = change["steps"] or [0]
        if count == len(steps) <= _SHOWN_STEPS:
            when = f"{'steps' if count > 1 else 'step'} {', '.join(map(str, steps))}"
        else:
            when = f"{count} steps from {steps[0]} to {steps[-1]}"
        others = f" and {change['leaves_left_out']} more" if change["leaves_left_out"] else ""
        lines.append(f"changed by {change['by']} at {when}: {', '.join(change['leaves'])}{others}")
    return lines


_PLACES = {
    STARTING: "while it started",
    WAITING: "while it waited for a batch",
    SAVING: "while it saved",
    EVALUATING: "in the evaluation",
    HOOKS: "in a hook or the body of the loop",
}
"""Phase → where a start was killed. While stepping, the last step mostly says it."""


def end_text(start: Mapping[str, Any]) -> str:
    """Return how and why a start ended; if it was killed, also what it was doing, if known."""
    status = start["status"]
    if start["phase"] in _PLACES:
        at = "" if start["last"] is None else f" at {start['last']}"
        status += f" ({_PLACES[start['phase']]}{at})"
    return f"{status}: {start['reason'] or ''}".rstrip(": ")


def span_and_end(start: Mapping[str, Any]) -> str:
    """Return which steps a start took, and how it ended."""
    steps = "no step"
    if start["first"] is not None:
        steps = f"steps {start['first']} to {last_step_text(start)}"
    return f"{steps}, {end_text(start)}"


def overlap_lines(starts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name each start that began before the one before it ended."""
    lines: list[str] = []
    readable = [start for start in starts if start["began"] is not None]
    for earlier, later in itertools.pairwise(readable):
        if earlier["ended"] is None:
            continue
        overlap = earlier["ended"] - later["began"]
        if overlap >= _OVERLAP_SECS:
            lines.append(
                f"start {later['number']} began {overlap:.0f} s before start {earlier['number']} "
                "ended: its process had begun before, or the clocks of two hosts differ"
            )
    return lines


def last_step_text(start: Mapping[str, Any]) -> str | None:
    """Return a start's last step; one that was killed took at least as many."""
    if start["last"] is None:
        return None
    return f"{'at least ' if start['status'] == KILLED else ''}{start['last']}"


def table_of_starts(starts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a table of starts, items of `RunFolder.facts_with_changes`, and its notes."""
    times = [start["milliseconds"] or {} for start in starts]
    parts = [part for part in times[0] if any(start_times.get(part) for start_times in times)]
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for start, start_times in zip(starts, times, strict=True):
        row = dict(start)
        for part, value in start_times.items():
            row[part] = f"{value:.3g}"
        for name in MEMORY:
            row[name] = format_bytes(start[name]) if start[name] else None
        row["began"] = None if start["began"] is None else local_text(start["began"])
        row["last"] = last_step_text(start)
        end = end_text(start)
        row["end"] = truncate(end, _MAX_END)
        rows.append(row)
        if row["end"] != end and start["status"] != UNREADABLE:
            notes.append(printable(f"start {start['number']} {end}"))
        if start["problem"]:
            notes.append(f"start {start['number']} {start['problem']}")
        elif start["changes"]:
            notes.append(
                f"start {start['number']} changed: {format_list(start['changes'], SHOWN, '; ')}"
            )
        notes += [f"start {start['number']}: {line}" for line in first_batch_lines(start)]
        notes += [
            f"start {start['number']}, its state was {line}" for line in state_change_lines(start)
        ]
    notes += overlap_lines(starts)
    directories = dict.fromkeys(start["directory"] for start in starts if start["directory"])
    if len(directories) > 1:
        notes.append(f"it was in {format_list(list(directories), SHOWN, ', then in ')}")
    heads = {"start": "number", f"began ({local_zone()})": "began", "from": "first", "to": "last"}
    heads |= {name: name for name in ("end", "saved", *parts)}
    heads |= {"host now": "host_bytes", "host most": "host_peak_bytes", "device most": "peak_bytes"}
    units = [f"milliseconds a step: {', '.join(parts)}"] if parts else []
    return [*table(heads, rows, left=2), *units, *notes]
