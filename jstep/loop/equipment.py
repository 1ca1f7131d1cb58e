"""Assemble the hooks of a run: the user's, and the stock ones behind them."""

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
    ProgressHook,
    StepCounterHook,
    SummarySaverHook,
)
from jstep.hooks.hook import RunInfo, name_of
from jstep.hooks.pending import Pending
from jstep.hooks.run_hook import RunHook
from jstep.hooks.sums import Sums
from jstep.loop.beginning import Beginning
from jstep.loop.options import Options
from jstep.loop.programs import Programs
from jstep.loop.saving import RunSaverHook, Wiring

_logger = logging.getLogger("jstep")

_NOT_CALLED = ("after_call", "after_first_call", "after_last", "before_save", "close", "use_writer")
"""Methods that `train` called on every hook up to jstep 0.2."""


class Equipment(NamedTuple):
    """What surrounds the steps of a run.

    Attributes:
        hooks: All hooks, the user's before the stock ones.
        saving: The run's own hook that saves, or None.
        run: What jstep's own hooks know of the run.
        logs_lines: Whether the run reports by log lines.
    """

    hooks: list[Any]
    saving: RunSaverHook | None
    run: RunInfo
    logs_lines: bool

    @property
    def all_saving(self) -> list[CheckpointSaverHook]:
        """All that save, the user's before the run's own."""
        return [hook for hook in self.hooks if isinstance(hook, CheckpointSaverHook)]


def equipment(
    options: Options,
    begin: Beginning,
    programs: Programs,
    wiring: Wiring,
    stack: contextlib.ExitStack,
    stop_wished: Callable[[], bool],
) -> Equipment:
    """Opens the event file, and puts the stock hooks behind the user's."""
    writer = _open_writer(stack, options.logdir, begin.step)
    # Who saves comes last: the checkpoint of a step holds what the others made of its state.
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
    saving = None
    if begin.saver is not None:
        saving = RunSaverHook(
            begin.saver,
            options.save_checkpoint_secs,
            options.save_checkpoint_steps,
            list(hooks),
            wiring,
            # A run that goes on from a checkpoint does not write the points before it again.
            None if writer is None else writer.flush,
            begin.held,
        )
        hooks.append(saving)
    run = RunInfo(
        last_step=options.last_step,
        sums=Sums(lambda: programs.skip_metric, constants),
        pending=Pending(),
        steps_per_call=options.steps_per_call,
        logdir=options.logdir,
        writer=writer,
        saver=begin.saver,
        constant_metrics=constants,
        counter=counter,
        evaluations=tuple(hook for hook in own if isinstance(hook, EvaluationHook)),
        stop_wished=stop_wished,
        dispatched=programs.dispatched,
        watch=wiring.watch,
    )
    for hook in hooks:
        if isinstance(hook, RunHook):
            stack.callback(hook.close)
            hook.use_run(run)
    return Equipment(hooks, saving, run, any(isinstance(hook, LoggingHook) for hook in reporting))


def _warn_of_methods_not_called(hooks: list[Any]) -> None:
    """Hooks written for jstep 0.2 are not silently cut short."""
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
    """The line on a terminal, or log lines, or nothing."""
    if options.progress is False or jax.process_index() != 0:
        return []
    terminal = sys.stderr is not None and sys.stderr.isatty() and importlib.util.find_spec("tqdm")
    if options.progress or terminal:
        return [ProgressHook(last_step=options.last_step)]
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
    # TensorBoard drops what earlier runs wrote at this step and later ones, so nothing is shown twice.
    writer.add_session_log("START", start + 1)
    return writer
