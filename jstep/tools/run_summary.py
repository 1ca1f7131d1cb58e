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
from jstep.hooks.stall_files import exit_reason, read_stalls
from jstep.stores.files import seconds_since_write
from jstep.stores.owners import is_alive
from jstep.stores.starts import KILLED, Start, has_trained, last_trained, original_of, path_of, read_starts, totals
from jstep.stores.urls import is_url, split_path
from jstep.tools.goodput import of_run

RUNNING, HANGS, FINISHED, UNREADABLE = "running", "hangs", "finished", "unreadable"
_ENDS = (FINISHED, "interrupted", "failed", KILLED)
"""The ends that a timeline records."""
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


def summarize(where: str, starts: Sequence[Start]) -> RunSummary:
    """Summarize a run of its newest starts; whatever its files hold, this raises nothing."""
    prefix = starts[-1]["prefix"]
    try:
        if problem := starts[-1].get("problem"):
            raise ValueError(f"its newest start {problem}")
        return _summary(where, [start for start in starts if not start.get("problem")])
    except Exception as error:
        return unreadable_run(where, prefix, error)


def _summary(where: str, starts: Sequence[Start]) -> RunSummary:
    newest, known, prefix = starts[-1], totals(starts), starts[-1]["prefix"]
    trained, source = last_trained(starts), original_of(where, starts)
    start = trained or newest
    life = None if source is not None else _life(where, prefix, newest)
    lives = {id(newest): life, **{id(one): (RUNNING, "") for one in starts[:-1] if _lives_unclaimed(one)}}
    facts = [_facts(one, lives.get(id(one))) for one in starts]
    if life is None and not newest.get("end"):  # an earlier one has its reason from a later one
        facts[-1]["reason"] = exit_reason(where, prefix, newest["opened"])
        if source is not None:
            facts[-1]["reason"] = facts[-1]["reason"] or f"a copy of {source}"
    fact = next(facts[i] for i, one in enumerate(starts) if one is start)
    shown = fact if life is None else facts[-1]
    parent, process = known["parent"], newest.get("process") or {}
    of = functools.partial(_moved, before=newest.get("directory"), where=where, is_copy=source is not None)
    moved = {name: of(item[2]) for name, item in known["best"].items()}
    moved = {name: path for name, path in moved.items() if _is_there(path)}
    best = {name: item for name, item in known["best"].items() if name in moved}
    return RunSummary(
        path=where,
        prefix=prefix,
        status=shown["status"],
        reason=shown["reason"],
        step=known["step"] or 0 if trained is None else trained["step"][1],
        last_step=start.get("last_step"),
        metrics={name: float(value) for name, value in known["values"].items()},
        best={name: (float(value), at) for name, (value, at, *_) in best.items()},
        started=known["since"],
        ended=None if life is not None else facts[-1]["ended"],
        wall_seconds=known["wall"],
        devices=fact["devices"],
        parent=parent and (_moved(parent["path"], newest.get("directory"), where), parent["step"]),
        parameters=start.get("parameters"),
        peak_bytes=known["peak_bytes"],
        mfu=known["mfu"],
        goodput=of_run(starts).fraction,
        config=fact["config"],
        commit=fact["commit"],
        edits=fact["edits"],
        exception=shown["exception"],
        run=newest.get("run"),
        parent_run=known["parent_run"],
        host=process.get("host"),
        pid=process.get("pid"),
        examples=_examples(starts),
        best_checkpoints=moved,
        start=start["start"],
        refused=_refused(facts if life is None else facts[:-1]),
        starts=facts,
        starts_count=newest["count"],
    )


def trained_start(run: RunSummary) -> Start:
    """Return the newest start, up to the one that the run is, that has a card; an empty one if there is none."""
    starts: Sequence[Start] = ()
    with contextlib.suppress(OSError):
        starts = read_starts(run.path).get(run.prefix, ())
    return start_with_card(starts, run.start)


def start_with_card(starts: Sequence[Start], name: str | None = None) -> Start:
    last = next((i for i, start in enumerate(starts) if start.get("start") == name), len(starts) - 1)
    return next((start for start in reversed(starts[: last + 1]) if start.get("card")), {})


def _facts(start: Mapping[str, Any], life: tuple[str, str] | None) -> dict[str, Any]:
    """Return the facts about a start, `life` being what it does, if it lives."""
    status, reason = life or start.get("end") or (KILLED, "")
    process = start.get("process") or {}
    first, last = start["step"] if has_trained(start) else (None, None)
    return {
        "began": start["began"],
        "ended": None if life is not None else start.get("now") or start["time"],
        "first": first,
        "last": last,
        "status": status if life is not None or status in _ENDS else KILLED,
        "reason": reason,
        **{name: start.get(name) for name in ("exception", "config", "argv")},
        **{name: start.get(name) for name in ("commit", "edits")},
        "host": process.get("host"),
        "pid": process.get("pid"),
        "devices": start.get("devices") or "",
    }


def _refused(ended: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    later = list(itertools.takewhile(lambda fact: fact["first"] is None, reversed(ended)))
    if not later or len(later) == len(ended):  # nothing was tried later, or nothing trained
        return None
    return {"time": later[0]["ended"], **{name: later[0][name] for name in ("status", "reason", "exception", "config")}}


def _examples(starts: Sequence[Start]) -> int | None:
    """Return the examples of the steps that led to the last one; None if the rows of a batch are not known."""
    count, limit = 0, math.inf
    for start in reversed(starts):
        first, last = start.get("step") or (0, 0)
        if first < min(last, limit):
            saved, examples = start.get("saved") or (None, 0.0, None), start.get("examples")
            if examples is None:
                return None
            if limit < last:
                share = round(examples * (int(limit) - first) / (last - first))
                examples = saved[2] if saved[0] == limit and saved[2] is not None else share
            count += examples
            limit = first
    return count if starts[0].get("before") is None or starts[0].get("copied") else None


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


def _life(where: str, prefix: str, start: Start) -> tuple[str, str] | None:
    """Return what a start does, from its claim and process; None if it has ended."""
    if start.get("end"):
        return None
    owner: Mapping[str, Any] | None = start.get("process")
    if start.get("claims", True) and not is_url(where):
        claims = None
        with contextlib.suppress(OSError, ValueError, RecursionError):
            claims = read_claim(where, prefix)
        owner = claims if owner in (None, claims) else None
    alive = is_alive(owner) if owner else False
    if alive is None:  # on another host
        silent = time.time() - start["now"]
        if not is_url(where):
            with contextlib.suppress(OSError):
                path = path_of(where, prefix, start["number"])
                silent = abs(seconds_since_write(path))
        alive = silent < _SILENT
    if not alive:
        return None
    with contextlib.suppress(OSError):
        for waiting in read_stalls(where, prefix)[0]:
            if waiting["stall"] and (waiting["process"] or waiting["pid"] == (owner or {}).get("pid")):
                return HANGS, f"process {waiting['process']} at step {waiting.get('step')}: {waiting['what']}"
    return RUNNING, ""
