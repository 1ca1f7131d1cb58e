"""Checkpointing of everything that a run needs to resume."""

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jstep.checkpoint import Saver
from jstep.hooks import CheckpointSaverHook, hook_state
from jstep.state import TrainState
from jstep.timeline import Stopwatch
from jstep.timeline.stopwatch import SAVING

HOOKS, STOPPED, HELD = "hooks", "stopped", "held"
"""Keys of a checkpoint's `extra`, in addition to the positions of loaders: the states of hooks, the name of the hook
that stopped the run, and the initial values of held hyperparameters."""


class SaverCallbacks(NamedTuple):
    """Functions by which `RunSaverHook` queries the run.

    Attributes:
        positions: Returns the positions of the batches to save; must be called on all processes.
        stopped_by: Returns the name of the hook that stopped the run; None if none did.
        before_save: Called before each save; if it returns True, nothing is saved.
        watch: The stopwatch of the run.
        account: Writes the times to the timeline; called when a save is certain, before it.
        current_state: Returns the state after the latest step.
    """

    positions: Callable[[], dict[str, Any]]
    stopped_by: Callable[[], str | None]
    before_save: Callable[[int], bool]
    watch: Stopwatch
    account: Callable[[], None]
    current_state: Callable[[], TrainState]


class RunSaverHook(CheckpointSaverHook):
    """Hook that saves the state, the position of the batches, the states of hooks, and which hook stopped the run.

    A step is saved again if a hook changed the state, or its own, after the save.

    Args:
        saver: The saver.
        save_secs: Interval in seconds.
        save_steps: Interval in steps.
        hooks: The hooks whose state is saved.
        callbacks: Functions of the run.
        flush: Called when a save is certain, before it.
        held: Name → initial value of the held hyperparameters.
    """

    def __init__(
        self,
        saver: Saver,
        save_secs: float | None,
        save_steps: int | None,
        hooks: Sequence[Any],
        callbacks: SaverCallbacks,
        flush: Callable[[], None] | None,
        held: dict[str, float],
    ) -> None:
        self._flush = flush
        super().__init__(
            saver,
            save_secs=save_secs,
            save_steps=save_steps,
            extra=self._made_extra,
            before_save=(self._flushed,),
        )
        self._hooks, self._callbacks, self._script = hooks, callbacks, {HELD: held} if held else {}
        self._memory = self._of_this_save = "{}"

    def _flushed(self, step: int) -> None:
        if self._flush is not None:
            self._flush()
        self._callbacks.account()

    def save(self, step: int, state: TrainState, *, wait: bool = False) -> bool:
        """Save like `CheckpointSaverHook.save`; waiting for steps in flight does not count as time for saving."""
        with contextlib.suppress(Exception):  # saving reports a failed step in more detail
            jax.block_until_ready(state)
        with self._callbacks.watch.part(SAVING):
            return super().save(step, state, wait=wait)

    def restored(self, step: int, state: TrainState) -> None:
        """Record that a checkpoint of this step was restored, with the current state and states of hooks."""
        self._of_this_save = _as_text(self._remembered())
        self.is_saved(step, state)

    def is_saved(self, step: int, state: TrainState) -> None:
        """Record that a checkpoint of this step holds this state and the states of hooks when it was made."""
        super().is_saved(step, state)
        self._memory = self._of_this_save

    def has_saved(self, step: int, state: TrainState) -> bool:
        """Whether a checkpoint of this step holds this state and the current states of hooks."""
        return super().has_saved(step, state) and _as_text(self._remembered()) == self._memory

    def _remembered(self) -> dict[str, Any]:
        states, by = hook_state.get_states(self._hooks), self._callbacks.stopped_by()
        return ({HOOKS: states} if states else {}) | ({STOPPED: by} if by is not None else {})

    def _made_extra(self) -> dict[str, Any]:
        remembered = self._remembered()
        self._of_this_save = _as_text(remembered)
        return self._callbacks.positions() | remembered | self._script


def _as_text(states: dict[str, Any]) -> str:
    return json.dumps(states, sort_keys=True)
