"""The summary of a run: what was trained, how it ended or whether it lives, and what was tried later."""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jstep.checkpoint.claims import read_claim
from jstep.checkpoint.open_store import open_store
from jstep.core.stopwatch import STEPPING
from jstep.hooks.cards import Start, read_starts, start_with_card
from jstep.hooks.stall_files import exit_reason, read_stalls
from jstep.stores.growing_files import seconds_since_write
from jstep.stores.owners import is_alive
from jstep.stores.run_record import Record, has_trained, last_trained, original_of, record_path, times_of
from jstep.stores.timeline import CONFIG, KILLED, TIMELINE_FILE, is_step
from jstep.stores.urls import is_url, join_path, split_path
from jstep.tools.goodput import by_start, sum_starts

RUNNING, HANGS, FINISHED, UNREADABLE = "running", "hangs", "finished", "unreadable"
_ENDS = (FINISHED, "interrupted", "failed", KILLED)
"""The ends that a timeline records."""
_DONE = "done"
"""The end of a start of an older version that reached its last step."""
_SILENT = 120.0
"""Seconds after which a run on another host, whose times do not change, counts as dead."""


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """Summary of one run: a directory and a checkpoint prefix with a timeline.

    A run is what was trained: `last_step`, `config`, `commit`, `edits`, `devices` and `parameters` are those of the
    newest start that took a step, whatever was tried later; of the newest one where none did. `status`, `reason` and
    `exception` are, too, unless the newest start lives.

    Attributes:
        path: The directory or URL.
        prefix: The prefix of its checkpoints.
        status: `"running"`, `"hangs"`, `"finished"`, `"interrupted"`, `"failed"`, `"killed"`, or `"unreadable"`.
        reason: Why it finished, which signal or exception ended it, or what it is waiting for; may be empty.
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
        exception: The name of the class of the exception that ended it.
        run: The name of the run that its checkpoints have.
        parent_run: That name of its parent.
        host: The host of the newest start.
        pid: The process ID of the newest start.
        examples: The number of examples that were trained on until `step`.
        best_checkpoints: Name → path of the checkpoint with the best value, which `start_from` takes.
        refused: The newest later start that took no step and has ended, such as one whose model does not fit: `time`,
            `status`, `reason`, `exception` and `config`.
        start: The name, in its timeline, of the start that the run is.
        starts: The starts, oldest first, at most the last 100, each with `began`, `ended`, `first` and `last` (the
            steps before its first and after its last update), `status`, `reason`, `exception`, `config`, `argv`,
            `commit`, `edits`, `host`, `pid` and `devices`.
        starts_count: The number of all starts.
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
    start: str | None = None
    starts: Sequence[Mapping[str, Any]] = ()
    starts_count: int = 0

    @property
    def nonfinite(self) -> list[str]:
        """The names of metrics whose last or best value is NaN or infinite."""
        named = [*self.metrics.items(), *((name, value) for name, (value, _) in self.best.items())]
        return list(dict.fromkeys(name for name, value in named if not math.isfinite(value)))


def summary_fields(run: RunSummary) -> dict[str, Any]:
    """Return the fields of a run; a metric that is not finite is None, and among `nonfinite`."""

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return dataclasses.asdict(run) | {
        "metrics": {name: finite(value) for name, value in run.metrics.items()},
        "best": {name: (finite(value), step) for name, (value, step) in run.best.items()},
        "nonfinite": run.nonfinite,
    }


def unreadable_run(where: str, prefix: str, error: Exception) -> RunSummary:
    why = str(error) if isinstance(error, OSError | ValueError) else f"its timeline is damaged: {error!r}"
    return RunSummary(where, prefix, UNREADABLE, error=why)


def summarize(where: str, record: Record) -> RunSummary:
    """Summarize a run; whatever its files hold, this raises nothing."""
    try:
        if record.problem:
            raise ValueError(f"its timeline {record.problem}")
        return _summary(where, record)
    except Exception as error:
        return unreadable_run(where, record.prefix, error)


def _summary(where: str, record: Record) -> RunSummary:
    if not all(start.get("process") for start in record.starts):
        record.starts = _with_cards(where, record.prefix, record.starts)
    newest, totals = record.starts[-1], record.totals()
    trained = last_trained(record.starts)
    start, source = trained or newest, original_of(where, record)
    life = None if source is not None else _life(where, record.prefix, newest, is_shared=len(record.prefixes) > 1)
    lives = {id(newest): life, **{id(one): (RUNNING, "") for one in record.starts[:-1] if _lives_unclaimed(one)}}
    facts = [_facts(one, lives.get(id(one))) for one in record.starts]
    if life is None and not (newest.get("end") or newest.get(_DONE)):  # an earlier one has its reason from a later one
        facts[-1]["reason"] = exit_reason(where, record.prefix, newest["opened"])
    if life is None and source is not None and not newest.get("end"):
        facts[-1]["reason"] = facts[-1]["reason"] or f"a copy of {source}"
    fact = facts[record.starts.index(start)]
    shown = fact if life is None else facts[-1]
    parent, process = totals["parent"], newest.get("process") or {}
    of = functools.partial(_moved, before=newest.get("directory"), where=where, is_copy=source is not None)
    moved = {name: of(item[2]) for name, item in totals["best"].items() if len(item) == 3}
    moved = {name: path for name, path in moved.items() if _is_there(path)}
    # Of older versions it is not known which checkpoint that is.
    best = {name: item for name, item in totals["best"].items() if name in moved or len(item) < 3}
    return RunSummary(
        path=where,
        prefix=record.prefix,
        status=shown["status"],
        reason=shown["reason"],
        step=totals["step"] or 0 if trained is None else trained["step"][1],
        last_step=start.get("last_step"),
        metrics={name: float(value) for name, value in totals["values"].items()},
        best={name: (float(value), at) for name, (value, at, *_) in best.items()},
        started=totals["since"],
        ended=None if life is not None else facts[-1]["ended"],
        wall_seconds=totals["wall"],
        devices=fact["devices"],
        parent=parent and (_moved(parent["path"], newest.get("directory"), where), parent["step"]),
        parameters=start.get("parameters"),
        peak_bytes=totals["peak_bytes"],
        mfu=totals["mfu"],
        goodput=sum_starts(by_start([_times(one) for one in record.starts])).fraction
        if record.before is None
        else None,
        config=fact[CONFIG],
        commit=fact["commit"],
        edits=fact["edits"],
        exception=shown["exception"],
        run=newest.get("run"),
        parent_run=totals["parent_run"],
        host=process.get("host"),
        pid=process.get("pid"),
        examples=_examples(record),
        best_checkpoints=moved,
        start=start["start"],
        refused=_refused(facts if life is None else facts[:-1]),
        starts=facts,
        starts_count=record.count,
    )


def trained_start(run: RunSummary, starts: Sequence[Start] | None = None) -> Start:
    """Return the start whose card is that of a run, of all starts of its directory.

    It has no card if that is invalid, or none can be read.
    """
    starts = _read_starts(run.path) if starts is None else starts
    return start_with_card(starts, run.prefix, run.start) or Start("", run.prefix)


def _read_starts(where: str) -> Sequence[Start]:
    with contextlib.suppress(OSError, ValueError):
        return read_starts(where)
    return ()


def _with_cards(where: str, prefix: str, starts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return starts, those that an older version wrote with what only their cards have."""
    every = _read_starts(where)
    cards = {start["start"]: start_with_card(every, prefix, start["start"]) for start in starts}
    return [start if start.get("process") else _with_card(start, cards[start["start"]]) for start in starts]


