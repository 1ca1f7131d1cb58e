"""Where a run begins: at the state it was given, or at the newest checkpoint."""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from jstep.checkpoint import Saver, checkpoint_name
from jstep.core.contexts import own_transfers
from jstep.loop.checks import check_alive
from jstep.loop.options import Options
from jstep.loop.signals import StopSignals
from jstep.state import TrainState, global_step

_logger = logging.getLogger("jstep")


class Beginning(NamedTuple):
    """Where a run begins.

    Attributes:
        step: The step.
        state: The state, as it was given or restored.
        saver: Where checkpoints are kept, or None.
        restored: The step that was restored, or None.
        kept: What was kept with that checkpoint.
    """

    step: int
    state: TrainState
    saver: Saver | None
    restored: int | None
    kept: dict[str, Any]


def beginning(options: Options, state: TrainState, stack: contextlib.ExitStack, signals: StopSignals) -> Beginning:
    """Opens the checkpoints, and restores the newest."""
    if options.checkpoint_dir is None:
        check_alive(state)
        return Beginning(_step_of(state), state, None, None, {})
    if isinstance(options.checkpoint_dir, Saver):
        saver = options.checkpoint_dir
        leave: Callable[..., None] = _Waits(saver)
        leave_at_once = _nothing
    else:
        saver = Saver(options.checkpoint_dir, prefix=options.checkpoint_prefix)
        leave, leave_at_once = saver.__exit__, functools.partial(saver.close, wait=False)
    # Waits for what is being written, also after an error; a second Ctrl-C does not wait.
    stack.push(lambda *error: leave_at_once() if signals.at_once else leave(*error))
    restored, kept = None, None
    with own_transfers():
        try:
            # Not that of the latest step that looks whole: a newest one that is damaged is an error.
            state = saver.restore(state)
        except FileNotFoundError:
            check_alive(state)
        else:
            restored = _step_of(state)
            kept = saver.extra(restored)
            _logger.info("restored %s", checkpoint_name(saver.prefix, restored))
        if restored is None or restored < options.last_step:
            saver.claim()
    return Beginning(_step_of(state), state, saver, restored, kept if isinstance(kept, dict) else {})


def _step_of(state: TrainState) -> int:
    with own_transfers():
        return global_step(state)


def _nothing() -> None:
    """What a run does with a Saver of the user's where it may not wait."""


class _Waits:
    """What the run does with a Saver of the user's when it leaves: waits, and leaves it open."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def __call__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._saver.wait()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"Besides, {failure}")
