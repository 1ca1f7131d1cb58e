"""The summary of a run: what was trained, how it ended or whether it lives, and what was tried later."""

import contextlib
import dataclasses
import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jstep.checkpoint.names import latest_checkpoint, open_store
from jstep.look.goodput import of_run, total_at
from jstep.record.differences import changes
from jstep.record.schema import Start
from jstep.record.stall_files import exit_reason, read_stalls
from jstep.record.starts import (
    FINISHED,
    KILLED,
    has_trained,
    last_trained,
    original_of,
    path_of,
    read_starts,
    valid,
    with_card,
)
from jstep.stores.files import seconds_since_write
from jstep.stores.owners import is_alive
from jstep.stores.urls import is_url, resolve_path, split_path

RUNNING, HANGS, UNREADABLE = "running", "hangs", "unreadable"
_SILENT = 120.0
"""Seconds after which a run on another host, whose file does not change, counts as dead."""
_SHOWN = 100
"""The number of the newest starts that a summary lists."""


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """Summary of one run: a directory and a checkpoint prefix with a record of starts.

    `last_step`, `config`, `commit`, `edits`, `devices` and `parameters` are those of the newest start that took a step,
    whatever was tried later, or of the newest start if none did. `status`, `reason` and `exception` are those of a
    living start, if there is one, or else of the start that ended the run.

    Attributes:
        path: The directory or URL.
        prefix: The prefix of its checkpoints.
        status: `"running"`, `"hangs"`, `"finished"`, `"interrupted"`, `"failed"`, `"killed"`, or `"unreadable"`.
        reason: Why it finished, which signal or exception ended it, what it is waiting for, or that its newest start
            cannot be read; may be empty.
        step: The last step that is known; 0 before the first one.
        last_step: The step at which it ends; None if the batches, a hook or a signal end it, or if it is not known.
        metrics: Name → last value, of scalar metrics and of evaluations.
        best: Name → best value and its step, if a `KeepBest` keeps the best and its checkpoint is there.
        started: When its first start began, in seconds since 1970; None if it cannot be read.
        ended: The time of its last sign of life; None while it runs.
        wall_seconds: The seconds of all starts.
        devices: The devices, such as `"2×NVIDIA H100"`.
        parent: The checkpoint that it branched from, and its step, or None.
        error: Why it cannot be read, or None.
        parameters: The number of parameters. This and the following fields are None if unknown.
        peak_bytes: The peak memory of a device, the largest.
        mfu: The utilization of the devices.
        goodput: The share of its time in which it trained.
        config: The `config` that `train` was given.
        commit: The commit of its code.
        edits: A hash of uncommitted edits of that code; None without any.
        exception: The name of the class of the exception that ended it; None after a signal.
        run: The name of the run that its checkpoints have.
        parent_run: That name of its parent.
        host: The host of the newest start.
        pid: The process ID of the newest start.
        examples: The number of examples that were trained on until `step`.
        best_checkpoints: Name → path of the checkpoint with the best value, which `start_from` takes.
        refused: The newest later start that took no step and has ended, such as one whose model does not fit: `time`,
            `status`, `reason`, `exception` and `config`.
        starts: The starts, oldest first, at most the last 100, each with `number` (in the name of its file), `began`,
            `ended`, `first` and `last` (the steps before its first and after its last update), `status`, `reason`,
            `exception`, `config`, `argv`, `commit`, `edits`, `host`, `pid` and `devices`; the `status` of one that
            cannot be read is `"unreadable"`.
        starts_count: The number of all starts.
        newest_checkpoint: The path of its newest checkpoint, from which a restart resumes; None if there is none.
        best_notes: Name → that the best value was measured with another config or on other data, or that a better one
            is its parent's.
        former_paths: The directories in which it was before it was moved.
        metrics_left_out: The number of further metrics, for which there is no room in its record.
    """

    path: str
    prefix: str
    status: str
    reason: str = ""
    step: int = 0
    last_step: int | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    best: Mapping[str, tuple[float, int]] = dataclasses.field(default_factory=dict)
    started: float | None = None
    ended: float | None = None
    wall_seconds: float = 0.0
    devices: str = ""
    parent: tuple[str, int] | None = None
    error: str | None = None
    parameters: int | None = None
    peak_bytes: int | None = None
    mfu: float | None = None
    goodput: float | None = None
    config: Mapping[str, Any] | None = None
    commit: str | None = None
    edits: str | None = None
    exception: str | None = None
    run: str | None = None
    parent_run: str | None = None
    host: str | None = None
    pid: int | None = None
    examples: int | None = None
    best_checkpoints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, Any] | None = None
    starts: Sequence[Mapping[str, Any]] = ()
    starts_count: int = 0
    metrics_left_out: int = 0
    newest_checkpoint: str | None = None
    former_paths: Sequence[str] = ()
    best_notes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def nonfinite(self) -> list[str]:
        """The names of metrics whose last or best value is NaN or infinite."""
        named = [*self.metrics.items(), *((name, value) for name, (value, _) in self.best.items())]
        return list(dict.fromkeys(name for name, value in named if not math.isfinite(value)))


