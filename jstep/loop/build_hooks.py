"""Assemble user-supplied and stock hooks."""

import importlib.util
import logging
import sys
from typing import Any

import jax

from jstep.evaluating.evaluator import EvaluationHook
from jstep.hooks.counters import StepCounterHook
from jstep.hooks.hook import Hook, name_of
from jstep.hooks.nan_loss import NanLossHook, NonfiniteParametersHook
from jstep.hooks.report import LoggingHook, ProgressHook, SummarySaverHook
from jstep.hooks.run_hook import RunHook
from jstep.hooks.stock import CheckpointSaverHook
from jstep.loop.run import Run
from jstep.loop.run_saver_hook import RunSaverHook
from jstep.loop.timeline_recorder import TimelineRecorder

_logger = logging.getLogger("jstep")

_NOT_CALLED = ("after_call", "after_first_call", "after_last", "before_save", "close", "use_writer")
"""Methods that `train` called on every hook in jstep 0.2 and earlier."""


def build_hooks(run: Run, recorder: TimelineRecorder) -> None:
    """Open the event file, append the stock hooks to the user's, and give the run to the stock hooks.

    Args:
        run: The run.
        recorder: The recorder of its times.
    """
    options = run.options
    run.writer = _open_writer(run)
    # Hooks that save come last: the checkpoint of a step includes the other hooks' changes to the state.
    own = sorted(options.hooks, key=lambda hook: isinstance(hook, CheckpointSaverHook))
    _warn_of_methods_not_called(own)
    run.evaluations = tuple(hook for hook in own if isinstance(hook, EvaluationHook))
    run.counter = _first(own, StepCounterHook)
    run.hooks = list(own)
    if run.counter is None:
        run.counter = StepCounterHook(every_n_steps=options.log_steps or options.save_summaries_steps or 100)
        run.hooks.append(run.counter)
    reporting = _reporting(run)
    run.hooks += reporting
    run.logs_lines = any(isinstance(hook, LoggingHook) for hook in reporting)
    summed = any(isinstance(hook, SummarySaverHook) and hook.takes_writer for hook in own)
    if run.writer is not None and options.save_summaries_steps is not None and not summed:
        steps, constants = options.save_summaries_steps, run.constant_metrics
        run.hooks.append(SummarySaverHook(run.writer, save_steps=steps, leave_out=constants))
    if (run.saver is not None or _first(own, CheckpointSaverHook)) and not _first(own, NanLossHook):
        run.hooks.append(NonfiniteParametersHook())
    if run.saver is not None:
        # A run that resumes from a checkpoint does not write earlier summaries and times again.
        before = [recorder.before_save] if run.writer is None else [run.writer.drain, recorder.before_save]
        run.flushes += [recorder.flush] if run.writer is None else [run.writer.settle, recorder.flush]
        run.hooks.append(RunSaverHook(run, before))
    for hook in run.hooks:
        if isinstance(hook, RunHook):
            run.closing.callback(hook.close)
            hook.use_run(run)
    if run.saver is not None:
        for flush in run.flushes:
            run.closing.enter_context(run.saver.flushing(flush))


def _first(hooks: list[Any], kind: type) -> Any:
    return next((hook for hook in hooks if isinstance(hook, kind)), None)


def _warn_of_methods_not_called(hooks: list[Any]) -> None:
    """Warn about hooks written for jstep 0.2, some of whose methods are not called."""
    for hook in hooks:
        names = [name for name in _NOT_CALLED if callable(getattr(type(hook), name, None))]
        if names and not isinstance(hook, RunHook):
            _logger.warning(
                "hooks: %s has %s, which train does not call (jstep 0.2 did); see jstep.Hook for what it calls. "
                "Use `end`, or close what the hook opened around train: with contextlib.closing(hook)",
                name_of(hook),
                ", ".join(names),
            )


def _reporting(run: Run) -> list[Hook]:
    """The hook that reports progress: a progress line, log lines, or none."""
    options = run.options
    if options.progress is False or jax.process_index() != 0:
        return []
    terminal = sys.stderr is not None and sys.stderr.isatty() and importlib.util.find_spec("tqdm")
    if options.progress or terminal:
        return [ProgressHook(last_step=options.end)]
    if options.log_steps is None:
        return []
    return [LoggingHook(every_n_steps=options.log_steps, counter=run.counter, leave_out=run.constant_metrics)]


def _open_writer(run: Run) -> Any:
    if run.logdir is None:
        return None
    from jstep.summary.writer import SummaryWriter

    writer = run.closing.enter_context(SummaryWriter(run.logdir))
    # TensorBoard drops the events of earlier runs from this step on, so nothing is shown twice.
    writer.add_session_log("START", run.first + 1)
    return writer
