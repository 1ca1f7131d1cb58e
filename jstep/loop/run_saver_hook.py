"""The checkpoints of a run: all that it is resumed from is in them."""

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
"""What `extra` of a checkpoint holds, besides the positions of loaders: what the hooks remember, who stopped the run,
and the hyperparameters that the script gave the state to hold."""


class SaverCallbacks(NamedTuple):
    """What a run tells the hook that saves it.

    Attributes:
        positions: What to keep of where the batches are, on all processes, which all call it.
        stopped_by: The name of the hook that stopped the run; None if none did.
        before_save: Called before each save; a true result prevents it.
        watch: Where the time goes.
        account: Writes down where it went; called before each save, when it is certain.
    """

    positions: Callable[[], dict[str, Any]]
    stopped_by: Callable[[], str | None]
    before_save: Callable[[int], bool]
    watch: Stopwatch
    account: Callable[[], None]


class RunSaverHook(CheckpointSaverHook):
    """Saves the state, the position of the batches, what hooks remember, and who stopped the run.

    A step is saved again if a hook changed the state, or remembers something else, after it was saved.

    Args:
        saver: Where to.
        save_secs: How often, in seconds.
        save_steps: How often, in steps.
        hooks: Those who remember.
        callbacks: What the run knows.
        flush: Called before each save, when it is certain.
        held: Name → value of the hyperparameters that the state held when the script made it.
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
            before_save=(callbacks.before_save, self._flushed),
        )
        self._hooks, self._callbacks, self._script = hooks, callbacks, {HELD: held} if held else {}
        self._memory = self._of_this_save = "{}"

    def _flushed(self, step: int) -> None:
        if self._flush is not None:
            self._flush()
        self._callbacks.account()

    def save(self, step: int, state: TrainState, *, wait: bool = False) -> bool:
        """Saves as `CheckpointSaverHook.save` does; the steps under way, which that waits for, are none of its time."""
        with contextlib.suppress(Exception):  # a step that failed is found again, by what says more of it
            jax.block_until_ready(state)
        with self._callbacks.watch.part(SAVING):
            return super().save(step, state, wait=wait)

    def restored(self, step: int, state: TrainState) -> None:
        """Notes that there is a checkpoint of this step, of this state, with what hooks remember now."""
        self._of_this_save = _as_text(self._remembered())
        self.is_saved(step, state)

    def is_saved(self, step: int, state: TrainState) -> None:
        """Notes that there is a checkpoint of this step that holds this state and what hooks remembered."""
        super().is_saved(step, state)
        self._memory = self._of_this_save

    def has_saved(self, step: int, state: TrainState) -> bool:
        """Whether there is a checkpoint of this step that holds this state and what hooks remember now."""
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
