"""The summary of a run: what it trained, how it ended or runs, and later starts without a step."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jstep.checkpoint.names import open_store
from jstep.core.checks import format_list
from jstep.core.tables import printable
from jstep.look.goodput import SAVED_EXAMPLES, goodput_of_starts, total_at
from jstep.look.run_folder import HANGS, RUNNING, UNREADABLE, RunFolder, run_folder
from jstep.record.differences import changes
from jstep.record.schema import Start
from jstep.record.starts import FINISHED, has_trained
from jstep.stores.untrusted import RecordedRun, is_below_or_beside, step_in
from jstep.stores.urls import split_path

_SHOWN = 100
"""The number of the newest starts that a summary lists."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Summary of one run: a directory and a checkpoint prefix with a record of starts.

    `last_step`, `config`, `commit`, `edits`, `devices` and `parameters` are those of the newest
    start that took a step, if one did. `status`, `reason` and `exception` are those of a living
    start, or else of the one that ended the run.

    Attributes:
        path: The directory or URL.
        prefix: The prefix of its checkpoints.
        status: `"running"`, `"hangs"`, `"finished"`, `"interrupted"`, `"failed"`, `"killed"`, or
            `"unreadable"`.
        reason: Why it finished, which signal or exception ended it, what it is waiting for, or that
            its newest start cannot be read; may be empty.
        step: The last step that is known; 0 before the first one.
        last_step: The step at which it ends; None if something else ends it, or if it is not known.
        metrics: Name → last value, of scalar metrics and of evaluations.
        best: Name → best value and its step, if a `KeepBest` keeps its checkpoint.
        started: When its first start began, in seconds since 1970; None if it cannot be read.
        ended: The time of its last sign of life; None while it runs.
        wall_seconds: The seconds of all starts.
        devices: The devices, such as `"2×NVIDIA H100"`.
        parent: The checkpoint that it branched from, and its step, or None.
        error: Why it cannot be read, or None.
        parameters: The number of parameters. This and the following fields are None, empty or 0 if
            unknown.
        peak_bytes: The peak memory of a device, the largest.
        mfu: The utilization of the devices.
        goodput: The share of its time in which it trained.
        config: The `config` that `train` was given.
        commit: The commit of its code.
        edits: A hash of uncommitted edits of that code; None without any.
        exception: The name of the class of the exception that ended it; None after a signal.
        run_id: The ID of the run, which its checkpoints have.
        parent_run: That ID of its parent.
        host: The host of the newest start.
        pid: The process ID of the newest start.
        examples: The number of examples that were trained on until `step`.
        best_checkpoints: Name → path of the checkpoint with the best value, which `start_from`
            takes.
        refused: The newest later start that took no step and has ended: `time`, `status`, `reason`,
            `exception` and `config`.
        starts: The starts, oldest first, at most the last 100, each with its `number`, `first` and
            `last` step, `status`, `reason`, `config`, `saved`, `milliseconds` a step of each phase,
            and `state_changes`; all fields are in `docs/recipes/branches.md`. If one cannot be
            read, its `problem` says why.
        starts_count: The number of all starts.
        newest_checkpoint: The path of its newest checkpoint that is not corrupted, as far as its
            manifest shows; None if there is none. A restart resumes from it, if `reason` names no
            newer one that is.
        best_notes: Name → that the best value was measured with another config or on other data, or
            that a better one is its parent's.
        former_paths: Its earlier directories, from before it was moved.
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
    run_id: str | None = None
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
        names: dict[str, None] = {}
        for name, value in self.metrics.items():
            if not math.isfinite(value):
                names[name] = None
        for name, (value, _) in self.best.items():
            if not math.isfinite(value):
                names[name] = None
        return list(names)


def as_json_fields(run: RunSummary) -> dict[str, Any]:
    """Return the fields of a run; a metric that is not finite is None, and among `nonfinite`."""

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return vars(run) | {
        "metrics": {name: finite(value) for name, value in run.metrics.items()},
        "best": {name: (finite(value), step) for name, (value, step) in run.best.items()},
        "nonfinite": run.nonfinite,
    }


