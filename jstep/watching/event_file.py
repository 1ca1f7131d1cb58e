"""The observer that writes the event file of a run."""

import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any

from jstep.core import processes
from jstep.hooks.origin import Kind
from jstep.logs.reporting import SummarySaverHook, uses_writer_of_run
from jstep.loop.observer import Observer
from jstep.loop.run_context import RunContext
from jstep.record.run_record import earlier_starts
from jstep.record.starts import FINISHED
from jstep.stores.owners import is_alive, this_process
from jstep.stores.urls import is_url
from jstep.summary.new_event_files import marks_of_start, remove_event_file, suffix_of_run
from jstep.summary.writer import SummaryWriter, drain, sync_to_disk

_FLUSH_SECS = 1.0
"""The seconds after which a background thread writes events."""
_BUCKET_FLUSH_SECS = 10.0
"""The same in a bucket, where each upload has a price."""


class EventFile(Observer):
    """The observer that opens the event file, and adds summaries unless a user's hook does."""

    options = frozenset({"logdir", "save_summaries_steps"})

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._writer: SummaryWriter | None = None

    def make_hooks(self, hooks: Sequence[Any]) -> Sequence[Any]:
        options = self._run.options
        self._writer = _open_writer(self._run)
        if self._writer is None:
            return ()
        self._run.shared[SummaryWriter] = self._writer
        has_summaries = any(
            isinstance(hook, SummarySaverHook) and uses_writer_of_run(hook) for hook in hooks
        )
        if options.save_summaries_steps is None or has_summaries:
            return ()
        return (SummarySaverHook(save_steps=options.save_summaries_steps),)

    def on_save(self, step: int) -> dict[str, Any]:
        """Hand all summaries over.

        A run that resumes from this checkpoint does not write earlier ones again.
        """
        if self._writer is not None:
            try:
                drain(self._writer)
            except Exception as error:
                self._run.log_failed(self._writer, error)
        return {}

    def flush(self) -> None:
        if self._writer is not None:
            sync_to_disk(self._writer)


def _open_writer(run: RunContext) -> SummaryWriter | None:
    options = run.options
    if options.logdir is None or options.directory is None:
        return None
    suffix = suffix_of_run(
        os.fspath(options.logdir), options.directory, options.prefix, run.origin.name
    )
    secs = _BUCKET_FLUSH_SECS if is_url(options.logdir) else _FLUSH_SECS
    paths: list[str] = []  # filled below, once the writer has a path
    # Pushed first, and so called after the writer is closed.
    run.closing.callback(_remove_if_idle, run, paths)
    writer = run.closing.enter_context(
        SummaryWriter(options.logdir, filename_suffix=suffix, flush_secs=secs)
    )
    if writer.path is not None:
        paths += _mark_start(run, writer, writer.path)
    if options.config and processes.is_process_0():
        with contextlib.suppress(ImportError):  # TensorBoard is not installed
            writer.add_hparams(_as_hparams(options.config))
    return writer


def _mark_start(run: RunContext, writer: SummaryWriter, path: str) -> list[str]:
    """Mark where this start begins; return the files that this made.

    With the mark, TensorBoard drops what this start replaces.
    """
    is_restored = run.origin.is_restored
    first = run.course.first
    if is_restored:
        # TensorBoard drops the points from this step on. A run that resumes does not make the point
        # at the restored step again, so that one is kept. A fresh run may evaluate its first state,
        # which makes the point at `first`.
        first += 1
    owns_directory = run.origin.kind is Kind.RESUMED or not _follows_other_run(run)
    marks = marks_of_start(path, first, owns_directory=owns_directory, is_new=not is_restored)
    for _ in range(marks.repeats):
        writer.add_session_log("START", first)
    return [path, *marks.new_paths]


def _as_hparams(config: dict[str, Any]) -> dict[str, Any]:
    hparams: dict[str, Any] = {}
    for name, value in config.items():
        hparams[name] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    return hparams


def _remove_if_idle(run: RunContext, paths: Sequence[str]) -> None:
    """Remove the event files of a start that found the end of the run, and had nothing to do.

    This is known only once it has ended, as its batches may turn out to be used up.
    """
    is_idle = run.origin.has_found_end and run.course.is_finished and not run.course.has_trained
    if not is_idle:
        return
    for path in paths:
        with contextlib.suppress(OSError):  # a bucket may allow no deletion
            remove_event_file(path)


def _follows_other_run(run: RunContext) -> bool:
    """Whether the start before this one, which does not resume, belongs to another run.

    It does if it has finished, or if its process is alive. If it was killed, or has failed, this
    start makes the same steps again, and replaces it.
    """
    earlier = earlier_starts(run)
    if not earlier:
        return False
    end = earlier[-1]["end"]
    if end:
        return end[0] == FINISHED
    process = earlier[-1]["process"]
    return process != this_process() and bool(is_alive(process))
