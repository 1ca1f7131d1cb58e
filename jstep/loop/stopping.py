"""The end of a run: how it ends in each phase, what it saves, and its exit code.

| phase | counts as | a signal or `stop_secs` | an error | a stall, with `StallHook(exit_secs=…)` |
|---|---|---|---|---|
| start | starting | leaves immediately; saves nothing | is raised; nothing to save | ends; saves nothing |
| waiting for a batch | waiting | stops waiting, saves | saves | another thread saves |
| compiling | starting | stops tracing, or leaves XLA running, saves | saves | ends; saves nothing |
| in a call | stepping | finishes it and the due hooks, saves | the state is lost | ends; saves nothing |
| in a hook of `train` | hooks | finishes it and the others, saves | calls the others, saves | another thread saves |
| in a hook of `Run` | hooks | finishes the iteration, saves | calls the others; saves nothing | ends; saves nothing |
| in an evaluation of `train` | evaluating | abandons it until the restart, saves | saves | another thread saves |
| in an evaluation of `Run` | evaluating | finishes the iteration, saves | saves nothing | ends; saves nothing |
| in the body of a loop | hooks | finishes the iteration, saves | saves nothing | ends; saves nothing |
| in a save | saving | finishes it | is raised, and says what is saved | ends; the save may exist |
| after the loop | hooks | leaves where the block ends; all is saved | all is saved | ends; all is saved |
| closing | saving | closes the rest; all is saved | closes the rest | ends; all is saved |

A second SIGINT leaves immediately, in each phase. An iteration of `Run` is a call, its hooks, and the body of the loop;
if the body makes the batches, it is the body with all its calls, and its own time counts as waiting. A restart resumes
only between two iterations. Evaluations of `Run` before the first iteration, and at the end, are abandoned like those
of `train`.

The exit code is that of `Preempted`, `KeyboardInterrupt` or the error, and 75 after a stall. Nothing is saved if a loss
or the parameters are not finite, or a hook prevents it. An evaluation by `jstep.evaluator` is abandoned between two
batches; any other function is finished. Another thread saves if the user's code stalls. Several processes stop after
the same call; if one of them fails or stalls, nothing is saved.
"""

import contextlib
from typing import NoReturn

from jstep.checkpoint.names import checkpoint_name
from jstep.core import interactive, processes, trees
from jstep.core.checks import hook_name
from jstep.core.exceptions import note, note_other
from jstep.core.logs import BELOW_BAR, logger
from jstep.hooks.run_hook import HookCall
from jstep.hooks.saver_hook import SaverHook
from jstep.loop.hook_runner import HookErrors
from jstep.loop.origin import STOPPED
from jstep.loop.run_context import RunContext
from jstep.loop.saving import RunSaverHook, where_resumed, why_not_saved
from jstep.state.train_state import TrainState

# The normal end of a run, also one that takes no step.


def report_early_end(run: RunContext) -> None:
    start, last_step = run.course.first, run.options.last_step
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
    first, last_step = run.course.first, run.options.stop_step
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
    when, finiteness, runner = f"after step {run.step}", run.opened.finiteness, run.opened.runner
    savers, why = finiteness.savers_allowed()
    outcomes, errors = list[str](), HookErrors(run.course)
    for hook in savers:
        with errors:
            outcomes.append(_save(run, hook))
    errors.end()
    runner.raise_log_errors()
    if len(savers) < len(finiteness.savers):
        run.before_save(run.step)  # `NanLossHook` raises a more specific error
        for hook in finiteness.savers:  # and otherwise an error says more of the parameters
            finiteness.require(run.step, hook.saver)
        raise run.signals.stop_error(f"{when}, which is not saved: {why}")
    raise run.signals.stop_error(f"{when}, which {outcomes[0]}" if outcomes else when)


def leave_at_once(step: int, error: KeyboardInterrupt) -> NoReturn:
    again = KeyboardInterrupt(f"SIGINT was received twice: the run ended immediately, at step {step}")
    attach_state(again, getattr(error, "state", None))
    raise again.with_traceback(None) from None


def leave_after_closing(run: RunContext, state: TrainState | None) -> NoReturn:
    error = run.signals.stop_error(f"after step {run.step}, while it closed")
    attach_state(error, state)
    if state is not None:
        interactive.keep(state)
    raise error


# An error, or a stall.


def note_closing(run: RunContext, error: Exception, state: TrainState) -> None:
    attach_state(error, state)
    step = run.step
    note(error, f"jstep: at step {step}, while the run closed; the state after step {step} is in its `state`.")


def attach_last_state(run: RunContext, error: BaseException) -> bool:
    """Attach the state to the error; return whether it is lost."""
    lost = trees.is_donated(run.state)
    attach_state(error, None if lost else run.state)
    return lost


