"""Restore the newest checkpoint, or start from the given state."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import Saver
from jstep.checkpoint.slots import left_out_indices
from jstep.core import trees
from jstep.core.checks import note
from jstep.core.meshes import internal_transfers
from jstep.distributed import processes
from jstep.hooks.metric_sums_program import read
from jstep.loop.checks import check_alive
from jstep.loop.options import Options
from jstep.loop.run import Run
from jstep.loop.run_saver_hook import HELD
from jstep.optimizers.hyperparameters import held_values
from jstep.state.global_step import global_step
from jstep.state.train_state import TrainState

_logger = logging.getLogger("jstep")


def open_checkpoints(run: Run, may_write: Callable[[], None]) -> None:
    """Open the checkpoints, call `may_write` once the run may write, and read the small parts of the newest one.

    Then the step at which the run begins is known, unless what is wrong with the checkpoint is left to `restore`.
    """
    options, state = run.options, run.state
    if options.checkpoint_dir is None:
        may_write()
        _check_concrete(state, "and no checkpoint_dir to restore from")
        run.begin_at(_step_of(state))
        return
    saver, run.latest = processes.on_all_processes(lambda: _opened(options), "the checkpoints cannot be read")
    run.closing.push(functools.partial(_leave, run, saver))
    run.saver, run.given = saver, _step_if_known(state)
    run.held = _held(state) if run.given is not None else {}
    if run.latest is None or run.latest < options.last_step:
        saver.claim(state)  # fails now, not at the first save
    else:
        left_out_indices(state, saver.leave_out)
    may_write()
    run.start = run.given if run.latest is None else run.latest
    run.first = run.start or 0
    if run.latest is not None:
        try:
            run.extra = _extra(saver, run.latest)
        except Exception:  # `restore` reports what is wrong
            run.start = None


def _opened(options: Options) -> tuple[Saver, int | None]:
    """Open the checkpoints of a run, and find the newest one."""
    given = options.checkpoint_dir
    assert given is not None
    saver = given if isinstance(given, Saver) else Saver(given, prefix=options.checkpoint_prefix)
    return saver, saver.latest_step()


def restore(run: Run) -> None:
    """Restore the newest checkpoint, or start from the given state."""
    run.is_begun = True
    saver = run.saver
    if saver is None:
        return
    try:
        with internal_transfers():
            # Without a step: a corrupted newest checkpoint is an error, not a reason to take an older one.
            run.state = saver.restore(run.state)
    except FileNotFoundError:
        _check_concrete(run.state, "and there is no checkpoint to restore")
        run.begin_at(_step_of(run.state))
        return
    restored = _step_of(run.state)
    if restored != run.start:
        run.extra = _extra(saver, restored)
    run.restored = restored
    run.begin_at(restored)
    _logger.info("restored %s", checkpoint_name(saver.prefix, restored))
    before = run.extra.get(HELD)
    _warn_if_different(run.given, run.held, restored, before, checkpoint_name(saver.prefix, restored))
    run.held = (before or {}) if run.given else run.held


def _extra(saver: Saver, step: int) -> dict[str, Any]:
    extra = saver.extra(step)
    return extra if isinstance(extra, dict) else {}


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


def _leave(run: Run, saver: Saver, kind: Any, error: BaseException | None, trace: Any) -> None:
    """Wait for pending writes, also after an error, but not after a second Ctrl-C; close the `Saver` if it is ours."""
    leave = saver.wait if saver is run.options.checkpoint_dir else saver.close
    try:
        if not run.signals.at_once:
            leave()
        elif leave == saver.close:
            saver.close(wait=False)
    except Exception as failure:
        if error is None:
            raise
        note(error, f"Additionally, {failure}")