def unreadable_run(where: str, prefix: str, error: Exception) -> RunSummary:
    why = f"its record is damaged: {error!r}"
    if isinstance(error, OSError | ValueError):
        why = str(error)
    return RunSummary(path=where, prefix=prefix, status=UNREADABLE, error=printable(why))


def summarize(folder: RunFolder) -> RunSummary:
    """Summarize a run; whatever its files hold, this raises nothing."""
    try:
        if not folder.valid_starts:
            raise ValueError(f"its newest start {folder.starts[-1]['problem']}")
        return _summary(folder)
    except Exception as error:
        return unreadable_run(folder.path, folder.prefix, error)


def _summary(folder: RunFolder) -> RunSummary:
    """Summarize a run that has a start that can be read.

    Each of these starts answers for a part of it:

    - `newest`: the ID of the run, and its parent.
    - `trained`: what was trained. It is the newest one that took a step, or one that takes steps
      now.
    - `ending`: the metrics. It is `trained`, or a later one that only called the hooks that were
      left.
    - `active`, if a start lives: the status, host and PID. Otherwise the status is of `ending`, the
      others of `newest`.
    """
    starts = folder.valid_starts
    newest = starts[-1]
    facts = folder.facts
    living = [start_facts for start_facts in facts if start_facts["status"] in (RUNNING, HANGS)]
    # Several may live, if a run was started twice. We show the newest that takes steps, or else the
    # newest.
    active = max(
        living,
        key=lambda start_facts: (start_facts["first"] is not None, start_facts["number"]),
        default=None,
    )
    latest = active or folder.facts_of(newest)
    trained = folder.representative
    if active is not None and active["first"] is not None:
        trained = next(start for start in starts if start["number"] == active["number"])
    ending = _ending(starts, trained)
    shown = active or folder.facts_of(ending)

    problem = folder.starts[-1]["problem"]
    checkpoint = folder.newest_checkpoint
    reasons = [f"its newest start {problem}" if problem else shown["reason"]]
    reasons.append(format_list(checkpoint.problems, 3, "; "))
    for start_facts in living:
        if start_facts is not active:
            reasons.append(
                f"start {start_facts['number']} (process {start_facts['pid']} on "
                f"{start_facts['host']}) {RUNNING}, too"
            )
    ended = None
    if not living:
        ended = max(
            start_facts["ended"] for start_facts in facts if start_facts["ended"] is not None
        )
    wall_seconds = math.fsum(secs for start in starts for secs in start["seconds"].values())
    peaks = [start["peak_bytes"] or 0 for start in starts]
    utilization = None
    for start in starts:
        utilization = start["mfu"] or utilization
    # A copy was not elsewhere before: its record has the directories of the original.
    former_paths: Sequence[str] = () if folder.original else _former_paths(folder)
    best, paths = _best(folder, ending)
    return RunSummary(
        path=folder.path,
        prefix=folder.prefix,
        status=shown["status"],
        reason="; ".join(filter(None, reasons)),
        step=_last_known_step(starts, trained),
        last_step=trained["last_step"],
        metrics=ending["values"],
        metrics_left_out=ending["values_left_out"] or 0,
        best=best,
        started=starts[0]["began"],
        ended=ended,
        wall_seconds=wall_seconds,
        devices=trained["devices"] or "",
        parent=_parent(folder, newest),
        parameters=trained["parameters"],
        peak_bytes=max(peaks, default=0) or None,
        mfu=utilization,
        goodput=goodput_of_starts(folder.starts).fraction,
        config=trained["config"],
        commit=trained["commit"],
        edits=trained["edits"],
        exception=shown["exception"],
        run_id=newest["run"],
        parent_run=newest["parent_run"],
        host=latest["host"],
        pid=latest["pid"],
        examples=_examples(starts),
        best_checkpoints=paths,
        best_notes=_best_notes(folder, ending, trained),
        refused=_refused(facts, ending["number"]),
        starts=facts[-_SHOWN:],
        starts_count=len(folder.starts),
        newest_checkpoint=checkpoint.path,
        former_paths=former_paths,
    )


