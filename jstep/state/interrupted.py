"""The last complete state of a run that an exception ended, in an interactive session."""

from jstep.core import interactive
from jstep.state.train_state import TrainState


def interrupted_state() -> TrainState | None:
    """Return the last complete state of the last run in this process that an exception ended.

    Pass it to `train` to continue. It is kept only in interactive sessions: IPython, a notebook or Python's prompt. No
    copy is made: a run donates it.

    Returns:
        The state; None if the last run ended well, if another one has taken a step since, or if the state was donated.
        A run that fails before its first step leaves the kept state unchanged.

    Example:
        >>> import jstep
        >>> print(jstep.interrupted_state())
        None
    """
    kept: TrainState | None = interactive.kept_state()
    return kept
