"""The past of a checkpoint, its batches and optimizers, and the warning if a resumed run has others."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from jstep.data.definition import definition_of, rows_hash
from jstep.data.sequence import BatchSequence
from jstep.loop.card import short
from jstep.loop.card_difference import differences

PAST = "past"
"""The key of a checkpoint's `extra`."""

_logger = logging.getLogger("jstep")


def past_of(batches: Any, step: int, optimizers: Mapping[str, str]) -> dict[str, Any]:
    """Return a record of the run before a checkpoint, to be kept with it, as JSON values.

    Args:
        batches: The argument of `train`.
        step: The step of the checkpoint.
        optimizers: First step of a stage → the names of the optimizer's rules.
    """
    found: dict[str, Any] = {"optimizers": dict(optimizers)}
    if isinstance(batches, BatchSequence):
        before = batches[:step]
        definition = {name: short(part) for name, part in definition_of(before).items() if name != "num_epochs"}
        found |= {"rows": rows_hash(before), "batches": definition}
    return found


class RestoredPast(NamedTuple):
    """The past of a restored checkpoint.

    Attributes:
        step: The step of the checkpoint.
        name: Its name.
        kept: The value of `past_of` when it was saved.
    """

    step: int
    name: str
    kept: Mapping[str, Any]


def warn_if_past_changed(then: RestoredPast, now: Mapping[str, Any]) -> None:
    """Log a warning if the batches before a checkpoint, or the optimizer, differ from those it was trained with.

    Args:
        then: The past of the checkpoint.
        now: The value of `past_of` for the batches of this run and the optimizer of its first program.
    """
    step, name, kept = then
    for stage, optimizer in now["optimizers"].items():
        if kept["optimizers"].get(stage, optimizer) != optimizer:
            _logger.warning(
                "train_step: %s was trained by the optimizer %s, and this run continues with %s on the same slots. To "
                "start with fresh slots, restore the parameters alone: Saver.restore_params.",
                name,
                kept["optimizers"][stage],
                optimizer,
            )
    if "rows" in kept and "rows" in now and kept["rows"] != now["rows"]:
        _logger.warning(
            "batches: those before step %d are not the ones that %s was trained on: %s. The run continues with batch "
            "%d of the new definition, so rows may be repeated or left out.",
            step,
            name,
            "; ".join(_changes(kept["batches"], now["batches"])),
            step,
        )


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if then["kind"] != now["kind"]:
        then, now = {"kind": then["kind"]}, {"kind": now["kind"]}
    found = list(differences("", then, now, ("then", "now")))
    return found or ["their definition is the same, but it takes other rows in this version of jstep"]
