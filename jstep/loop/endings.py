"""Runs that end before their last step, or take no step: what to say of them."""

import logging

from jstep.loop.beginning import Beginning
from jstep.loop.drive import At
from jstep.loop.options import Options
from jstep.loop.saving import STOPPED

_logger = logging.getLogger("jstep")


def ended_early(at: At, begun: Beginning, last_step: int) -> None:
    """Says that the batches ended before the run did.

    Raises:
        ValueError: There was none at all, for a run that was not restored.
    """
    start = begun.step
    if at.step == start and begun.restored is not None:
        _logger.info("the batches are used up at step %d, at which the run was restored: it is finished", start)
        return
    if at.step == start:
        raise ValueError(
            f"batches: there is none for step {start}, the first of this run, and last_step={last_step}; give "
            "batches that go up to there, such as jstep.batches(…), or a list of them all (a list counts from "
            "step 0), or a lower last_step"
        )
    _logger.warning(
        "The batches ended after step %d, before last_step=%d: the run ends there. For more passes over the data, "
        "give jstep.batches(…, num_epochs=None), or an iterable that goes on.",
        at.step,
        last_step,
    )


def why_done(begun: Beginning, options: Options) -> str:
    """Why a run takes no step, as the end of a sentence; empty if it is at its last step."""
    by = begun.kept.get(STOPPED)
    if begun.step >= options.last_step:
        return ""
    if by is None:
        reasons = [getattr(hook, "why", None) for hook in options.hooks]
        return next((f". {why}" for why in reasons if isinstance(why, str)), "")
    return (
        f". {by} stopped it at step {begun.step}; to go on, leave that hook out, change what it asks for, or have "
        "it forget what it remembers: EarlyStopping(reset=True)"
    )