def _with_card(start: dict[str, Any], of_start: Start | None) -> dict[str, Any]:
    """Return a start that an older version wrote, which did not record how it ended."""
    card = {} if of_start is None else of_start.card or {}
    last_step, of = (card.get("arguments") or {}).get("last_step"), card.get("devices") or {}
    is_done = is_step(last_step) and start["step"] is not None and start["step"][1] >= last_step
    known = {"last_step": last_step if is_step(last_step) else None, _DONE: (FINISHED, "") if is_done else None}
    return {**start, **known, "devices": f"{of.get('of_state', '?')}×{of.get('kind', '?')}"}


def _facts(start: Mapping[str, Any], life: tuple[str, str] | None) -> dict[str, Any]:
    """Return the facts about a start, `life` being what it does, if it lives."""
    status, reason = life or start.get("end") or start.get(_DONE) or (KILLED, "")
    process = start.get("process") or {}
    first, last = start["step"] if has_trained(start) else (None, None)
    return {
        "began": start["began"],
        "ended": None if life is not None else start.get("now") or start["time"],
        "first": first,
        "last": last,
        "status": status if life is not None or status in _ENDS else KILLED,
        "reason": reason,
        **{name: start.get(name) for name in ("exception", CONFIG, "argv")},
        "commit": (start.get("commit") or "").strip() or None,  # older versions pad it
        "edits": start.get("edits"),
        "host": process.get("host"),
        "pid": process.get("pid"),
        "devices": start.get("devices") or "",
    }


