"""Restore the newest checkpoint, or start from the given state."""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.checkpoint import Saver, checkpoint_name
from jstep.checkpoint.format import left_out
from jstep.core import trees
from jstep.core.contexts import internal_transfers
from jstep.core.notes import note
from jstep.hooks.values import read
from jstep.loop.checks import check_alive
from jstep.loop.options import Options
from jstep.loop.run_saver_hook import HELD
from jstep.loop.signals import StopSignals
from jstep.optimizers.held import held_values
from jstep.state import TrainState, global_step

_logger = logging.getLogger("jstep")


class RunStart(NamedTuple):
    """The starting point of a run.

    Attributes:
        step: The step.
        state: The given or restored state.
        saver: The saver of the checkpoints, or None.
        restored: The step that was restored, or None.
        extra: The `extra` of that checkpoint.
        held: Name → initial value of the held hyperparameters.
    """

    step: int
    state: TrainState
    saver: Saver | None
    restored: int | None
    extra: dict[str, Any]
    held: dict[str, float]


class CheckpointInfo(NamedTuple):
    """The starting point of a run as far as it is known before any array is read.

    Attributes:
        step: The step; None if it is not known.
        saver: The saver of the checkpoints, or None.
        latest: The newest saved step, or None.
        extra: The `extra` of that checkpoint.
        given: The step of the given state; None if it is abstract or was donated.
        held: Name → initial value of the held hyperparameters.
    """

    step: int | None
    saver: Saver | None
    latest: int | None
    extra: dict[str, Any]
    given: int | None
    held: dict[str, float]


def open_checkpoints(
    options: Options,
    state: TrainState,
    stack: contextlib.ExitStack,
    signals: StopSignals,
    may_write: Callable[[], None],
) -> CheckpointInfo:
    """Open the checkpoints, call `may_write` once the run may write, and read the small parts of the newest one."""
    if options.checkpoint_dir is None:
        may_write()
        _check_concrete(state, "and no checkpoint_dir to restore from")
        return CheckpointInfo(_step_of(state), None, None, {}, None, {})
    if isinstance(options.checkpoint_dir, Saver):
        saver = options.checkpoint_dir
        leave: Callable[..., None] = _WaitAtExit(saver)
        leave_at_once = _do_not_wait
    else:
        saver = Saver(options.checkpoint_dir, prefix=options.checkpoint_prefix)
        leave, leave_at_once = saver.__exit__, functools.partial(saver.close, wait=False)
    # Waits for pending writes, also after an error; a second Ctrl-C does not wait.
    stack.push(lambda *error: leave_at_once() if signals.at_once else leave(*error))
    given = _step_if_known(state)
    held = _held(state) if given is not None else {}
    latest = saver.latest_step()
    if latest is None or latest < options.last_step:
        saver.claim(state)  # fails now, not at the first save
    else:
        left_out.left_out_indices(state, saver.leave_out)
    may_write()
    if latest is None:
        return CheckpointInfo(given, saver, None, {}, given, held)
    try:
        extra = saver.extra(latest)
    except Exception:  # `restore` reports what is wrong
        return CheckpointInfo(None, saver, latest, {}, given, held)
    return CheckpointInfo(latest, saver, latest, extra if isinstance(extra, dict) else {}, given, held)


def restore_or_init(checkpoints: CheckpointInfo, state: TrainState) -> RunStart:
    """Restore the newest checkpoint, or start from the given state."""
    _, saver, _, _, given, held = checkpoints
    if saver is None:
        return RunStart(_step_of(state), state, None, None, {}, {})
    try:
        with internal_transfers():
            # Without a step: a corrupted newest checkpoint is an error, not a reason to take an older one.
            state = saver.restore(state)
    except FileNotFoundError:
        _check_concrete(state, "and there is no checkpoint to restore")
        return RunStart(_step_of(state), state, saver, None, {}, held)
    restored = _step_of(state)
    extra = checkpoints.extra if restored == checkpoints.step else saver.extra(restored)
    extra = extra if isinstance(extra, dict) else {}
    _logger.info("restored %s", checkpoint_name(saver.prefix, restored))
    _warn_if_different(given, held, restored, extra.get(HELD), checkpoint_name(saver.prefix, restored))
    return RunStart(restored, state, saver, restored, extra, extra.get(HELD, {}) if given else held)


def _check_concrete(state: TrainState, why: str) -> None:
    """Refuse a state that a run cannot start from: an abstract one, or one that was donated."""
    for path, leaf in trees.leaves_with_paths(state):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"state: its {path!r} is a shape without values (jax.ShapeDtypeStruct), {why}; give a state of arrays, "
                "such as TrainState.create makes, or the checkpoint_dir of an earlier run"
            )
    check_alive(state)


def _step_if_known(state: TrainState) -> int | None:
    """The step of the given state; None if it is abstract or was donated."""
    step = state.global_step
    if not trees.is_array(step) or trees.donated_leaf(state) is not None:
        return None
    return _step_of(state)


def _held(state: TrainState) -> dict[str, float]:
    values = {name: value for name, value in held_values(state.slots).items() if np.ndim(value) == 0}
    return {name: float(value) for name, value in read(values).items()}


def _warn_if_different(given: int | None, held: dict[str, float], restored: int, before: Any, name: str) -> None:
    """Warn if the given state differs from the checkpoint, which wins."""
    if given and given != restored:
        _logger.warning(
            "state: the state passed (step %d) is ignored in favor of %s, the newest checkpoint of checkpoint_dir. To "
            "continue from the state passed, give another checkpoint_dir.",
            given,
            name,
        )
    if given or not isinstance(before, dict):
        return
    for hyperparameter, value in held.items():
        if before.get(hyperparameter, value) != value:
            _logger.warning(
                "state: held %r starts at %g, which was %g when this run started; the value in %s is used. Set "
                "another value by jstep.set_hyperparameter, in a hook.",
                hyperparameter,
                value,
                before[hyperparameter],
                name,
            )


def _step_of(state: TrainState) -> int:
    with internal_transfers():
        return global_step(state)


def _do_not_wait() -> None:
    """Leave a user-defined `Saver` without waiting for it."""


class _WaitAtExit:
    """Exit callback that waits for a user-defined `Saver` at the end of a run, and leaves it open."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def __call__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._saver.wait()
        except Exception as failure:
            if error is None:
                raise
            note(error, f"Additionally, {failure}")
