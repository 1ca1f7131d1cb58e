"""The hooks of a run, the user's and the built-in ones, and the event file that they share."""

import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any

import jax

from jstep.core import processes
from jstep.evaluating.evaluation_hook import EvaluationHook
from jstep.hooks.saver_hook import SaverHook
from jstep.logs.history import check_paths
from jstep.logs.reporting import LoggingHook, SummarySaverHook, uses_writer_of_run
from jstep.logs.speed import StepCounterHook
from jstep.loop.arguments import Options
from jstep.loop.run_context import RunContext
from jstep.loop.saving import RunSaverHook
from jstep.record.starts import FINISHED, valid
from jstep.stores.owners import is_alive, this_process
from jstep.stores.urls import is_url
from jstep.summary.new_event_files import marks_of_start, remove_event_file, suffix_of_run
from jstep.summary.writer import SummaryWriter

NO_LOGS = "the logs cannot be opened"


def build_hooks(run: RunContext) -> list[Any]:
    """Return the user's hooks, jstep's, and savers last: a checkpoint has what the other hooks did to the state.

    Sets `writer`, `counter` and `evaluations` of the run.
    """
    return processes.share_errors(lambda: _list_hooks(run), NO_LOGS)


def _list_hooks(run: RunContext) -> list[Any]:
    check_paths(run.options.hooks)
    run.writer = _open_writer(run)
    savers = [hook for hook in run.options.hooks if isinstance(hook, SaverHook)]
    hooks = [hook for hook in run.options.hooks if not isinstance(hook, SaverHook)]
    run.counter = _find_counter(hooks, run.options)
    if all(hook is not run.counter for hook in hooks):
        hooks.append(run.counter)
    hooks += _logs_for(run, hooks)
    if run.saver is not None:
        # First, as the exit by a signal or an error names the outcome of the first saver. `ending.py` calls it last.
        savers.insert(0, RunSaverHook(run, run.saver))
    run.evaluations = [hook for hook in hooks if isinstance(hook, EvaluationHook)]
    return hooks + savers


def _find_counter(hooks: list[Any], options: Options) -> StepCounterHook:
    """Return the user's counter of steps, or one that is due when something shows its rate."""
    for hook in hooks:
        if isinstance(hook, StepCounterHook):
            return hook
    return StepCounterHook(every_n_steps=options.log_steps or options.save_summaries_steps or 100)


def _logs_for(run: RunContext, hooks: list[Any]) -> list[Any]:
    """Return the hooks that show the run: a progress line or log lines, and summaries unless the user has a hook."""
    options = run.options
    logs: list[Any] = []
    for observer in run.observers:
        hook = observer.progress_hook()
        if hook is not None:
            logs.append(hook)
    is_shown = any(observer.replaces_log_lines for observer in run.observers)
    wants_lines = options.log_steps is not None and options.progress is not False and not is_shown
    if wants_lines and jax.process_index() == 0:
        logs.append(LoggingHook(every_n_steps=options.log_steps, leave_out=lambda: run.constant_metrics().keys()))
    has_summaries = any(isinstance(hook, SummarySaverHook) and uses_writer_of_run(hook) for hook in hooks)
    if run.writer is not None and options.save_summaries_steps is not None and not has_summaries:
        logs.append(SummarySaverHook(save_steps=options.save_summaries_steps))
    return logs


# The event file.

_FLUSH_SECS = 1.0
"""The seconds after which a background thread writes events."""
_BUCKET_FLUSH_SECS = 10.0
"""The same in a bucket, where each upload has a price."""


def _open_writer(run: RunContext) -> SummaryWriter | None:
    options = run.options
    if options.logdir is None or options.directory is None:
        return None
    suffix = suffix_of_run(os.fspath(options.logdir), options.directory, options.prefix, run.name)
    secs = _BUCKET_FLUSH_SECS if is_url(options.logdir) else _FLUSH_SECS
    paths: list[str] = []  # filled below, once the writer has a path
    run.closing.callback(_remove_if_idle, run, paths)  # pushed first, and so called after the writer is closed
    writer = run.closing.enter_context(SummaryWriter(options.logdir, filename_suffix=suffix, flush_secs=secs))
    if writer.path is not None:
        paths += _mark_start(run, writer, writer.path)
    if options.config and jax.process_index() == 0:
        with contextlib.suppress(ImportError):  # TensorBoard is not installed
            writer.add_hparams(_as_hparams(options.config))
    return writer


def _mark_start(run: RunContext, writer: SummaryWriter, path: str) -> list[str]:
    """Mark where this start begins, so that TensorBoard drops what it replaces; return the files that this made."""
    is_restored = run.restored is not None
    first = run.course.first
    if is_restored:
        # TensorBoard drops the points from this step on. A run that resumes does not make the point at the restored
        # step again, so that one is kept. A fresh run may evaluate its first state, which makes the point at `first`.
        first += 1
    is_resumed = is_restored and not run.is_new_branch
    owns_directory = is_resumed or not _follows_other_run(run)
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
    """Remove the event files of a start that has found the end of the run, and had nothing to do there.

    This is known only once it has ended, as its batches may turn out to be used up.
    """
    is_idle = run.course.has_found_end and run.course.is_finished and not run.course.has_trained
    if not is_idle:
        return
    for path in paths:
        with contextlib.suppress(OSError):  # a bucket may allow no deletion
            remove_event_file(path)


def _follows_other_run(run: RunContext) -> bool:
    """Whether the start before this one, which does not resume, belongs to another run.

    It does if it has finished, or if its process is alive. If it was killed, or has failed, this start makes the same
    steps again, and replaces it.
    """
    earlier = [] if run.file is None else valid(run.file.earlier)
    if not earlier:
        return False
    end = earlier[-1]["end"]
    if end:
        return end[0] == FINISHED
    process = earlier[-1]["process"]
    return process != this_process() and bool(is_alive(process))
