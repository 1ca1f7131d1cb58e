"""Opening a run's checkpoints in one call: lock the prefix, open the one to resume from."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from jstep.checkpoint.reading import OpenCheckpoint
from jstep.checkpoint.saver import Saver, engine_of
from jstep.core.meshes import internal_transfers
from jstep.core.processes import share_errors
from jstep.core.trees import Tree
from jstep.state.leaves import StateLeaves

Reading: TypeAlias = Callable[[int], contextlib.AbstractContextManager[None]]
"""`reading(step)` is a context in which the state of a checkpoint is read."""


class OpenedForRun(NamedTuple):
    """What a run finds in its `Saver`.

    Attributes:
        checkpoint: The newest checkpoint; None if there is none, or if it cannot be opened.
        state: Its state, if another run may delete it: then it is read at once. None to read it
            later.
        is_claimed: Whether no other process may write now. A run that will save nothing only reads.
        problem: Why the newest checkpoint cannot be used. It is not raised here, so that the start
            is recorded first.
    """

    checkpoint: OpenCheckpoint | None = None
    state: Any = None
    is_claimed: bool = False
    problem: Exception | None = None


def open_for_run(
    saver: Saver,
    state: Tree,
    stop_step: int,
    check_latest: Callable[[int | None], None],
    is_ended: Callable[[OpenCheckpoint], bool],
    reading: Reading,
) -> OpenedForRun:
    """Claim the prefix, and open the newest checkpoint.

    The claim comes first. After it nobody else saves or deletes, so the newest checkpoint stays the
    one to resume from, even if an earlier start was still saving when this one began. A run that
    will save nothing does not claim: in a bucket whose writer was killed, it would wait for the
    claim in vain.

    Args:
        state: The state to save later, or its shapes.
        stop_step: The step at which the run ends.
        check_latest: Raises an error if the processes have found different steps. The claim that
            follows is a collective, which either all of them call, or none.
        is_ended: Whether the run of a checkpoint at `stop_step`, or later, owes nothing more.
    """
    # The others would wait in `check_latest` for a process that cannot read the directory.
    step = share_errors(saver.latest_step, "the checkpoints cannot be read")
    check_latest(step)
    if step is not None and step >= stop_step:
        opened = _read_ended(saver, state, step, is_ended, reading)
        if opened is not None:
            return opened
    saver.claim(state)  # fails now, not at the first save
    try:
        return OpenedForRun(engine_of(saver).open(None), is_claimed=True)
    except FileNotFoundError:
        return OpenedForRun(is_claimed=True)
    except Exception as problem:
        return OpenedForRun(is_claimed=True, problem=problem)


def _read_ended(
    saver: Saver,
    state: Tree,
    step: int,
    is_ended: Callable[[OpenCheckpoint], bool],
    reading: Reading,
) -> OpenedForRun | None:
    """Read the newest checkpoint of a run that has nothing left to do.

    None if the run has something left to do, or the checkpoint was deleted meanwhile.
    """
    # It raises an error if it selects nothing of this state, as a save would.
    StateLeaves(state).left_out(saver.leave_out)

    def read(found: OpenCheckpoint) -> OpenedForRun | None:
        if not is_ended(found):
            return None
        found.check_run(state)
        return OpenedForRun(found, found.restore(state))

    try:
        with engine_of(saver).locked_finder() as finder, reading(step), internal_transfers():
            return finder.read(None, read)
    except FileNotFoundError:
        return None
    except Exception as problem:
        return OpenedForRun(problem=problem)
