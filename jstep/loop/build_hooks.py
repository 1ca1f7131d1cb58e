"""The hooks of a run, the user's and the built-in ones, and the event file that they share."""

import contextlib
import json
from typing import Any, NamedTuple

import jax

from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.hooks.history import check_paths
from jstep.hooks.reporting import LoggingHook, SummarySaverHook
from jstep.hooks.speed import StepCounterHook
from jstep.loop.run_context import RunContext
from jstep.loop.saving import RunSaverHook
from jstep.record.starts import FINISHED, valid
from jstep.stores.owners import is_alive, this_process
from jstep.stores.urls import is_url, location
from jstep.summary.new_event_files import STARTS, starts_here, suffix_of_run
from jstep.summary.writer import SummaryWriter


class BuiltHooks(NamedTuple):
    """The hooks of a run, savers last, and the counter and the writer that they share."""

    hooks: list[Any]
    counter: StepCounterHook
    writer: SummaryWriter | None


def build_hooks(run: RunContext) -> BuiltHooks:
    check_paths(run.options.hooks)
    options, writer = run.options, _open_writer(run)
    savers = [hook for hook in options.hooks if isinstance(hook, CheckpointSaverHook)]
    hooks = [hook for hook in options.hooks if not isinstance(hook, CheckpointSaverHook)]
    has_summary_hook = any(isinstance(hook, SummarySaverHook) and hook.takes_writer for hook in hooks)
    counter = next((hook for hook in hooks if isinstance(hook, StepCounterHook)), None)
    if counter is None:
        counter = StepCounterHook(every_n_steps=options.log_steps or options.save_summaries_steps or 100)
        hooks.append(counter)
    progress_hooks = [hook for observer in run.observers if (hook := observer.progress_hook()) is not None]
    hooks += progress_hooks
    is_logged = options.log_steps is not None and not any(hook.replaces_log_lines for hook in progress_hooks)
    if is_logged and options.progress is not False and jax.process_index() == 0:
        hooks.append(LoggingHook(every_n_steps=options.log_steps, leave_out=lambda: run.constant_metrics().keys()))
    if writer is not None and options.save_summaries_steps is not None and not has_summary_hook:
        hooks.append(SummarySaverHook(save_steps=options.save_summaries_steps))
    if run.saver is not None:
        savers.insert(0, RunSaverHook(options, run.saver))
    return BuiltHooks(hooks + savers, counter, writer)  # a checkpoint includes the other hooks' changes to the state


_FLUSH_SECS, _BUCKET_FLUSH_SECS = 1.0, 10.0
"""The seconds after which a background thread writes events, and in a bucket, where each upload has a price."""


def _open_writer(run: RunContext) -> SummaryWriter | None:
    options, origin = run.options, run.origin
    if options.logdir is None or options.where is None:
        return None
    prefix = options.prefix_of(run.saver)
    suffix = suffix_of_run(location(options.logdir, "logdir"), options.where, prefix, run.name)
    secs = _BUCKET_FLUSH_SECS if is_url(options.logdir) else _FLUSH_SECS
    writer = run.closing.enter_context(SummaryWriter(options.logdir, filename_suffix=suffix, flush_secs=secs))
    if writer.path is not None:
        # The point of a restored step is kept. A run that begins again may evaluate before its first step again.
        first = run.course.first + (origin.restored is not None)
        is_resumed = origin.restored is not None and not run.is_new_branch
        same_place = is_resumed or not _is_another_run(run)
        if starts_here(writer.path, first, same_place=same_place, is_new=origin.restored is None):
            for _ in range(STARTS):
                writer.add_session_log("START", first)
    if options.config and jax.process_index() == 0:
        plain = {
            name: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for name, value in options.config.items()
        }
        with contextlib.suppress(ImportError):  # TensorBoard is not installed
            writer.add_hparams(plain)
    return writer


def _is_another_run(run: RunContext) -> bool:
    earlier = [] if run.file is None else valid(run.file.earlier)
    if not earlier:
        return False
    process, end = earlier[-1]["process"], earlier[-1]["end"]
    return end[0] == FINISHED if end else process != this_process() and bool(is_alive(process))
