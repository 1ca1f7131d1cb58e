"""Opening the checkpoints of a run in one call: find what the run resumes from, and lock the prefix."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from jstep.checkpoint.saver import Saver
from jstep.core.processes import share_errors
from jstep.core.trees import Tree
from jstep.state.leaves import StateLeaves


class Claimed(NamedTuple):
    """What a run finds in its `Saver`.

    Attributes:
        step: The step of the newest checkpoint; None if there is none.
        extra: What that one holds beside the state; None if it cannot be read: restoring it then raises the reason.
        is_claimed: Whether no other process may write now. A run that has no step left only reads.
    """

    step: int | None = None
    extra: Any = None
    is_claimed: bool = False


def open_for_run(saver: Saver, state: Tree, stop_step: int, check_latest: Callable[[int | None], None]) -> Claimed:
    """Find the newest checkpoint, and claim the prefix if there is a step left to take.

    Args:
        state: The state to save later, or its shapes.
        stop_step: The step at which the run ends.
        check_latest: Raises an error if the processes have found different steps: the claim that follows is a
            collective, which all of them must call, or none.
    """
    # The others would wait in `check_latest` for a process that cannot read the directory.
    step = share_errors(saver.latest_step, "the checkpoints cannot be read")
    check_latest(step)
    is_claimed = step is None or step < stop_step
    if is_claimed:
        saver.claim(state)  # fails now, not at the first save
    else:
        StateLeaves(state).left_out(saver.leave_out)  # raises if it selects nothing of this state, as a save would
    extra: Any = None
    if step is not None:
        with contextlib.suppress(Exception):
            extra = saver.extra(step)
    return Claimed(step, extra, is_claimed)
