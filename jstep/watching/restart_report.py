"""The report of a restart: what has changed since its checkpoint was written.

A checkpoint keeps the *past* of its run: which start saved it, with how many lanes, and which
batches were trained on. A start that resumes from it compares its own past of the same steps, and
its setup with that of the other start, if that is recorded in the same directory.
"""

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jstep.checkpoint.names import checkpoint_name
from jstep.compiling.stages import lanes_of
from jstep.core.logs import BELOW_BAR, logger
from jstep.core.meshes import internal_transfers
from jstep.core.tables import printable
from jstep.data.sequence import BatchSequence
from jstep.hooks.run_extra import START
from jstep.loop.run_context import RunContext
from jstep.record.differences import Changes, changes
from jstep.record.run_record import earlier_starts, file_of
from jstep.record.schema import Start
from jstep.record.starts import StartFile, load_setup, program_path
from jstep.training.step import step_function
from jstep.watching.start_setup import shortened

_MAX_LINES = 40
_UNTRAINED = (
    "none of this has an effect, as the run takes no step: pass another checkpoint_dir, "
    "or a larger last_step"
)


def describe_past(run: RunContext, step: int) -> dict[str, Any]:
    """Return what a checkpoint at a step keeps for the start that resumes from it, as JSON."""
    past: dict[str, Any] = {"lanes": lanes_of(run.train_steps.value_at(max(step - 1, 0)))}
    file = file_of(run)
    if file is not None:
        past[START] = [file.fields["number"], file.fields["began"]]
    batches = run.components.batches.source.given
    if isinstance(batches, BatchSequence):
        trained = batches[:step]
        past["rows"] = trained.rows_hash()
        past["batches"] = {}
        for name, part in trained.definition().items():
            if name != "num_epochs":  # a longer sequence has the same batches up to here
                past["batches"][name] = shortened(part)
    return past


def report_changes(
    run: RunContext, saved_past: Mapping[str, Any], setup: Mapping[str, Any], *, is_idle: bool
) -> None:
    """Log what has changed: a warning if it changes the bits of the run, else a plain line.

    Args:
        saved_past: The past in the checkpoint that is restored.
        setup: The setup of this start.
        is_idle: Whether this start takes no step, so that it has compiled no program.
    """
    if run.saver is None or not run.origin.is_restored:
        return
    step = run.origin.step
    checkpoint = checkpoint_name(run.saver.prefix, step)
    past = describe_past(run, step)
    found = Changes([], [], [])
    file = file_of(run)
    earlier = earlier_starts(run)
    saved_by = _find_start(earlier, saved_past.get(START))
    if file is not None and saved_by is not None:
        found = _compare_setups(file, saved_by, {"config": run.options.config, "setup": setup})
        found.bits.extend(_rate_change(run, saved_by, step, found.bits))
    elif earlier:
        text = "%s: the start that wrote it has no record, so only lanes and batches are compared"
        logger.info(text, checkpoint)
    if step and saved_past.get("lanes") != past["lanes"]:
        found.bits.append(f"lanes: {saved_past.get('lanes')} before, {past['lanes']} now")
    found.bits.extend(_batch_change(checkpoint, step, saved_past, past))
    if found.bits:
        _warn(checkpoint, [*found.bits, *found.place], is_idle=is_idle)
    elif found.place:
        logger.info(
            "%s: since this checkpoint was written, %s",
            checkpoint,
            "; ".join(map(printable, found.place)),
        )


def _find_start(starts: Iterable[Start], wanted: Any) -> Start | None:
    # Not by its number alone: the checkpoint that a branch begins from was saved by a start of
    # another run.
    for start in starts:
        if [start["number"], start["began"]] == wanted:
            return start
    return None


def _compare_setups(file: StartFile, earlier: Start, current: Mapping[str, Any]) -> Changes:
    # Batches and lanes are compared by the past, which has those before the checkpoint only.
    return changes(
        load_setup(file.where, earlier),
        {**file.fields, **current, "programs": program_path(file.where, file.fields)},
        leave_out=("batches", "lanes"),
    )


def _batch_change(
    checkpoint: str, step: int, saved_past: Mapping[str, Any], past: Mapping[str, Any]
) -> list[str]:
    """Return a line if other rows would have been trained on before the checkpoint."""
    if "rows" not in saved_past or "rows" not in past or saved_past["rows"] == past["rows"]:
        return []
    found = changes(
        {"setup": {"batches": saved_past.get("batches") or {}}},
        {"setup": {"batches": past["batches"]}},
    )
    lines = [line.removeprefix("batches: ") for line in found.lines]
    why = "; ".join(lines) or "their definition is the same, but the rows are not"
    return [
        f"batches: those before step {step} are not the ones that {checkpoint} was "
        f"trained on: {why}. The run continues with batch {step} of the new "
        "definition, so rows may be repeated or left out."
    ]


def _rate_change(run: RunContext, earlier: Start, step: int, bits: list[str]) -> list[str]:
    """Return a line if the learning rate just before the checkpoint would now be another one.

    If a schedule has changed, the other lines show its arguments, or its operations.
    """
    if not bits or any(re.match(r"learning_rate(\[\d+\])?: ", line) for line in bits):
        return []
    recorded_rate = None
    for saved_step, _, _, rate in earlier["saved"]:
        if saved_step == step:
            recorded_rate = rate
            break
    pure_step = step_function(run.train_steps.value_at(max(step - 1, 0)))
    if recorded_rate is None or pure_step is None:
        return []
    with contextlib.suppress(Exception), internal_transfers():
        # The rate may be held in the state, or have another name.
        rate = float(pure_step.optimizer.hyperparameters(step - 1)["learning_rate"])  # type: ignore[union-attr]
        # The recorded one may be a float32.
        if abs(rate - recorded_rate) > 1e-5 * max(abs(rate), abs(recorded_rate)):
            return [f"learning_rate at step {step}: {recorded_rate:.6g} before, {rate:.6g} now"]
    return []


def _warn(checkpoint: str, lines: list[str], *, is_idle: bool) -> None:
    shown = [printable(line) for line in lines[:_MAX_LINES]]
    if len(lines) > _MAX_LINES:
        shown.append(f"and {len(lines) - _MAX_LINES} more")
    if is_idle:
        shown.append(_UNTRAINED)
    text = "".join(f"\n  {line}" for line in shown)
    message = "%s: the configuration changed since this checkpoint was written:%s"
    logger.warning(message, checkpoint, text, extra=BELOW_BAR)
