"""Save the state when a run fails, and attach it to the exception."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jstep.checkpoint import checkpoint_name
from jstep.core import trees
from jstep.core.contexts import internal_transfers
from jstep.core.notes import note
from jstep.distributed import agreement
from jstep.hooks import CheckpointSaverHook
from jstep.hooks.metric_sums import MetricSums
from jstep.hooks.skipped_updates import is_bad
from jstep.hooks.state_contents import StateContents, listed
from jstep.hooks.values import host
from jstep.loop.run_steps import LoopState


def save_on_failure(
    error: BaseException,
    loop: LoopState,
    start: int | None,
    *,
    during: str,
    savers: Sequence[CheckpointSaverHook],
    sums: MetricSums,
    skip_metric: str | None,
) -> None:
    """Attach the last complete state to the exception, save it if possible, and add a note on where it failed.

    Args:
        error: The exception that ends the run.
        loop: The current state of the run.
        start: The step at which the run began; None if it had not begun.
        during: A description of what the run was doing.
        savers: The hooks that save; empty if nothing must be saved.
        sums: The sums of metrics of the run.
        skip_metric: The metric that is 1 if the whole update was skipped, or None.
    """
    lost = trees.donated_leaf(loop.state) is not None
    with contextlib.suppress(Exception):
        error.state = None if lost else loop.state  # type: ignore[attr-defined]
    if start is None:
        return
    where = f"jstep: {during}"
    if lost:
        note(error, f"{where}. The state was donated to the step that failed: it is lost.")
        return
    kept = f"the state after step {loop.step} is in the exception's `state`"
    if not savers or loop.step == start:
        note(error, f"{where}; {kept}.")
        return
    note(error, f"{where}; {kept}{_saved(error, loop, savers, sums, skip_metric)}.")


def _saved(
    error: BaseException,
    loop: LoopState,
    savers: Sequence[CheckpointSaverHook],
    sums: MetricSums,
    skip_metric: str | None,
) -> str:
    """Save the state and return the outcome, as the end of a sentence."""
    if not agreement.is_single_process():
        return ", and is not saved: the other processes may be elsewhere"
    if getattr(error, "prevents_saving", False):
        return ", and is not saved"
    if why := why_not_finite(loop, sums, skip_metric):
        return f", and is not saved: {why}"
    try:
        saved = [saver.save(loop.step, loop.state, wait=True) for saver in savers]
        if not all(saved):
            return ", and is not saved, as a hook demands"
    except Exception as failure:
        if failure is error or str(failure) == str(error):
            return ", and is not saved"
        return f", and could not be saved: {type(failure).__name__}: {failure}"
    return f", and is saved as {checkpoint_name(savers[-1].prefix, loop.step)}; start the run again to resume"


def why_not_finite(loop: LoopState, sums: MetricSums, skip_metric: str | None) -> str:
    """Describe why the state must not be saved: a loss that is not finite, or NaN parameters; empty if neither.

    The result is the same on all processes.
    """
    if is_loss_nonfinite(loop, sums, skip_metric):
        return "its loss is not finite"
    try:
        nan = StateContents(loop.state, params_only=True).with_nan()
    except Exception:  # the device failed; the save reports it
        return ""
    return f"{listed(nan)} contain{'s' if len(nan) == 1 else ''} NaN" if nan else ""


def is_loss_nonfinite(loop: LoopState, sums: MetricSums, skip_metric: str | None) -> bool:
    """Whether a loss of the last call was not finite; `NanLossHook` may not have checked it yet.

    The losses of skipped updates are ignored. The result is the same on all processes.
    """
    metrics = loop.metrics if isinstance(loop.metrics, Mapping) else {}
    loss = metrics.get("loss")
    if loss is None or not (agreement.is_single_process() or _is_on_all(loss)):
        return False
    try:
        with internal_transfers():
            latest = sums.latest()
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


def format_batches(first: int, steps: int) -> str:
    """`batch 7`, or `batches 7 to 9`."""
    return f"batch {first}" if steps == 1 else f"batches {first} to {first + steps - 1}"