def summary_fields(run: RunSummary) -> dict[str, Any]:
    """Return the fields of a run; a metric that is not finite is None, and among `nonfinite`."""

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return vars(run) | {
        "metrics": {name: finite(value) for name, value in run.metrics.items()},
        "best": {name: (finite(value), step) for name, (value, step) in run.best.items()},
        "nonfinite": run.nonfinite,
    }


def unreadable_run(where: str, prefix: str, error: Exception) -> RunSummary:
    why = str(error) if isinstance(error, OSError | ValueError) else f"its record is damaged: {error!r}"
    return RunSummary(where, prefix, UNREADABLE, error=why)


def summarize(where: str, prefix: str, starts: Sequence[Start]) -> RunSummary:
    """Summarize a run of its newest starts; whatever its files hold, this raises nothing."""
    try:
        if not valid(starts):
            raise ValueError(f"its newest start {starts[-1]['problem']}")
        return _summary(where, prefix, starts)
    except Exception as error:
        return unreadable_run(where, prefix, error)


def _summary(where: str, prefix: str, starts: Sequence[Start]) -> RunSummary:
    source = original_of(where, starts)
    spans = [span for start in valid(starts) if (span := start["step"]) is not None]
    newest, facts = valid(starts)[-1], [facts_of(where, start, source) for start in starts]
    living = [fact for fact in facts if fact["status"] in (RUNNING, HANGS)]
    # The newest living start that takes steps, or else the newest living one.
    active = max(living, key=lambda fact: (fact["first"] is not None, fact["number"]), default=None)
    latest = active or facts[starts.index(newest)]
    trained = starts[facts.index(active)] if active and active["first"] is not None else trained_start(starts)
    ending = _ending(starts, trained)
    shown = active or facts_of(where, ending, source)
    reasons = [shown["reason"] if newest is starts[-1] else f"its newest start {starts[-1]['problem']}"]
    others = [fact for fact in living if fact is not active]
    reasons += [f"start {fact['number']} (process {fact['pid']} on {fact['host']}) {RUNNING}, too" for fact in others]
    best, paths = _best(where, ending, is_copy=source is not None)
    notes = _best_notes(where, starts, ending, trained)
    return RunSummary(
        path=where,
        prefix=prefix,
        status=shown["status"],
        reason="; ".join(filter(None, reasons)),
        step=span[1] if has_trained(trained) and (span := trained["step"]) else spans[-1][1] if spans else 0,
        last_step=trained["last_step"],
        metrics=ending["values"],
        metrics_left_out=ending["values_left_out"] or 0,
        best=best,
        started=valid(starts)[0]["began"],
        ended=None if living else max(fact["ended"] for fact in facts if fact["ended"] is not None),
        wall_seconds=math.fsum(secs for start in valid(starts) for secs in start["seconds"].values()),
        devices=trained["devices"] or "",
        parent=_parent(where, newest),
        parameters=trained["parameters"],
        peak_bytes=max((start["peak_bytes"] or 0 for start in valid(starts)), default=0) or None,
        mfu=next((start["mfu"] for start in reversed(valid(starts)) if start["mfu"]), None),
        goodput=of_run(starts).fraction,
        config=trained["config"],
        commit=trained["commit"],
        edits=trained["edits"],
        exception=shown["exception"],
        run=newest["run"],
        parent_run=newest["parent_run"],
        host=latest["host"],
        pid=latest["pid"],
        examples=_examples(starts),
        best_checkpoints=paths,
        best_notes=notes,
        refused=_refused(facts, ending["number"]) if has_trained(trained) else None,
        starts=facts[-_SHOWN:],
        starts_count=len(starts),
        newest_checkpoint=_newest_checkpoint(where, prefix),
        former_paths=() if source else _former_paths(where, starts),
    )


