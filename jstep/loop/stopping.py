"""The end of a run: how it ends in each phase, what it saves, and its exit code.

| phase | a signal or `stop_secs` | a second SIGINT | an error | a stall, with `StallHook(exit_secs=…)` |
|---|---|---|---|---|
| start | leaves immediately; saves nothing | leaves immediately | is raised; nothing to save | ends; saves nothing |
| waiting for a batch | stops waiting, saves | leaves immediately | saves | another thread saves |
| compiling | stops tracing, or leaves XLA running, saves | leaves immediately | saves | ends; nothing is saved |
| in a call | finishes it and the due hooks, saves | leaves immediately | the state is lost | ends; nothing is saved |
| in a hook | finishes it and the others, saves | leaves immediately | calls the others, saves | another thread saves |
| in the body of a loop | finishes it, saves | leaves immediately | saves; a restart runs it | another thread saves |
| in an evaluation | abandons it until the restart, saves | leaves immediately | saves | another thread saves |
| in a save | finishes it | leaves immediately | is raised, and says what is saved | ends; the save may exist |
| closing | closes the rest; all is saved | leaves immediately | closes the rest | ends; all is saved |

The exit code is that of `Preempted` after SIGTERM, SIGUSR1 or SIGHUP (128 + signal) and after `stop_secs` (143), that
of `KeyboardInterrupt` after SIGINT, that of the error otherwise, and 75 after a stall. The run saves the state after
the last complete call, unless a loss or the parameters are not finite, or a hook prevents it. An evaluation by
`jstep.evaluator` is abandoned between two batches; any other function is finished. Another thread saves if the user's
code stalls. Several processes stop after the same call; if one of them fails or stalls, nothing is saved. If the body
of the loop makes the batches, a signal waits for the end of its iteration, and what an error or a stall interrupts
within an iteration is not saved, unless it has taken no step, or there are no objects to save and all take one step.
"""

import contextlib
from typing import NoReturn

from jstep.checkpoint.names import checkpoint_name
from jstep.core import interactive, trees
from jstep.core.checks import hook_name
from jstep.core.exceptions import note, note_other
from jstep.core.logs import BELOW_BAR, logger
from jstep.distributed import processes
from jstep.hooks.checkpoint_saver import CheckpointSaverHook
from jstep.loop.hook_runner import HookErrors
from jstep.loop.origin import STOPPED
from jstep.loop.run_context import BODY, HookCall, RunContext
from jstep.loop.saving import RunSaverHook, why_position_lost
from jstep.state.train_state import TrainState

# The normal end of a run, also one that takes no step.


def report_early_end(run: RunContext) -> None:
    """Log that the batches ended before the run did; raise a ValueError if there were none."""
    start, last_step = run.first, run.options.last_step
    if run.step == start and run.restored is not None:
        logger.info("the batches are used up at step %d, at which the run was restored: it is finished", start)
        return
    if run.step == start:
        raise ValueError(
            f"batches: there is no batch for step {start}, the first of this run (last_step={last_step}); give "
            "batches up to that step, such as jstep.batches(…), or a list of all of them, which begins with step 0"
        )
    if last_step is None:
        logger.info("the batches ended after step %d, and so does the run", run.step)
        return
    logger.warning(
        "The batches ended after step %d, before last_step=%d: the run ends there. For more passes over the data, "
        "give jstep.batches(…, num_epochs=None), or an iterable that does not end.",
        run.step,
        last_step,
        extra=BELOW_BAR,
    )


def report_done(run: RunContext) -> None:
    """Log why no step is run; a last_step before the state is probably a mistake."""
    first, last_step = run.first, run.options.stop_step
    if first > last_step:
        text = "last_step=%d: the run is already at step %d; there is nothing left to run. Give a larger last_step"
        logger.warning(text, last_step, first, extra=BELOW_BAR)
        return
    reasons = [getattr(hook, "why", None) for hook in run.options.hooks]
    if (name := run.origin.extra.get(STOPPED)) is not None:
        remedy = "remove that hook, change its settings, or reset its state: EarlyStopping(reset=True)"
        reasons = [f"{name} stopped it at step {first}; to continue, {remedy}"]
    why = next((f". {reason}" for reason in reasons if isinstance(reason, str) and first < last_step), "")
    logger.info("the run is already at step %d; there is nothing left to run%s", first, why)


# A signal, or the end of `stop_secs`.


def exit_on_signal(run: RunContext) -> NoReturn:
    when = f"after step {run.step}"
    savers, why = run.may_save()
    outcomes, errors = list[str](), HookErrors(run)
    for hook in savers:
        with errors:
            outcomes.append(_save(run, hook))
    errors.end()
    run.runner.raise_log_errors()
    if len(savers) < len(run.savers):
        run.before_save(run.step)  # `NanLossHook` raises a more specific error
        for hook in run.savers:  # and otherwise an error says more of the parameters
            run.require_finite(run.step, hook.saver)
        raise run.signals.stop_error(f"{when}, which is not saved: {why}")
    raise run.signals.stop_error(f"{when}, which {outcomes[0]}" if outcomes else when)


def leave_at_once(step: int, error: KeyboardInterrupt) -> NoReturn:
    """Leave after a second Ctrl-C, whose traceback would fill pages."""
    again = KeyboardInterrupt(f"SIGINT was received twice: the run ended immediately, at step {step}")
    attach_state(again, getattr(error, "state", None))
    raise again.with_traceback(None) from None


