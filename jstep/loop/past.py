"""The past of a checkpoint, its batches and optimizers, and the warning if a resumed run has others."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from jstep.data.batches import definition_of, rows_hash
from jstep.data.sequence import BatchSequence
from jstep.loop.card import short
from jstep.loop.card_difference import differences

PAST = "past"
"""The key of a checkpoint's `extra`."""

_logger = logging.getLogger("jstep")


def past_of(batches: Any, step: int, optimizers: Mapping[str, str], lanes: int | None = None) -> dict[str, Any]:
    """Return a record of the run before a checkpoint, to be kept with it, as JSON values.

    Args:
        batches: The argument of `train`.
        step: The step of the checkpoint.
        optimizers: First step of a stage → the names of the optimizer's rules.
        lanes: The number of lanes of the last step before the checkpoint.
    """
    found: dict[str, Any] = {"optimizers": dict(optimizers), "lanes": lanes}
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
    """Log a warning if the batches before a checkpoint, the optimizer or the lanes differ from those of its run.

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
    if step and kept.get("lanes") != now["lanes"]:
        _logger.warning(
            "lanes=%s: %s was trained with lanes=%s; from step %d on the bits are not those of a run with either value",
            now["lanes"],
            name,
            kept.get("lanes"),
            step,
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
