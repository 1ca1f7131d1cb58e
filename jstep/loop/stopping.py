"""How a run ends at each moment: what a signal, an error and a stall do, and what is saved.

| moment | phase | a signal or `stop_secs` | an error | a stall, with `StallHook(exit_secs=…)` |
|---|---|---|---|---|
| start | starting | exits immediately; saves nothing | is raised; nothing to save | ends |
| waiting for a batch | waiting | stops waiting, saves | saves | another thread saves |
| compiling | starting | stops tracing, or leaves XLA running, saves | saves | ends |
| in a call | stepping | finishes the iteration, saves | the state is lost | ends |
| in a hook | hooks | finishes the iteration, saves | calls the others; saves nothing | ends |
| in the last evaluation | evaluating | abandons it until a restart, saves | saves nothing | ends |
| in an evaluation | evaluating | finishes the iteration, saves | saves nothing | ends |
| in the body of a loop | hooks | finishes the iteration, saves | saves nothing | ends |
| in a save | saving | finishes it | is raised, and says what is saved | ends; the save may exist |
| in an `end` | hooks | finishes it; saves the pre-end state, or all | the former | ends; it stays |
| after the loop | hooks | exits after the block; all is saved | all is saved | ends; all is saved |
| closing | saving | closes the rest; all is saved | closes the rest | ends; all is saved |

If the last column only says *ends*, nothing is saved. The pre-end state is the one before the
`end`s; after an error, it alone is saved.

A second SIGINT exits immediately, at any moment. In `train` and in `Run`, an iteration is a call,
its hooks, and the body of the loop. If the body makes the batches, the iteration is the body with
all its calls, and the time of the body itself counts as waiting. A restart resumes only between two
iterations, so if an error or an exit ends an iteration early, nothing of it is saved. "The last
evaluation" is that of an iteration, not of the run: neither a body nor a hook that may replace the
state follows it. Evaluations before the first step and at the end count as such, too. `ending.py`
defines the end.

The exit code is that of `Preempted`, `KeyboardInterrupt` or the error, and 75 after a stall.
Nothing is saved if a loss or the parameters are not finite, or if a hook prevents it. An evaluation
by `jstep.evaluator` is abandoned between two batches; any other function is finished. Another
thread saves if the user's loader stalls. Several processes stop after the same call; if one of them
fails or stalls, nothing is saved.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any, NoReturn

from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import engine_of
from jstep.core import interactive, processes, trees
from jstep.core.checks import hook_name
from jstep.core.exceptions import note, note_other
from jstep.core.logs import BELOW_BAR, logger
from jstep.core.threads import done_in_time
from jstep.hooks.course import ENDING, Activity, HookCall
from jstep.hooks.run_extra import STOPPED
from jstep.hooks.saver_hook import SaverHook
from jstep.loop.hook_errors import HookErrors
from jstep.loop.run_context import RunContext
from jstep.loop.saving import RunSaverHook, describe_restart, find_own_saver, why_not_saved
from jstep.state.train_state import TrainState

# The normal end of a run, also one that takes no step.


def report_early_end(run: RunContext) -> None:
    """Report that the batches have ended; without a single step in a new run, that is an error."""
    first = run.course.first
    last_step = run.options.last_step
    if run.step == first and run.origin.is_restored:
        logger.info(
            "the batches are used up at step %d, at which the run was restored: it is finished",
            first,
        )
        return
    if run.step == first:
        raise ValueError(
            f"batches: there is no batch for step {first}, the first of this run "
            f"(last_step={last_step}); give batches up to that step, such as jstep.batches(…), or "
            "a list of all of them, which begins with step 0"
        )
    if last_step is None:
        logger.info("the batches ended after step %d, and so does the run", run.step)
        return
    logger.warning(
        "The batches ended after step %d, before last_step=%d: the run ends there. For more passes "
        "over the data, give jstep.batches(…, num_epochs=None), or an iterable that does not end, "
        "see docs: recipes/loaders#epochs",
        run.step,
        last_step,
        extra=BELOW_BAR,
    )


def report_done(run: RunContext) -> None:
    """Report that there is no step to take."""
    first = run.course.first
    last_step = run.options.stop_step
    if first > last_step:
        text = (
            "last_step=%d: the run is already at step %d; there is nothing left to run. Give a "
            "larger last_step"
        )
        logger.warning(text, last_step, first, extra=BELOW_BAR)
        return
    reason = _stop_reason(run) if first < last_step else ""
    why = f". {reason}" if reason else ""
    logger.info("the run is already at step %d; there is nothing left to run%s", first, why)


def _stop_reason(run: RunContext) -> str:
    """Describe which hook keeps the run stopped; "" if none does."""
    name = run.origin.extra.get(STOPPED)
    if name is not None:
        remedy = (
            "remove that hook, change its settings, or reset its state: EarlyStopping(reset=True)"
        )
        return f"{name} stopped it at step {run.course.first}; to continue, {remedy}"
    for hook in run.options.hooks:
        reason = getattr(hook, "stop_reason", None)
        if isinstance(reason, str):
            return reason
    return ""


# A signal, or the end of `stop_secs`.


def exit_on_signal(run: RunContext) -> NoReturn:
    """Let each saver save, and raise the exception that obeys the signal."""
    when = f"after step {run.step}"
    finiteness = run.components.finiteness
    runner = run.components.runner
    savers, why = finiteness.hooks_that_may_save()
    # The user's savers had all saved when the mark was written. If this start takes no step, they
    # have nothing more to save. But the mark of a new branch is its parent's.
    has_saved = run.origin.has_found_end and not run.origin.is_new_branch
    is_idle = has_saved and not run.course.has_trained
    outcomes = list[str]()
    errors = HookErrors(run.course)
    for hook in savers:
        if is_idle and not isinstance(hook, RunSaverHook):
            continue
        with errors:
            outcomes.append(_save(run, hook))
    errors.end()
    runner.raise_log_errors_of_all()
    if len(savers) < len(finiteness.savers):
        _raise_if_not_finite(run)
        raise run.signals.stop_error(f"{when}, which is not saved: {why}")
    if outcomes:
        raise run.signals.stop_error(f"{when}, which {outcomes[0]}")
    raise run.signals.stop_error(when)


def _raise_if_not_finite(run: RunContext) -> None:
    """Raise an error if values that are not finite prevent a save.

    It is more specific than the exception of the signal.
    """
    run.components.prevents_save(run.step)  # here, a `NanLossHook` raises an even better one
    finiteness = run.components.finiteness
    for hook in finiteness.savers:
        finiteness.require_finite(run.step, hook.saver)


def exit_immediately(step: int, error: KeyboardInterrupt) -> NoReturn:
    again = KeyboardInterrupt(
        f"SIGINT was received twice: the run ended immediately, at step {step}"
    )
    attach_state(again, getattr(error, "state", None))
    raise again.with_traceback(None) from None


def exit_after_closing(run: RunContext, state: TrainState | None) -> NoReturn:
    error = run.signals.stop_error(f"after step {run.step}, while it closed")
    attach_state(error, state)
    if state is not None:
        interactive.keep(state)
    raise error


# An error, or a stall.


def note_closing(run: RunContext, error: Exception, state: TrainState) -> None:
    attach_state(error, state)
    step = run.step
    note(
        error,
        f"jstep: at step {step}, while the run closed; the state after step {step} is in its "
        "`state`.",
    )


def attach_last_state(run: RunContext, error: BaseException) -> bool:
    """Attach the state to the error; return whether it is lost."""
    is_lost = trees.is_donated(run.state)
    attach_state(error, None if is_lost else run.state)
    return is_lost


def attach_state(error: BaseException, state: TrainState | None) -> None:
    with contextlib.suppress(Exception):  # a class of exceptions may reject attributes
        error.state = state  # type: ignore[attr-defined]


_UNPRINTED = SystemExit, GeneratorExit, asyncio.CancelledError
"""Exceptions whose notes nobody sees, as Python does not print them: they get a line in the log."""


def rescue(run: RunContext, error: BaseException) -> None:
    """Save the state, if a restart may resume from it, and attach it to the error with a note."""
    place = _describe_place(run)  # before the state is saved, which is another activity
    # An exit of the user's own that came after a signal does not obey that signal.
    obeys_signal = run.signals.received_twice or run.signals.has_raised(error)
    outcome = _save_and_attach(run, error, obeys_signal=obeys_signal)
    text = f"{place}{outcome}."
    note(error, f"jstep: {text}")
    if isinstance(error, _UNPRINTED) and not obeys_signal:
        logger.warning("%s ends the run %s", type(error).__name__, text, extra=BELOW_BAR)


def _save_and_attach(run: RunContext, error: BaseException, *, obeys_signal: bool) -> str:
    """Save and attach the state; return the outcome, as the rest of the error's note."""
    signals = run.signals
    runner = run.components.runner
    noted = {str(error)}

    def failed(other: BaseException) -> None:
        if str(other) not in noted:  # a log fails again at each checkpoint
            noted.add(str(other))
            note_other(error, other)

    if not signals.received_twice:
        runner.call_at_last_step(failed)
    if attach_last_state(run, error):
        return f". The state was donated to a step: it is lost{describe_restart(run)}"
    has_savers = bool(run.components.finiteness.savers)
    saved = ""
    if has_savers and not run.course.is_resumable:
        saved = f", and is not saved, {why_not_saved(run)}{describe_restart(run)}"
    elif has_savers and run.course.has_trained and not obeys_signal:
        saved = _save_after_error(run, error)
        runner.raise_log_errors(failed)
    is_kept = run.course.has_trained and interactive.keep(run.state)
    also = " and in jstep.interrupted_state()" if is_kept else ""
    return f"; the state after step {run.step} is in the exception's `state`{also}{saved}"


