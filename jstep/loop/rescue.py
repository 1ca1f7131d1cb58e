"""The end of a run that fails or that a signal stops: save the state, and say where it was."""

import contextlib
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from jstep.checkpoint.names import checkpoint_name
from jstep.core import trees
from jstep.core.checks import note
from jstep.core.meshes import internal_transfers
from jstep.distributed import processes
from jstep.hooks.hook import name_of
from jstep.hooks.metric_sums_program import host, is_bad
from jstep.hooks.nan_loss import StateContents, listed
from jstep.loop.run import ENDING, Run
from jstep.loop.run_saver_hook import RunSaverHook


def rescue(run: Run, error: BaseException) -> None:
    """Attach the last complete state to the exception, save it if possible, and add a note on where the run failed."""
    runner, run.phase = run.runner, ENDING
    where = "" if runner is None else f"jstep: {_doing(run)}"
    is_saved = run.signals.at_once or (run.signals.received is not None and not isinstance(error, Exception))
    if runner is not None and not run.signals.at_once:
        runner.last(failed=lambda other: None if other is error else note(error, f"Additionally, {other}"))
    lost = trees.donated_leaf(run.state) is not None
    with contextlib.suppress(Exception):
        error.state = None if lost else run.state  # type: ignore[attr-defined]
    if runner is None:
        return
    if lost:
        note(error, f"{where}. The state was donated to the step that failed: it is lost.")
        return
    saved = ""
    # Otherwise it is saved already, or must not be.
    if run.feeder is not None and run.savers and not is_saved and run.step > run.first:
        saved = _saved(run, error)
    note(error, f"{where}; the state after step {run.step} is in the exception's `state`{saved}.")


def leave_at_once(run: Run, error: KeyboardInterrupt) -> NoReturn:
    """Leave after a second Ctrl-C, which interrupted code anywhere: its traceback would fill many pages."""
    again = KeyboardInterrupt(f"SIGINT came twice: the run was left at once, at step {run.step}")
    again.state = getattr(error, "state", None)  # type: ignore[attr-defined]
    raise again.with_traceback(None) from None


def exit_on_signal(run: Run) -> NoReturn:
    """Save the state and leave, after a signal."""
    when = f"after step {run.step}"
    if run.savers and (why := why_not_finite(run)):
        run.before_save(run.step)  # `NanLossHook` raises a more specific error
        raise run.signals.stopped(f"{when}, which is not saved: {why}")
    saved = [hook.save(run.step, run.state, wait=True) for hook in run.savers]
    if saved:
        outcome = "is saved; start the run again to resume" if all(saved) else "is not saved, as a hook demands"
        when = f"{when}, which {outcome}"
    raise run.signals.stopped(when)


def save_while_it_hangs(run: Run) -> str:
    """Save the last complete state, by another thread than the loop's, and return the outcome, for the log."""
    step, (hook, method) = run.step, run.calling or (None, "")
    try:
        if why := why_not_finite(run):
            return f"step {step} is not saved: {why}"
        next(saver for saver in run.savers if isinstance(saver, RunSaverHook)).save_alone(step, run.state)
    except Exception as error:
        return f"step {step} could not be saved: {type(error).__name__}: {error}"
    later = run.runner.not_called() if method == "after_step" else []
    missed = [f"{name_of(hook)} did not return"] * (hook is not None) + [f"{name} was not called" for name in later]
    name = checkpoint_name(run.saver.prefix, step)
    return "; ".join([f"step {step} is saved as {name}, with the states of hooks of the save before", *missed])


def _saved(run: Run, error: BaseException) -> str:
    """Save the state and return the outcome, as the end of a sentence."""
    if not processes.is_single_process():
        return ", and is not saved: the other processes may be elsewhere"
    if getattr(error, "prevents_saving", False):
        return ", and is not saved"
    if why := why_not_finite(run):
        return f", and is not saved: {why}"
    try:
        saved = [hook.save(run.step, run.state, wait=True) for hook in run.savers]
        if not all(saved):
            return ", and is not saved, as a hook demands"
    except Exception as failure:
        if failure is error or str(failure) == str(error):
            return ", and is not saved"
        return f", and could not be saved: {type(failure).__name__}: {failure}"
    return f", and is saved as {checkpoint_name(run.savers[-1].prefix, run.step)}; start the run again to resume"


def _doing(run: Run) -> str:
    """Describe what the run was doing, with the step and the batch."""
    at_step = f"at step {run.step}"
    if run.step > run.first:
        at_step += f", after the update with batch {run.step - 1}"
    if run.calling is not None:
        hook, method = run.calling
        hook = run.transfers.failed_owner or hook  # a hook may deliver the metrics of another
        return f"{at_step}, in {name_of(hook)}.{method}"
    if run.feeder is None:
        return f"at step {run.step}"
    if run.feeder.waiting:
        # A call of several steps may have fetched some of its batches already.
        return f"{at_step}, while batch {run.first + run.fetched.count} was fetched"
    is_over = run.signals.received is not None or run.step >= run.options.last_step
    if is_over or run.is_checking or run.stopped_by is not None:
        return at_step
    return f"{at_step}, while running the step on {_batches(run.step, run.feeder.steps)}"


def _batches(first: int, steps: int) -> str:
    """`batch 7`, or `batches 7 to 9`."""
    return f"batch {first}" if steps == 1 else f"batches {first} to {first + steps - 1}"


def why_not_finite(run: Run) -> str:
    """Describe why the state must not be saved: a loss that is not finite, or NaN parameters; empty if neither.

    The result is the same on all processes.
    """
    if _is_loss_nonfinite(run):
        return "its loss is not finite"
    try:
        nan = StateContents(run.state, params_only=True).with_nan()
    except Exception:  # the device failed; the save reports it
        return ""
    return f"{listed(nan)} contain{'s' if len(nan) == 1 else ''} NaN" if nan else ""


def _is_loss_nonfinite(run: Run) -> bool:
    """Whether a loss of the last call was not finite; `NanLossHook` may not have checked it yet.

    The losses of skipped updates are ignored. The result is the same on all processes.
    """
    metrics = run.metrics if isinstance(run.metrics, Mapping) else {}
    loss = metrics.get("loss")
    if loss is None or not (processes.is_single_process() or _is_on_all(loss)):
        return False
    try:
        with internal_transfers():
            latest, skip_metric = run.sums.latest(), run.programs.skip_metric
            if latest is not None and latest.bad is not None:
                return True
            finite = np.isfinite(host(loss).astype(np.float64))
            skipped = host(metrics.get(skip_metric, 0)) == 1 if skip_metric is not None else np.False_
            return bool(np.any(is_bad(finite, skipped)))
    except (TypeError, ValueError):
        return False
    except Exception:  # the device failed, so the loss cannot be read
        return True


def _is_on_all(value: Any) -> bool:
    return isinstance(value, jax.Array) and not value.is_fully_addressable and value.is_fully_replicated
