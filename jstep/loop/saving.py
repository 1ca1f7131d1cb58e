"""The checkpoints of a run: what it goes on from is all in them."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from jstep.checkpoint import Saver
from jstep.hooks import CheckpointSaverHook, memory
from jstep.state import TrainState

POSITION, HOOKS = "batches", "hooks"
"""What `extra` of a checkpoint holds: where the batches are, and what the hooks remember."""


class RunSaverHook(CheckpointSaverHook):
    """Saves the state, the position of the batches and what hooks remember.

    A step is saved again where a hook changed the state, or remembers something else, after it was saved.

    Args:
        saver: Where to.
        save_secs: How often, in seconds.
        save_steps: How often, in steps.
        hooks: Those who remember, and those who are asked before a save.
        position: Where the batches are, as JSON can hold it; None where nobody can tell.
        flush: Called before each save, when it is certain.
    """

    def __init__(
        self,
        saver: Saver,
        save_secs: float | None,
        save_steps: int | None,
        hooks: Sequence[Any],
        position: Callable[[], Any],
        flush: Callable[[int], None] | None,
    ) -> None:
        checks = [hook.before_save for hook in hooks if hasattr(hook, "before_save")]
        if flush is not None:
            checks.append(flush)
        super().__init__(saver, save_secs, save_steps, extra=self._made_extra, before_save=tuple(checks))
        self._hooks, self._position = hooks, position
        self._memory = self._of_this_save = "{}"

    def restored(self, step: int, state: TrainState) -> None:
        """Says that there is a checkpoint of this step, of this state, with what hooks remember now."""
        self._of_this_save = _as_text(memory.states_of(self._hooks))
        self.is_saved(step, state)

    def is_saved(self, step: int, state: TrainState) -> None:
        """Says that there is a checkpoint of this step that holds this state and what hooks remembered."""
        super().is_saved(step, state)
        self._memory = self._of_this_save

    def has_saved(self, step: int, state: TrainState) -> bool:
        """Whether there is a checkpoint of this step that holds this state and what hooks remember now."""
        return super().has_saved(step, state) and _as_text(memory.states_of(self._hooks)) == self._memory

    def _made_extra(self) -> dict[str, Any]:
        states, position = memory.states_of(self._hooks), self._position()
        self._of_this_save = _as_text(states)
        return ({} if position is None else {POSITION: position}) | ({HOOKS: states} if states else {})


def _as_text(states: dict[str, Any]) -> str:
    return json.dumps(states, sort_keys=True)