def leave_after_closing(run: RunContext, state: TrainState | None) -> NoReturn:
    """Leave after a signal that arrived when the run had ended, or failed, and closed its resources."""
    error = run.signals.stop_error(f"after step {run.at.step}, while it closed")
    attach_state(error, state)
    if state is not None:
        interactive.keep(state)
    raise error


# An error, or a stall.


def note_closing(run: RunContext, error: Exception, state: TrainState) -> None:
    """Attach the last state to an error of a run that had ended, such as a log that could not be closed."""
    attach_state(error, state)
    step = run.at.step
    note(error, f"jstep: at step {step}, while the run closed; the state after step {step} is in its `state`.")


def keep_state(run: RunContext, error: BaseException) -> bool:
    """Attach the last complete state to an exception; return whether it is lost."""
    lost = trees.is_donated(run.at.state)
    attach_state(error, None if lost else run.at.state)
    return lost


def attach_state(error: BaseException, state: TrainState | None) -> None:
    with contextlib.suppress(Exception):  # a class of exceptions may reject attributes
        error.state = state  # type: ignore[attr-defined]


def rescue(run: RunContext, error: BaseException) -> None:
    """Attach the last complete state to the exception, save it if possible, and note where the run failed."""
    where, signals = f"jstep: {_doing(run)}", run.signals
    said = {str(error)}

    def failed(other: Exception) -> None:
        if str(other) not in said:  # a log fails again at each checkpoint
            said.add(str(other))
            note_other(error, other)

    is_saved = signals.received_twice or (signals.received is not None and not isinstance(error, Exception))
    if not signals.received_twice:
        run.runner.call_at_last(failed)
    if keep_state(run, error):
        note(error, f"{where}. The state was donated to a step: it is lost.")
        return
    saved = ""
    # Otherwise it is saved already, or must not be.
    if run.savers and not is_saved and run.step > run.first:
        saved = _saved(run, error)
        run.runner.raise_log_errors(failed)
    is_kept = run.step > run.first and interactive.keep(run.state)
    also = " and in jstep.interrupted_state()" if is_kept else ""
    note(error, f"{where}; the state after step {run.step} is in the exception's `state`{also}{saved}.")


def save_while_it_hangs(run: RunContext) -> str:
    """Save the last complete state from another thread; return the outcome."""
    step = run.step
    try:
        hook = next(hook for hook in run.savers if isinstance(hook, RunSaverHook))
        savers, why = run.may_save()
        if why := (why if hook not in savers else "") or why_position_lost(run):
            return f"step {step} is not saved: {why}"
        hook.save_alone(step, run.state, is_finite=not run.nonfinite_params())
    except Exception as error:
        return f"step {step} could not be saved: {_error_clause(error)}"
    name = checkpoint_name(hook.saver.prefix, step)
    return f"step {step} is saved as {name}, with the states of hooks of the save before"


def _saved(run: RunContext, error: BaseException) -> str:
    """Save the state and return the outcome, as the end of a sentence."""
    if not processes.is_single_process():
        return ", and is not saved: the other processes may be elsewhere"
    savers, why = run.may_save(error)
    if not savers:
        return f", and is not saved{why and ': '}{why}"
    try:
        lost = why_position_lost(run)
    except Exception as failure:  # an earlier save failed
        return f", and could not be saved: {_error_clause(failure)}"
    if lost:
        return f", and is not saved: {lost}"
    outcomes = list[str]()
    for hook in savers:
        try:
            outcome = _save(run, hook, f" as {checkpoint_name(hook.saver.prefix, run.step)}")
        except Exception as failure:
            is_same = str(failure) == str(error)
            outcome = "is not saved" if is_same else f"could not be saved: {_error_clause(failure)}"
            if outcomes and not is_same:
                note(error, f"Additionally, {hook_name(hook)} could not save step {run.step}: {_error_clause(failure)}")
        outcomes.append(outcome)
    return f", and {outcomes[0]}"


def _save(run: RunContext, hook: CheckpointSaverHook, where: str = "") -> str:
    """Let a hook save the state; return the outcome. That of the first hook, the run's own if any, is reported."""
    if run.during(HookCall(hook, "save"), hook.save, run.step, run.state, wait=True):
        return f"is saved{where}; start the run again to resume"
    return "is not saved: a hook prevented it"


def _error_clause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(".")  # a sentence ends with it


def _doing(run: RunContext) -> str:
    feeder = run.feeder
    at_step = f"at step {run.at.step}"
    if run.at.step > run.first:
        at_step += f", after the update with batch {run.at.step - 1}"
    if run.calling is BODY:
        return f"{at_step}, in {BODY.method}"
    if run.calling is not None:
        hook = run.transfers.failed_owner or run.calling.hook  # a hook may deliver the metrics of another
        return f"{at_step}, in {run.calling._replace(hook=hook).name}"
    if feeder.waiting:
        # A call of several steps may have fetched some of its batches already.
        return f"{at_step}, while batch {run.first + run.fetched.count} was fetched"
    if run.signals.received is not None or not feeder.has_begun or run.is_at_last or run.runner.is_checking:
        return at_step
    first, steps = run.at.step, feeder.steps
    batches = f"batch {first}" if steps == 1 else f"batches {first} to {first + steps - 1}"
    return f"{at_step}, while running the step on {batches}"
