"""Checkpointing of everything that a run needs to resume."""

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jstep.core.meshes import internal_transfers
from jstep.data.loaders import POSITION, POSITIONS, gather_positions
from jstep.hooks.hook import get_states
from jstep.hooks.stock import CheckpointSaverHook
from jstep.hooks.timeline import SAVING
from jstep.loop.past import PAST
from jstep.loop.run import Run
from jstep.state.train_state import TrainState

HOOKS, STOPPED, HELD = "hooks", "stopped", "held"
"""Keys of a checkpoint's `extra`, in addition to the positions of loaders: the states of hooks, the name of the hook
that stopped the run, and the initial values of held hyperparameters."""


class _Memory(NamedTuple):
    """The parts of a checkpoint, apart from the state, that hooks may change at the same step after it is saved.

    Attributes:
        positions: The positions of the batches.
        hooks: The states of the hooks, as text.
    """

    positions: dict[str, Any]
    hooks: str


class RunSaverHook(CheckpointSaverHook):
    """Hook that saves the state, the position of the batches, the states of hooks, and which hook stopped the run.

    A step is saved again if a hook changed the state, its own, or the position of the batches, after the save.

    Args:
        run: The run.
        before: Functions that are called when a save is certain, before it.
    """

    def __init__(self, run: Run, before: Sequence[Callable[[], None]]) -> None:
        options = run.options
        super().__init__(
            run.saver,
            save_secs=options.save_checkpoint_secs,
            save_steps=options.save_checkpoint_steps,
            extra=self._made_extra,
            before_save=(self._call_before,),
        )
        self._before = before
        self._loop, self._hooks = run, list(run.hooks)
        self._memory = self._of_this_save = _Memory({}, "{}")

    def _call_before(self, step: int) -> None:
        for fn in self._before:
            fn()

    def save(self, step: int, state: TrainState, *, wait: bool = False) -> bool:
        """Save like `CheckpointSaverHook.save`; waiting for steps in flight does not count as time for saving."""
        with contextlib.suppress(Exception):  # saving reports a failed step in more detail
            jax.block_until_ready(state)
        with self._loop.watch.part(SAVING):
            return super().save(step, state, wait=wait)

    def save_alone(self, step: int, state: TrainState) -> None:
        """Save from another thread while the loader or a hook hangs: no method of a hook is called.

        The states of hooks are those of the latest save.
        """
        if not super().has_saved(step, state):
            self._call_before(step)
            extra = self._positions() | self._past() | json.loads(self._memory.hooks)
            with internal_transfers():
                self._loop.saver.save(state, extra=extra | ({HELD: self._loop.held} if self._loop.held else {}))
        self._loop.saver.wait()

    def restored(self, step: int, state: TrainState) -> None:
        """Record that a checkpoint of this step was restored, with the current state and states of hooks."""
        self._of_this_save = _Memory(self._positions(), _as_text(self._remembered()))
        self.is_saved(step, state)

    def is_saved(self, step: int, state: TrainState) -> None:
        """Record that a checkpoint of this step holds this state and the states of hooks when it was made."""
        super().is_saved(step, state)
        self._memory = self._of_this_save

    def has_saved(self, step: int, state: TrainState) -> bool:
        """Whether a checkpoint of this step holds this state, and the current states of hooks and position."""
        if not super().has_saved(step, state):
            return False
        feeder = self._loop.feeder
        # Only these can change after their step; the comparison comes first, as all processes take part in it.
        is_same = feeder is None or feeder.live is None or self._positions() == self._memory.positions
        return _as_text(self._remembered()) == self._memory.hooks and is_same

    def _remembered(self) -> dict[str, Any]:
        states, by = get_states(self._hooks), self._stopped_by()
        return ({HOOKS: states} if states else {}) | ({STOPPED: by} if by is not None else {})

    def _stopped_by(self) -> str | None:
        """The hook that stopped the run, now or, if this run takes no step, the earlier run."""
        kept = self._loop.extra.get(STOPPED) if self._loop.feeder is None else None
        return self._loop.stopped_by or kept

    def _positions(self) -> dict[str, Any]:
        """The positions of the batches; must be called on all processes."""
        run = self._loop
        if run.feeder is None:  # no step was run: the positions have not changed
            return {key: run.extra[key] for key in (POSITION, POSITIONS) if key in run.extra}
        # A batch that was fetched but not trained on is fetched again after a restart.
        return gather_positions(run.feeder.position_after(run.step - run.first))

    def _past(self) -> dict[str, Any]:
        run = self._loop
        if run.feeder is None:
            return {PAST: run.extra[PAST]} if PAST in run.extra else {}
        return {} if run.programs.cards is None else run.programs.cards.past(run.step)

    def _made_extra(self) -> dict[str, Any]:
        positions, remembered = self._positions(), self._remembered()
        self._of_this_save = _Memory(positions, _as_text(remembered))
        return positions | self._past() | remembered | ({HELD: self._loop.held} if self._loop.held else {})


def _as_text(states: dict[str, Any]) -> str:
    return json.dumps(states, sort_keys=True)