def _refused(ended: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    later = list(itertools.takewhile(lambda fact: fact["first"] is None, reversed(ended)))
    if not later or len(later) == len(ended):  # nothing was tried later, or nothing trained
        return None
    return {"time": later[0]["ended"], **{name: later[0][name] for name in ("status", "reason", "exception", CONFIG)}}


def _times(start: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the lines with times of a start that goodput needs."""
    lines = [times_of(start)]
    if start["step"] is not None and (saved := start.get("saved")) is not None:
        at = {"step": [start["step"][0], saved[0]], "seconds": {STEPPING: saved[1]}, "checkpoint": saved[0]}
        lines.insert(0, times_of({**start, **at}))
    return lines


def _examples(record: Record) -> int | None:
    """Return the examples of the steps that led to the last one; None if the rows of a batch are not known."""
    count, limit = 0, math.inf
    for start in reversed(record.starts):
        first, last = start["step"] or (0, 0)
        if first < min(last, limit):
            saved, examples = start.get("saved") or (None, 0.0, None), start.get("examples")
            if examples is None:
                return None
            if limit < last:
                share = round(examples * (int(limit) - first) / (last - first))
                examples = saved[2] if saved[0] == limit and saved[2] is not None else share
            count += examples
            limit = first
    return count if record.before is None else None


def _is_there(path: str) -> bool:
    above, name = split_path(path)
    with contextlib.suppress(Exception):
        prefix, _, step = name.rpartition("-")
        return open_store(above).at(prefix, int(step)) is not None
    return False


def _moved(path: str, before: str | None, where: str, *, is_copy: bool = False) -> str:
    """The path of a checkpoint, which may have been moved together with the run."""
    if before is None or before == where or is_url(where) or is_url(path):
        return path
    own = os.path.relpath(path, before)
    moved = os.path.normpath(os.path.join(where, own))
    if own.startswith(os.pardir):
        return moved if not os.path.isdir(os.path.dirname(path)) and os.path.isdir(os.path.dirname(moved)) else path
    # At `before` there may be another run by now; but a copy may lack what the original has.
    return path if is_copy and not os.path.isdir(moved) else moved


def _lives_unclaimed(start: Mapping[str, Any]) -> bool:
    """Whether a start lives that is not the newest one: several may, if there are no checkpoints."""
    process = start.get("process")
    return not start.get("end") and not start.get("claims", True) and bool(process and is_alive(process))


def _life(where: str, prefix: str, start: Mapping[str, Any], *, is_shared: bool) -> tuple[str, str] | None:
    """Return what a start does, from its claim and process; None if it has ended."""
    if start.get("end"):
        return None
    owner = start.get("process")  # older versions do not record it
    if start.get("claims", True) and not is_url(where):
        claims = None
        with contextlib.suppress(OSError, ValueError, RecursionError):
            claims = read_claim(where, prefix)
        owner = claims if owner in (None, claims) else None
    alive = is_alive(owner) if owner else False
    if alive is None:  # on another host
        silent = time.time() - (start.get("now") or start["time"])
        own = [record_path(where, prefix), *[join_path(where, TIMELINE_FILE)] * (not is_shared)]  # older versions
        for path in [] if is_url(where) else own:
            with contextlib.suppress(OSError):
                silent = abs(seconds_since_write(path))
                break
        alive = silent < _SILENT
    if not alive:
        return None
    with contextlib.suppress(OSError):
        for waiting in read_stalls(where, prefix)[0]:
            if waiting["stall"] and (waiting["process"] or waiting["pid"] == (owner or {}).get("pid")):
                return HANGS, f"process {waiting['process']} at step {waiting.get('step')}: {waiting['what']}"
    return RUNNING, ""