def _newest_checkpoint(where: str, prefix: str) -> str | None:
    with contextlib.suppress(Exception):
        return latest_checkpoint(where, prefix)
    return None


def _former_paths(where: str, starts: Sequence[Start]) -> list[str]:
    places = dict.fromkeys(place for start in valid(starts) if (place := start["directory"]) is not None)
    return [place for place in places if resolve_path(place) != resolve_path(where)]


def trained_start(starts: Sequence[Start]) -> Start:
    """Return the start that represents the run: the newest that took a step, or else the newest."""
    return last_trained(starts) or valid(starts)[-1]


def _ending(starts: Sequence[Start], trained: Start) -> Start:
    """Return the start that ended a run: one without a step did if it only called the hooks that were left."""
    reached = trained["step"] and trained["step"][1]
    for start in () if reached is None or _has_finished(trained) else valid(starts):
        is_later = start["number"] > trained["number"] and start["last_step"] == trained["last_step"]
        if is_later and start["step"] is not None and {*start["step"]} == {reached} and _has_finished(start):
            return start
    return trained


def _has_finished(start: Start) -> bool:
    return start["end"] is not None and start["end"][0] == FINISHED


def start_with_card(where: str, starts: Sequence[Start]) -> Mapping[str, Any]:
    """Return the newest start with a card, up to the one that represents the run; {} if there is none."""
    known = valid(starts)
    last = [start for start in known if start["number"] <= trained_start(known)["number"]]
    return next((full for start in reversed(last) if (full := with_card(where, start))["card"]), {})


def facts_of(where: str, start: Start, source: str | None) -> dict[str, Any]:
    """Return the facts about a start; `source` is the directory that it was copied from, where its process may live."""
    if start["problem"]:
        reason = f"its start {start['number']} {start['problem']}"
        unknown = dict.fromkeys(("began", "ended", "first", "last", *_GIVEN, "host", "pid"))
        return {"number": start["number"], **unknown, "status": UNREADABLE, "reason": reason, "devices": ""}
    life = None if source or start["end"] else _life(where, start)
    ending = life or start["end"]
    if ending is None:
        ending = KILLED, f"a copy of {source}" if source else exit_reason(where, start["prefix"], start["began"])
    first, last = start["step"] if start["step"] and has_trained(start) else (None, None)
    return {
        "number": start["number"],
        "began": start["began"],
        "ended": start["now"] if life is None else None,
        "first": first,
        "last": last,
        "status": ending[0],
        "reason": ending[1],
        **{name: value for name, value in start.items() if name in _GIVEN},
        "host": start["process"].get("host"),
        "pid": start["process"].get("pid"),
        "devices": start["devices"],
    }


_GIVEN = ("exception", "config", "argv", "commit", "edits")


def _life(where: str, start: Start) -> tuple[str, str] | None:
    """Return the status and the reason of a start that lives; None if its process is gone."""
    process, prefix = start["process"], start["prefix"]
    alive = is_alive(process)
    if alive is None:  # on another host
        silent = time.time() - start["now"]
        if not is_url(where):
            with contextlib.suppress(OSError):
                silent = abs(seconds_since_write(path_of(where, prefix, start["number"])))
        alive = silent < _SILENT
    if not alive:
        return None
    with contextlib.suppress(OSError):
        for waiting in read_stalls(where, prefix)[0]:
            if waiting["stall"] and (waiting["process"] or waiting["pid"] == process.get("pid")):
                return HANGS, f"process {waiting['process']} at step {waiting.get('step')}: {waiting['what']}"
    return RUNNING, ""


def _refused(facts: Sequence[Mapping[str, Any]], number: int) -> dict[str, Any] | None:
    """Return the newest start that ended without a step, if it is later than the one that ended the run."""
    later = itertools.takewhile(lambda fact: fact["number"] > number and fact["first"] is None, reversed(facts))
    ended = next((fact for fact in later if fact["ended"] is not None), None)
    names = ("status", "reason", "exception", "config")
    return ended and {"time": ended["ended"], **{name: ended[name] for name in names}}


