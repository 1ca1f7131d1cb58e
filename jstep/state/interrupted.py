"""The last complete state of a run that an exception ended, in a session in which one types."""

from jstep.core import interactive
from jstep.state.train_state import TrainState


def interrupted_state() -> TrainState | None:
    """Return the last complete state of the last run in this process that an exception ended.

    That is an interrupt (the stop button of a notebook, Ctrl-C), the end of `stop_secs`, or an error in a hook or in
    the data. So a run without a checkpoint_dir is not lost:

        state = jstep.train(train_step, jstep.interrupted_state(), batches, last_step)

    It is kept only where one types, in IPython, in a notebook or at Python's prompt; no copy is made, so it is donated
    by the run that goes on with it.

    Returns:
        The state; None if the last run ended well, or another one has taken a step since, or the state was donated. A
        run that fails before its first step leaves the one that was kept.

    Example:
        >>> import jstep
        >>> print(jstep.interrupted_state())
        None
    """
    kept: TrainState | None = interactive.kept()
    return kept
