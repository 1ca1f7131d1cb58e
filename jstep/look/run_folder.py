"""The folder of a run: its starts, the facts about each of them, also as text, and what the run has logged."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jstep.core.checks import format_bytes, format_list, truncate
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
    valid,
)
from jstep.stores.event_files import DataLossError, Series, Writer, event_files, read_series
from jstep.stores.files import is_directory, seconds_since_write
from jstep.stores.owners import is_alive
from jstep.stores.untrusted import RecordedRun
from jstep.stores.urls import is_url, join_path, split_path

RUNNING, HANGS, UNREADABLE = "running", "hangs", "unreadable"
MEMORY = ("host_bytes", "host_peak_bytes", "peak_bytes")
_SILENT = 120.0
"""Seconds after which a run on another host, whose file does not change, counts as dead."""
_AS_RECORDED = ("exception", "config", "argv", "commit", "edits", "devices", "directory", "state_changes", *MEMORY)
"""The facts about a start that are fields of its file."""
_FACTS = ("began", "ended", "first", "last", "status", "reason", "host", "pid", "saved", "milliseconds", *_AS_RECORDED)


@dataclasses.dataclass(frozen=True, eq=False)
class RunFolder:
    """The folder of a run with one prefix of checkpoints; all but its starts (oldest first) is read when used."""

    path: str
    prefix: str
    starts: Sequence[Start]

    @functools.cached_property
    def valid_starts(self) -> list[Start]:
        return valid(self.starts)

    @functools.cached_property
    def original(self) -> str | None:
        """The directory that it was copied from, where its process may live, or None."""
        return original_of(self.path, self.starts)

    @functools.cached_property
    def trained(self) -> Start:
        """The start that represents the run: the newest that took a step, or else the newest."""
        return last_trained(self.valid_starts) or self.valid_starts[-1]

    @functools.cached_property
    def last_trained_start(self) -> Mapping[str, Any]:
        """The newest start with a setup, up to the one that represents the run, or {}."""
        last = [start for start in self.valid_starts if start["number"] <= self.trained["number"]]
        return next((full for start in reversed(last) if (full := load_setup(self.path, start))["setup"]), {})

    @property
    def unreadable_starts(self) -> list[str]:
        """A sentence for each start that cannot be read."""
        return [f"its start {start['number']} {start['problem']}" for start in self.starts if start["problem"]]

    # What is known of its starts.

    @functools.cached_property
    def facts(self) -> list[dict[str, Any]]:
        """The facts about each start, by the names of `RunSummary.starts`."""
        return [self._facts_of(start) for start in self.starts]

    def facts_of(self, start: Start) -> dict[str, Any]:
        return next(facts for facts in self.facts if facts["number"] == start["number"])

    def _facts_of(self, start: Start) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "number": start["number"],
            **dict.fromkeys(_FACTS),
            "problem": start["problem"] or None,
        }
        if start["problem"]:
            return facts | {
                "status": UNREADABLE,
                "reason": f"its start {start['number']} {start['problem']}",
                "devices": "",
            }
        life = None if self.original or start["end"] else self._life_of(start)
        ending = life or start["end"] or self._ending_of(start)
        first = last = None
        if start["step"] and has_trained(start):
            first, last = start["step"]
        ended = start["now"] if life is None else None
        saved_steps = [step for step, *_ in start["saved"]]
        return facts | {
            "began": start["began"],
            "ended": ended,
            "first": first,
            "last": last,
            "status": ending[0],
            "reason": ending[1],
            "host": start["process"].get("host"),
            "pid": start["process"].get("pid"),
            "saved": saved_steps[-1] if saved_steps else None,
            "milliseconds": milliseconds(start),
            **{name: start.get(name) for name in _AS_RECORDED},
        }

    def _life_of(self, start: Start) -> tuple[str, str] | None:
        """Return the status and the reason of a start that lives; None if its process is gone."""
        process = start["process"]
        alive = is_alive(process)
        if alive is None:  # on another host
            silent = time.time() - start["now"]
            if not is_url(self.path):
                with contextlib.suppress(OSError):
                    silent = abs(seconds_since_write(path_of(self.path, self.prefix, start["number"])))
            alive = silent < _SILENT
        if not alive:
            return None
        with contextlib.suppress(OSError):
            for waiting in read_stalls(self.path, self.prefix)[0]:
                if waiting["stall"] and (waiting["process"] or waiting["pid"] == process.get("pid")):
                    return HANGS, f"process {waiting['process']} at step {waiting.get('step')}: {waiting['what']}"
        return RUNNING, ""

    def _ending_of(self, start: Start) -> tuple[str, str]:
        """Return the status and the reason of a start that could not record its end."""
        if self.original:
            return KILLED, f"a copy of {self.original}"
        return KILLED, exit_reason(self.path, self.prefix, start["began"])

    @functools.cached_property
    def facts_with_changes(self) -> list[dict[str, Any]]:
        """The same with `changes`, what a start changed since the one before it with a setup; None for the first."""
        found = list[dict[str, Any]]()
        before = dict[str, Any]()
        for start, facts in zip(self.starts, self.facts, strict=True):
            found.append({"prefix": self.prefix, **facts, "changes": None})
            described: dict[str, Any] = {} if start["problem"] else {**load_setup(self.path, start)}
            if not described.get("setup"):
                found[-1]["problem"] = start["problem"] or "has no setup file: what it was given is not known"
                continue
            if before:
                step = start["other_batch"]
                other_batch = [] if step is None else [f"batch {step} does not match the one read before the restart"]
                found[-1]["changes"] = [*changes(before, described).lines, *other_batch]
            programs = described["setup"].get("programs") or (before or described)["setup"].get(
                "programs"
            )  # none without a step
            before = {**described, "setup": {**described["setup"], "programs": programs}}
        return found

    # What it has logged.

    @functools.cached_property
    def event_files(self) -> tuple[list[str], list[str]]:
        """Its event files in the order of their names, and why others are not read."""
        files = dict[str, str]()
        others = list[str]()
        problems = list[str]()
        ids = {None, *(start["run"] for start in self.valid_starts)}
        for place in dict.fromkeys([self.path, *self._logdirs(problems)]):
            for path in event_files(place) if is_directory(place) else ():
                name = split_path(path)[1]
                if Writer.parse(name).run in ids:
                    files[name] = path
                else:
                    others.append(name)
        if others:
            problems.append(f"event files of other runs are not shown: {format_list(others, 5)}")
        return [files[name] for name in sorted(files)], problems

    def recorded_run(self, start: Start) -> RecordedRun:
        """What a start says about where it was made, which decides what may be opened of the paths in it."""
        directory = start["directory"]
        hosts = [other["process"].get("host") for other in self.valid_starts if other["directory"] == directory]
        return RecordedRun(self.path, directory, frozenset(hosts))

    def _logdirs(self, problems: list[str]) -> list[str]:
        found, unread = self.logdirs
        problems += [
            f"its logdir {truncate(logdir, 200)} is not read, as it is neither below the directory of the run "
            "nor beside it; move the event files into that directory to see its curves"
            for logdir in unread
        ]
        return found

    @functools.cached_property
    def logdirs(self) -> tuple[list[str], list[str]]:
        """The logdirs of its starts that may be opened, and those that somebody else recorded and that lead away."""
        found = dict[str, None]()
        unread = dict[str, None]()
        for start in self.valid_starts:
            logdir = start["logdir"]
            if logdir is None:
                continue
            place = self.recorded_run(start).find(logdir)
            if place is None:
                unread[logdir] = None
            else:
                found[place] = None
        return list(found), list(unread)

    def series(self, on_corrupted: Callable[[DataLossError], None] = lambda error: None) -> dict[str, Series]:
        """Return the scalars of its event files by tag."""
        return read_series(self.event_files[0], on_corrupted)

    def losses(self) -> dict[int, float]:
        """The losses that it has recorded by step, in event files and as the last one of each start."""
        found = dict[int, float]()
        for start in self.valid_starts:
            if start["end"] is not None and start["step"] is not None and "loss" in start["values"]:
                found[start["step"][1]] = start["values"]["loss"]
        with contextlib.suppress(OSError, ValueError, ImportError):
            if (series := self.series().get("loss")) is not None:
                found |= dict(zip(series.steps, series.values, strict=True))
        return found


def run_folders(path: str) -> list[RunFolder]:
    """Return the runs of a directory or bucket, one for each prefix."""
    return [RunFolder(path, prefix, starts) for prefix, starts in read_starts(path).items()]


def find_run_folders(path: str) -> list[RunFolder]:
    return [RunFolder(path, prefix, starts) for prefix, starts in find_starts(path).items()]


def run_folder(path: str, prefix: str) -> RunFolder:
    """Return the run of a directory with a prefix, without starts if there is none."""
    return RunFolder(path, prefix, read_starts(path).get(prefix, ()))


def logged_states(path: str, folders: Sequence[RunFolder]) -> dict[int, str]:
    """The fingerprints of the states of a directory by step: those in it, or else in a logdir of its runs."""
    from jstep.hooks.fingerprint_log import FINGERPRINTS_FILE, read_log  # it imports JAX

    logdirs = [logdir for folder in folders for logdir in folder.logdirs[0]]
    for place in dict.fromkeys([path, *logdirs]):
        with contextlib.suppress(OSError, ValueError):
            return {step: entry.state for step, entry in read_log(join_path(place, FINGERPRINTS_FILE)).entries.items()}
    return {}


# The starts as text: what each of them changed, and a table of them.

_SHOWN_STEPS = 10
"""Up to how many steps of a change of the state are all listed."""
NOT_COMPARED = "not compared: files, and data except the first batch of a restart"


def lines_of_changes(starts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    several = len({start["prefix"] for start in starts}) > 1
    for start in starts:
        lines, begin = start["changes"], f"{start['prefix']}: " if several else ""
        if start["problem"]:
            yield f"{begin}its start {start['number']} {start['problem']}"
            continue
        what = "changed since the previous start:" if lines else "nothing has changed"
        what = "the first start" if lines is None else what
        where = "without a step" if start["first"] is None else f"from step {start['first']}"
        yield f"{begin}{local_text(start['began'])}, {where}: {what}"
        yield from first_lines(lines or [])
        yield from (f"  its state was {line}" for line in state_change_lines(start))
    if any(start["changes"] == [] for start in starts):
        yield NOT_COMPARED


def state_change_lines(start: Mapping[str, Any]) -> list[str]:
    """Describe when the body of the loop, or a hook, replaced which leaves of the state."""
    lines = list[str]()
    for change in start["state_changes"] or ():
        count, steps = change["count"], change["steps"] or [0]
        when = f"{count} steps from {steps[0]} to {steps[-1]}"
        if count == len(steps) <= _SHOWN_STEPS:
            when = f"{'steps' if count > 1 else 'step'} {', '.join(map(str, steps))}"
        others = f" and {change['leaves_left_out']} more" if change["leaves_left_out"] else ""
        lines.append(f"changed by {change['by']} at {when}: {', '.join(change['leaves'])}{others}")
    return lines


def last_step_text(start: Mapping[str, Any]) -> str | None:
    """Return the last step of a start; of one that was killed, at least as many steps were taken."""
    if start["last"] is None:
        return None
    return f"{'at least ' if start['status'] == KILLED else ''}{start['last']}"


def table_of_starts(starts: Sequence[Mapping[str, Any]]) -> list[str]:
    times_of_starts = [start["milliseconds"] or {} for start in starts]
    parts = [part for part in times_of_starts[0] if any(times.get(part) for times in times_of_starts)]
    rows, notes = list[dict[str, Any]](), list[str]()
    for start, times in zip(starts, times_of_starts, strict=True):
        sizes = {name: format_bytes(start[name]) if start[name] else None for name in MEMORY}
        began = None if start["began"] is None else local_text(start["began"])
        end = f"{start['status']}: {start['reason'] or ''}"[:60].rstrip(": ")
        in_ms = {part: f"{value:.3g}" for part, value in times.items()}
        rows.append({**start, **in_ms, **sizes, "began": began, "last": last_step_text(start), "end": end})
        if start["problem"]:
            notes.append(f"start {start['number']} {start['problem']}")
        elif start["changes"]:
            notes.append(f"start {start['number']} changed: {format_list(start['changes'], SHOWN, '; ')}")
        notes += [f"start {start['number']}, its state was {line}" for line in state_change_lines(start)]
    places = dict.fromkeys(start["directory"] for start in starts if start["directory"])
    if len(places) > 1:
        notes.append(f"it was in {format_list(list(places), SHOWN, ', then in ')}")
    heads = {"start": "number", f"began ({local_zone()})": "began", "from": "first", "to": "last"}
    heads |= {name: name for name in ("end", "saved", *parts)}
    heads |= {"host now": "host_bytes", "host most": "host_peak_bytes", "device most": "peak_bytes"}
    units = [f"milliseconds a step: {', '.join(parts)}"] if parts else []
    return [*table(heads, rows, left=2), *units, *notes]