def _examples(starts: Sequence[Start]) -> int | None:
    """Return the number of examples up to the last step; None if the rows of a batch are unknown."""
    count = 0.0
    limit = math.inf
    for start in reversed(valid(starts)):
        first, last = start["step"] or (0, 0)
        if first < min(last, limit):
            if start["examples"] is None:
                return None
            count += total_at(start, limit, start["examples"], 2)
            limit = first
    return round(count)


def _best(where: str, start: Start, *, is_copy: bool) -> tuple[dict[str, tuple[float, int]], dict[str, str]]:
    """Return the best values with their steps, and their checkpoints, if these exist and are of the run's own steps."""
    best, paths = dict[str, tuple[float, int]](), dict[str, str]()
    parent_step = -1 if start["parent"] is None else start["parent"]["step"]
    for name, (value, step, recorded) in start["best"].items():
        path = _moved(recorded, start["directory"], where, is_copy=is_copy)
        above, checkpoint = split_path(path)
        with contextlib.suppress(Exception):
            stored = open_store(above).at(checkpoint.rpartition("-")[0], int(checkpoint.rpartition("-")[2]))
            if stored is not None and step > parent_step:
                best[name], paths[name] = (value, step), path
    return best, paths


def _best_notes(where: str, starts: Sequence[Start], ending: Start, trained: Start) -> dict[str, str]:
    """Return notes on best values that are not comparable with the newest start, or worse than the parent's."""
    notes = dict[str, str]()
    parent = _parent(where, ending)
    parent_step = -1 if parent is None else parent[1]
    values = {} if parent is None else _best_of_parent(*parent)
    values |= {name: (value, step) for name, (value, step, _) in ending["best"].items() if step <= parent_step}
    for name in values.keys() & (ending["best"].keys() | ending["kept"].keys()):
        value, step = values[name]
        branch_value, branch_step, _ = ending["best"].get(name, (math.nan, -1, ""))
        is_max = name in ending["kept"] and ending["kept"][name]["mode"] == "max"
        if branch_step <= parent_step or (value > branch_value if is_max else value < branch_value):
            notes[name] = f"{value:.4g} at {step} is its parent's"
    for name, (_, step, _) in ending["best"].items():
        made = [start for start in valid(starts) if (span := start["step"]) is not None and span[0] < step <= span[1]]
        made_by = made[-1] if made else trained
        data = [start["kept"][name]["data"] if name in start["kept"] else None for start in (made_by, trained)]
        if name not in notes and changes({"config": made_by["config"]}, {"config": trained["config"]}).lines:
            notes[name] = "measured with another config"
        elif name not in notes and None not in data and data[0] != data[1]:
            notes[name] = "measured on other data"
    return notes


def _best_of_parent(path: str, parent_step: int) -> dict[str, tuple[float, int]]:
    """Return the best values in the record of a parent, of the steps before the branch."""
    folder, checkpoint = split_path(path)
    found = dict[str, tuple[float, int]]()
    with contextlib.suppress(OSError):
        for start in valid(read_starts(folder).get(checkpoint.rpartition("-")[0], ())):
            found |= {name: (value, step) for name, (value, step, _) in start["best"].items() if step <= parent_step}
    return found


def _parent(where: str, start: Start) -> tuple[str, int] | None:
    parent = start["parent"]
    return parent and (_moved(parent["path"], start["directory"], where), parent["step"])


def _moved(path: str, before: str | None, where: str, *, is_copy: bool = False) -> str:
    """Return the path of a checkpoint that may have been moved together with its run."""
    if before is None or before == where or is_url(where) or is_url(path):
        return path
    relative = os.path.relpath(path, before)
    moved = os.path.normpath(os.path.join(where, relative))
    if relative.startswith(os.pardir):
        return moved if not os.path.isdir(os.path.dirname(path)) and os.path.isdir(os.path.dirname(moved)) else path
    # At `before` there may be another run by now; but a copy may lack what the original has.
    return path if is_copy and not os.path.isdir(moved) else moved