def _last_known_step(starts: Sequence[Start], trained: Start) -> int:
    if trained["step"] is not None and has_trained(trained):
        return trained["step"][1]
    for start in reversed(starts):
        if start["step"] is not None:
            return start["step"][1]
    return 0


def _former_paths(folder: RunFolder) -> list[str]:
    former: dict[str, None] = {}
    for start in folder.valid_starts:
        directory = start["directory"]
        if directory is not None and not folder.recorded_run(start).is_at(directory):
            former[directory] = None
    return list(former)


def _ending(starts: Sequence[Start], trained: Start) -> Start:
    """The start that ended a run: one that trained, or a later one that called remaining hooks."""
    if trained["step"] is None or _has_finished(trained):
        return trained
    reached = trained["step"][1]
    for start in starts:
        if start["number"] <= trained["number"] or start["last_step"] != trained["last_step"]:
            continue
        if start["step"] is None or not _has_finished(start):
            continue
        first, last = start["step"]
        if first == last == reached:
            return start
    return trained


def _has_finished(start: Start) -> bool:
    return start["end"] is not None and start["end"][0] == FINISHED


def _refused(facts: Sequence[Mapping[str, Any]], number: int) -> dict[str, Any] | None:
    """The newest start that ended without a step, if it is later than the run's ending one."""
    for start_facts in reversed(facts):
        if start_facts["number"] <= number or start_facts["first"] is not None:
            return None
        if start_facts["ended"] is not None:
            refused = {"time": start_facts["ended"]}
            for name in ("status", "reason", "exception", "config"):
                refused[name] = start_facts[name]
            return refused
    return None


def _examples(starts: Sequence[Start]) -> int | None:
    """The number of examples up to the last step; None if the rows of a batch are unknown."""
    count = 0.0
    # From the newest start to the oldest: the steps of a start after `limit` were repeated by a
    # later one.
    limit = math.inf
    for start in reversed(starts):
        first, last = start["step"] or (0, 0)
        if first >= min(last, limit):
            continue
        if start["examples"] is None:
            return None
        count += total_at(start, limit, start["examples"], column=SAVED_EXAMPLES)
        limit = first
    return round(count)


def _best(folder: RunFolder, start: Start) -> tuple[dict[str, tuple[float, int]], dict[str, str]]:
    """The best values with their steps, and their checkpoints if they exist and are the run's own.

    A checkpoint elsewhere that somebody else recorded is not looked for: it is as recorded.
    """
    best: dict[str, tuple[float, int]] = {}
    paths: dict[str, str] = {}
    parent_step = _parent_step(start)
    recorded_run = folder.recorded_run(start)
    for name, (value, step, recorded) in start["best"].items():
        if step <= parent_step:
            continue
        path = _where_to_look(recorded, recorded_run)
        if path is None or _is_checkpoint(path):
            best[name] = value, step
            paths[name] = path or recorded
    return best, paths


def _is_checkpoint(path: str) -> bool:
    directory, checkpoint = split_path(path)
    prefix, _, digits = checkpoint.rpartition("-")
    step = step_in(digits)
    with contextlib.suppress(Exception):
        return step is not None and open_store(directory).find_path(prefix, step) is not None
    return False


def _best_notes(folder: RunFolder, ending: Start, trained: Start) -> dict[str, str]:
    """Notes on best values not comparable with the newest start, or worse than the parent's."""
    notes = _notes_on_parent(folder, ending)
    for name in ending["best"]:
        if name in notes:
            continue
        note = _note_on_origin(folder, ending, trained, name)
        if note is not None:
            notes[name] = note
    return notes