STALL_EXIT_CODE = 75
"""`EX_TEMPFAIL` of sysexits.h: a launcher may restart the run."""


def exit_after_stall(
    run: RunContext, *, may_save: bool, save_secs: float, grace_secs: float
) -> NoReturn:
    """End a process that stalls, from another thread.

    Args:
        may_save: Whether this is the only process and it stalls in the user's loader, between two
            iterations, so that its state may be saved.
        save_secs: How long a save may take.
        grace_secs: How long to wait before the exit, so that other processes report their stall.
    """
    has_unsaved = run.is_open and run.saver is not None and run.course.has_trained
    if may_save and has_unsaved:
        if not _call_in_thread(lambda: logger.warning("%s", save_stalled_run(run)), save_secs):
            log_in_time(f"step {run.step} could not be saved within {save_secs:.0f} s")
    elif run.course.status == ENDING and run.saver is not None:
        # It waits for the pre-end checkpoint.
        _call_in_thread(engine_of(run.saver).wait_until_finished, save_secs)
    _call_in_thread(lambda: print(end="", flush=True))
    _call_in_thread(logging.shutdown)
    time.sleep(grace_secs)
    os._exit(STALL_EXIT_CODE)


def log_in_time(text: str) -> None:
    _call_in_thread(lambda: logger.warning("%s", text))


