"""Messages about runs that end before their last step, or take no step."""

import logging

from jstep.loop.options import Options
from jstep.loop.restore_or_init import RunStart
from jstep.loop.run_saver_hook import STOPPED
from jstep.loop.run_steps import LoopState

_logger = logging.getLogger("jstep")


def report_early_end(loop: LoopState, run_start: RunStart, options: Options) -> None:
    """Log that the batches ended before the run did.

    Raises:
        ValueError: There is no batch at all, and the run was not restored.
    """
    start, last_step = run_start.step, options.end
    if loop.step == start and run_start.restored is not None:
        _logger.info("the batches are used up at step %d, at which the run was restored: it is finished", start)
        return
    if loop.step == start:
        raise ValueError(
            f"batches: there is no batch for step {start}, the first of this run (last_step={last_step}); give "
            "batches up to that step, such as jstep.batches(…), or a list of all of them (a list is indexed from "
            "step 0), or a lower last_step"
        )
    if last_step is None:
        _logger.info("the batches ended after step %d, and so does the run", loop.step)
        return
    _logger.warning(
        "The batches ended after step %d, before last_step=%d: the run ends there. For more passes over the data, "
        "give jstep.batches(…, num_epochs=None), or an iterable that does not end.",
        loop.step,
        last_step,
    )


def reason_done(run_start: RunStart, options: Options) -> str:
    """Why a run takes no step, as the end of a sentence; empty if it is at its last step."""
    by = run_start.extra.get(STOPPED)
    if run_start.step >= options.last_step:
        return ""
    if by is None:
        reasons = [getattr(hook, "why", None) for hook in options.hooks]
        return next((f". {why}" for why in reasons if isinstance(why, str)), "")
    return (
        f". {by} stopped it at step {run_start.step}; to continue, remove that hook, change its settings, or reset its "
        "state: EarlyStopping(reset=True)"
    )
