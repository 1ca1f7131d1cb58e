"""Assemble user-supplied and stock hooks."""

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jstep.hooks import (
    CheckpointSaverHook,
    EvaluationHook,
    Hook,
    LoggingHook,
    NanLossHook,
    ProgressHook,
    StepCounterHook,
    SummarySaverHook,
)
from jstep.hooks.async_transfer import TransferQueue
from jstep.hooks.hook import RunInfo, name_of
from jstep.hooks.nonfinite_parameters import NonfiniteParametersHook
from jstep.hooks.run_hook import RunHook
from jstep.loop.options import Options
from jstep.loop.programs import Programs
from jstep.loop.restore_or_init import RunStart
from jstep.loop.run_saver_hook import RunSaverHook, SaverCallbacks

_logger = logging.getLogger("jstep")

_NOT_CALLED = ("after_call", "after_first_call", "after_last", "before_save", "close", "use_writer")
"""Methods that `train` called on every hook in jstep 0.2 and earlier."""


class HookSet(NamedTuple):
    """The hooks of a run.

    Attributes:
        hooks: All hooks, the user's before the stock ones.
        saving: The stock hook that saves, or None.
        run: The information about the run that stock hooks receive.
        logs_lines: Whether progress is reported by log lines.
    """

    hooks: list[Any]
    saving: RunSaverHook | None
    run: RunInfo
    logs_lines: bool

    @property
    def all_saving(self) -> list[CheckpointSaverHook]:
        """All hooks that save, the user's before the stock one."""
        return [hook for hook in self.hooks if isinstance(hook, CheckpointSaverHook)]


def build_hooks(
    options: Options,
    start: RunStart,
    programs: Programs,
    callbacks: SaverCallbacks,
    stack: contextlib.ExitStack,
    stop_requested: Callable[[], bool],
) -> HookSet:
    """Open the event file, and append the stock hooks to the user's."""
    writer = _open_writer(stack, options.logdir, start.step)
    # Hooks that save come last: the checkpoint of a step includes the other hooks' changes to the state.
    own = sorted(options.hooks, key=lambda hook: isinstance(hook, CheckpointSaverHook))
    _warn_of_methods_not_called(own)
    given = next((hook for hook in own if isinstance(hook, StepCounterHook)), None)
    counter = given or StepCounterHook(every_n_steps=options.log_steps or options.save_summaries_steps or 100)

    def constants() -> Any:
        return programs.constant_metrics

    reporting = _reporting(options, counter, constants)
    hooks = [*own, *([] if given else [counter]), *reporting]
    summed = any(isinstance(hook, SummarySaverHook) and hook.takes_writer for hook in own)
    if writer is not None and options.save_summaries_steps is not None and not summed:
        hooks.append(SummarySaverHook(writer, save_steps=options.save_summaries_steps, leave_out=constants))
    if (start.saver is not None or _any(own, CheckpointSaverHook)) and not _any(own, NanLossHook):
        hooks.append(NonfiniteParametersHook())
    saving = None
    if start.saver is not None:
        saving = RunSaverHook(
            start.saver,
            options.save_checkpoint_secs,
            options.save_checkpoint_steps,
            list(hooks),
            callbacks,
            # A run that resumes from a checkpoint does not write earlier summaries again.
            None if writer is None else writer.flush,
            start.held,
        )
        hooks.append(saving)
    run = RunInfo(
        last_step=options.end,
        sums=programs.sums,
        transfers=TransferQueue(),
        steps_per_call=options.steps_per_call,
        logdir=options.logdir,
        writer=writer,
        saver=start.saver,
        restored=start.restored,
        constant_metrics=constants,
        counter=counter,
        evaluations=tuple(hook for hook in own if isinstance(hook, EvaluationHook)),
        stop_requested=stop_requested,
        dispatched=programs.dispatched,
        watch=callbacks.watch,
        current_state=callbacks.current_state,
        before_save=callbacks.before_save,
    )
    for hook in hooks:
        if isinstance(hook, RunHook):
            stack.callback(hook.close)
            hook.use_run(run)
    return HookSet(hooks, saving, run, any(isinstance(hook, LoggingHook) for hook in reporting))


def _any(hooks: list[Any], kind: type) -> bool:
    return any(isinstance(hook, kind) for hook in hooks)


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


def _reporting(options: Options, counter: StepCounterHook, constants: Any) -> list[Hook]:
    """The hook that reports progress: a progress line, log lines, or none."""
    if options.progress is False or jax.process_index() != 0:
        return []
    terminal = sys.stderr is not None and sys.stderr.isatty() and importlib.util.find_spec("tqdm")
    if options.progress or terminal:
        return [ProgressHook(last_step=options.end)]
    return (
        [LoggingHook(every_n_steps=options.log_steps, counter=counter, leave_out=constants)]
        if options.log_steps
        else []
    )


def _open_writer(stack: contextlib.ExitStack, logdir: Any, start: int) -> Any:
    if logdir is None:
        return None
    from jstep.summary import SummaryWriter

    writer = stack.enter_context(SummaryWriter(logdir))
    # TensorBoard drops the events of earlier runs from this step on, so nothing is shown twice.
    writer.add_session_log("START", start + 1)
    return writer