def _call_in_thread(fn: Callable[[], Any], seconds: float = 5.0) -> bool:
    """Call a function that may wait for a lock of code that hangs; return if it ended in time."""
    return done_in_time(fn, seconds, name="jstep-stall")


def save_stalled_run(run: RunContext) -> str:
    step = run.step
    finiteness = run.components.finiteness
    own_saver = find_own_saver(run)
    assert own_saver is not None  # `exit_after_stall` calls this only in a run that saves
    try:
        why = why_not_saved(run)
        if why:
            return f"step {step} is not saved, {why}{describe_restart(run)}"
        savers, why = finiteness.hooks_that_may_save()
        if own_saver not in savers:
            return f"step {step} is not saved: {why}"
        own_saver.save_without_peers(step, run.state, is_finite=not finiteness.nonfinite_params())
    except Exception as error:
        return f"step {step} could not be saved: {_error_clause(error)}"
    name = checkpoint_name(own_saver.saver.prefix, step)
    return f"step {step} is saved as {name}, with the states of hooks of the save before"


def _save_after_error(run: RunContext, error: BaseException) -> str:
    """Let each saver save; return what the note says of the state, as the rest of a sentence."""
    if not processes.is_single_process():
        # Savers would call collectives here, so the state is on disk only if it was saved before.
        own_saver = find_own_saver(run)
        if own_saver is not None and own_saver.has_saved_state(run.step, run.state):
            name = checkpoint_name(own_saver.saver.prefix, run.step)
            return f", and is saved as {name}; start the run again to resume"
        return f", and is not saved: the other processes may be elsewhere{describe_restart(run)}"
    savers, why = run.components.finiteness.hooks_that_may_save(error)
    if not savers:
        reason = f": {why}" if why else ""
        return f", and is not saved{reason}{describe_restart(run)}"
    try:
        why = why_not_saved(run)
    except Exception as failure:  # an earlier save failed
        return f", and could not be saved: {_error_clause(failure)}"
    if why:
        return f", and is not saved, {why}{describe_restart(run)}"
    outcomes = list[str]()
    for hook in savers:
        try:
            outcome = _save(run, hook, f" as {checkpoint_name(hook.saver.prefix, run.step)}")
        except Exception as failure:
            is_same = str(failure) == str(error)
            outcome = "is not saved" if is_same else f"could not be saved: {_error_clause(failure)}"
            # The first outcome is in the note of the error anyway.
            if outcomes and not is_same:
                note(
                    error,
                    f"Additionally, {hook_name(hook)} could not save step {run.step}: "
                    f"{_error_clause(failure)}",
                )
        outcomes.append(outcome)
    return f", and {outcomes[0]}"