def _notes_on_parent(folder: RunFolder, ending: Start) -> dict[str, str]:
    """Name → a note for each metric whose best value before the branch beats that after it."""
    notes: dict[str, str] = {}
    parent_step = _parent_step(ending)
    inherited = _best_of_parent(folder, ending)
    for name, (value, step, _) in ending["best"].items():
        if step <= parent_step:
            inherited[name] = value, step
    for name, (value, step) in inherited.items():
        if name not in ending["best"] and name not in ending["kept"]:
            continue
        branch_value, branch_step, _ = ending["best"].get(name, (math.nan, -1, ""))
        is_max = name in ending["kept"] and ending["kept"][name]["mode"] == "max"
        is_better = value > branch_value if is_max else value < branch_value
        if branch_step <= parent_step or is_better:
            notes[name] = f"{value:.4g} at {step} is its parent's"
    return notes


def _note_on_origin(folder: RunFolder, ending: Start, trained: Start, name: str) -> str | None:
    """Return why a best value may not compare with values of the last start that trained."""
    _, step, path = ending["best"][name]
    if step > _parent_step(ending) and _where_to_look(path, folder.recorded_run(ending)) is None:
        return "as recorded: its checkpoint is elsewhere, and was not looked for"
    measured = _start_that_took(step, folder.valid_starts) or trained
    if changes({"config": measured["config"]}, {"config": trained["config"]}).lines:
        return "measured with another config"
    if name in measured["kept"] and name in trained["kept"]:
        data = measured["kept"][name]["data"]
        data_now = trained["kept"][name]["data"]
        if None not in (data, data_now) and data != data_now:
            return "measured on other data"
    return None


def _start_that_took(step: int, starts: Sequence[Start]) -> Start | None:
    """Return the newest start that took a step; None if that was before them, or in a parent."""
    for start in reversed(starts):
        first, last = start["step"] or (0, 0)
        if first < step <= last:
            return start
    return None


def _best_of_parent(folder: RunFolder, start: Start) -> dict[str, tuple[float, int]]:
    """The best values in the record of a parent, of the steps before the branch."""
    best: dict[str, tuple[float, int]] = {}
    parent = start["parent"]
    if parent is None:
        return best
    path = _where_to_look(parent["path"], folder.recorded_run(start))
    if path is None:
        return best
    directory, checkpoint = split_path(path)
    prefix = checkpoint.rpartition("-")[0]
    with contextlib.suppress(OSError):
        for parent_start in run_folder(directory, prefix).valid_starts:
            for name, (value, step, _) in parent_start["best"].items():
                if step <= parent["step"]:
                    best[name] = value, step
    return best


def _parent_step(start: Start) -> int:
    """The step at which a start's run was branched; −1 if it was not."""
    return -1 if start["parent"] is None else start["parent"]["step"]


def _parent(folder: RunFolder, start: Start) -> tuple[str, int] | None:
    parent = start["parent"]
    if parent is None:
        return None
    path = _where_to_look(parent["path"], folder.recorded_run(start))
    return path or parent["path"], parent["step"]


def _where_to_look(path: str, run: RecordedRun) -> str | None:
    """The path to look for a checkpoint, moved with its run or not; None if nobody may look."""
    moved = run.moved(path)
    if moved == path or run.directory is None:
        return run.find(path)
    if not os.path.relpath(path, run.directory).startswith(os.pardir):
        if not is_below_or_beside(moved, run.where):
            return None
        # At `directory` there may be another run by now; but a copy may lack what the original has.
        return path if run.is_in_original(path) and not os.path.isdir(moved) else moved
    # It was not in the run, which may have been moved alone, or as part of a larger directory.
    may_be_opened = is_below_or_beside(path, run.where)
    if may_be_opened and os.path.isdir(os.path.dirname(path)):
        return path
    if is_below_or_beside(moved, run.where) and os.path.isdir(os.path.dirname(moved)):
        return moved
    return path if may_be_opened else None