def attach_state(error: BaseException, state: TrainState | None) -> None:
    with contextlib.suppress(Exception):  # a class of exceptions may reject attributes
        error.state = state  # type: ignore[attr-defined]


def rescue(run: RunContext, error: BaseException) -> None:
    where, signals, runner = f"jstep: {_doing(run)}", run.signals, run.opened.runner
    said = {str(error)}

    def failed(other: Exception) -> None:
        if str(other) not in said:  # a log fails again at each checkpoint
            said.add(str(other))
            note_other(error, other)

    if not signals.received_twice:
        runner.call_at_last(failed)
    if attach_last_state(run, error):
        note(error, f"{where}. The state was donated to a step: it is lost{where_resumed(run)}.")
        return
    saved = ""
    if not run.course.is_whole:
        why = f", and is not saved, {why_not_saved(run)}{where_resumed(run)}"
        saved = why if run.opened.finiteness.savers else ""
    elif not _is_handled(run, error) and run.course.has_stepped and run.opened.finiteness.savers:
        saved = _save_after_error(run, error)
        runner.raise_log_errors(failed)
    is_kept = run.course.has_stepped and interactive.keep(run.state)
    also = " and in jstep.interrupted_state()" if is_kept else ""
    note(error, f"{where}; the state after step {run.step} is in the exception's `state`{also}{saved}.")


def interrupted_state() -> TrainState | None:
    """Return the last complete state of the last run in this process that an exception ended.

    Pass it to `train` to continue. It is kept only in interactive sessions: IPython, a notebook or Python's prompt. No
    copy is made: a run donates it.

    Returns:
        The state; None if the last run ended well, if another one has taken a step since, or if the state was donated.
        A run that fails before its first step leaves the kept state unchanged.

    Example:
        >>> import jstep
        >>> print(jstep.interrupted_state())
        None
    """
    kept: TrainState | None = interactive.kept_state()
    return kept


def _is_handled(run: RunContext, error: BaseException) -> bool:
    signals = run.signals
    return signals.received_twice or (signals.received is not None and not isinstance(error, Exception))


def save_while_it_hangs(run: RunContext) -> str:
    step, finiteness = run.step, run.opened.finiteness
    try:
        if why := why_not_saved(run):
            return f"step {step} is not saved, {why}{where_resumed(run)}"
        hook = next(hook for hook in finiteness.savers if isinstance(hook, RunSaverHook))
        savers, why = finiteness.savers_allowed()
        if hook not in savers:
            return f"step {step} is not saved: {why}"
        hook.save_alone(step, run.state, is_finite=not finiteness.nonfinite_params())
    except Exception as error:
        return f"step {step} could not be saved: {_error_clause(error)}"
    name = checkpoint_name(hook.saver.prefix, step)
    return f"step {step} is saved as {name}, with the states of hooks of the save before"


def _save_after_error(run: RunContext, error: BaseException) -> str:
    if not processes.is_single_process():
        return f", and is not saved: the other processes may be elsewhere{where_resumed(run)}"
    savers, why = run.opened.finiteness.savers_allowed(error)
    if not savers:
        return f", and is not saved{why and ': '}{why}{where_resumed(run)}"
    try:
        lost = why_not_saved(run)
    except Exception as failure:  # an earlier save failed
        return f", and could not be saved: {_error_clause(failure)}"
    if lost:
        return f", and is not saved, {lost}{where_resumed(run)}"
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


def _save(run: RunContext, hook: SaverHook, where: str = "") -> str:
    if run.course.during(HookCall(hook, "save"), hook.save, run.step, run.state, wait=True):
        return f"is saved{where}; start the run again to resume"
    return "is not saved: a hook prevented it"


def _error_clause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(".")  # a sentence ends with it


def _doing(run: RunContext) -> str:
    course, opened = run.course, run.opened
    feeder = opened.feeder
    at_step = f"at step {run.step}"
    if course.has_stepped:
        at_step += f", after the update with batch {run.step - 1}"
    if course.calling is not None:
        return f"{at_step}, in {course.calling.name}"
    if feeder.waiting:
        # A call of several steps may have fetched some of its batches already.
        return f"{at_step}, while batch {course.first + opened.batches.count} was fetched"
    is_between = not course.has_begun or feeder.is_exhausted or course.is_at_last or opened.runner.is_checking
    if run.signals.received is not None or is_between:
        return at_step
    first, steps = run.step, feeder.steps
    batches = f"batch {first}" if steps == 1 else f"batches {first} to {first + steps - 1}"
    return f"{at_step}, while running the step on {batches}"
