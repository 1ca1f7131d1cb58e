"""Messages about runs that end before their last step, or take no step."""

import logging

from jstep.loop.run import Run
from jstep.loop.run_saver_hook import STOPPED

_logger = logging.getLogger("jstep")


def report_early_end(run: Run) -> None:
    """Log that the batches ended before the run did.

    Raises:
        ValueError: There is no batch at all, and the run was not restored.
    """
    start, last_step = run.first, run.last_step
    if run.step == start and run.restored is not None:
        _logger.info("the batches are used up at step %d, at which the run was restored: it is finished", start)
        return
    if run.step == start:
        lower = "" if last_step is None else ", or a lower last_step"
        raise ValueError(
            f"batches: there is no batch for step {start}, the first of this run (last_step={last_step}); give "
            "batches up to that step, such as jstep.batches(…), or a list of all of them (a list is indexed from "
            f"step 0){lower}"
        )
    if last_step is None:
        _logger.info("the batches ended after step %d, and so does the run", run.step)
        return
    _logger.warning(
        "The batches ended after step %d, before last_step=%d: the run ends there. For more passes over the data, "
        "give jstep.batches(…, num_epochs=None), or an iterable that does not end.",
        run.step,
        last_step,
    )


def reason_done(run: Run) -> str:
    """Why a run takes no step, as the end of a sentence; empty if it is at its last step."""
    by = run.extra.get(STOPPED)
    if run.first >= run.options.last_step:
        return ""
    if by is None:
        reasons = [getattr(hook, "why", None) for hook in run.options.hooks]
        return next((f". {why}" for why in reasons if isinstance(why, str)), "")
    return (
        f". {by} stopped it at step {run.first}; to continue, remove that hook, change its settings, or reset its "
        "state: EarlyStopping(reset=True)"
    )