def _save(run: RunContext, hook: SaverHook, as_name: str = "") -> str:
    """Let a hook save, to disk; return the outcome, as the rest of a sentence about the state."""
    if run.course.call_hook(HookCall(hook, "save"), hook.save, run.step, run.state, wait=True):
        return f"is saved{as_name}; start the run again to resume"
    return "is not saved: a hook prevented it"


def _error_clause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(".")  # a sentence ends with it


def _describe_place(run: RunContext) -> str:
    """Describe where an error occurred, by what the run was doing."""
    course = run.course
    activity = course.activity
    place = f"at step {run.step}"
    if course.has_trained:
        place += f", after the update with batch {run.step - 1}"
    if isinstance(activity, HookCall):
        return f"{place}, in {activity.name}"
    if activity in (Activity.BODY, Activity.AFTER_LOOP):
        return f"{place}, in {activity.value}"
    if activity is Activity.FETCHING and run.components.feeder.waiting:
        # A call of several steps may have fetched some of its batches already.
        return f"{place}, while batch {course.first + run.components.batches.consumed} was fetched"
    if activity not in (Activity.COMPILING, Activity.CALLING):
        return place
    if run.signals.received is not None:
        return place  # what a signal raises comes here by chance, and not from the batch
    first = run.step
    steps = run.components.feeder.steps
    batches = f"batch {first}" if steps == 1 else f"batches {first} to {first + steps - 1}"
    return f"{place}, while running the step on {batches}"


# For the user.


def interrupted_state() -> TrainState | None:
    """Return the last complete state of the last run in this process that an exception ended.

    Pass it to `train` to continue. It is kept only in interactive sessions: IPython, a notebook or
    Python's prompt. No copy is made: a run donates it.

    Returns:
        The state; None if the last run ended well, if another one has taken a step since, or if the
        state was donated. A run that fails before its first step leaves the kept state unchanged.

    Example:
        >>> import jstep
        >>> print(jstep.interrupted_state())
        None
    """
    kept: TrainState | None = interactive.kept_state()
    return kept
