"""Replaying a run up to a step."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jstep.checkpoint.names import checkpoint_name
from jstep.checkpoint.saver import Saver
from jstep.core import trees
from jstep.core.checks import as_int, shown
from jstep.core.meshes import internal_transfers
from jstep.data.loaders import Source, saved_position, source_of
from jstep.hooks.hook import check_step
from jstep.loop.feeder import Call, LoopState, StageBoundaries, copied_batches, make_calls, run_steps, stages_of
from jstep.loop.programs import Programs, check
from jstep.loop.run import as_steps_per_call, check_locations
from jstep.state.global_step import global_step
from jstep.state.train_state import TrainState

_logger = logging.getLogger("jstep")


class Replay(NamedTuple):
    """State and arguments before the update `step` → step + 1; `train_step(state, *args)` repeats the update.

    Attributes:
        state: The state before the update.
        args: The other arguments of the step: the batch.
    """

    state: TrainState
    args: tuple[Any, ...]


def replay(
    train_step: Callable[..., tuple[TrainState, Any]] | Mapping[int, Callable[..., tuple[TrainState, Any]]],
    state: TrainState,
    batches: Any,
    checkpoint_dir: str | os.PathLike[str] | Saver | None,
    step: int,
    *,
    prefix: str = "model",
    steps_per_call: int | str = 1,
    batch_sharding: Any = None,
) -> Replay:
    """Return the state before the update `step` → step + 1 of an earlier run, and its arguments, bit for bit.

    The newest checkpoint up to that step is restored and the steps after it are run again as in the run, with
    `steps_per_call` several per call. If there is no such checkpoint, replay starts from `state`. Nothing is written.

    If the loss was NaN at step 7310, the update 7309 → 7310 made it. With the arguments of `train`,

        state, args = jstep.replay(train_step, state, batches, checkpoint_dir, 7309)
        print(jstep.find_nonfinite(train_step, state, *args))

    prints the line of the loss and the ranges of its operands. For a closer look, `loss_fn(state.params, *args)`
    computes the loss and `train_step(state, *args)` runs the step.

    Changes that hooks made to the state between that checkpoint and the step are not replayed (hooks that return a
    TrainState, such as `ReduceOnPlateau`); the checkpoint after the change has them. The position of a loader is
    changed; reset the loader before another use.

    Args:
        train_step: As given to `train`.
        state: As given to `train`. It provides structure and shardings, and is the start if there is no checkpoint
            before the step. It is donated, as by `train`.
        batches: As given to `train`: an object with `batches[N]`, a function of the step, or a loader whose position is
            saved: with `get_state` and `set_state`, or `state_dict` and `load_state_dict`.
        checkpoint_dir: As given to `train`.
        step: The number of updates before the one to replay, ≥ 0.
        prefix: The prefix of the checkpoints.
        steps_per_call: As given to `train`.
        batch_sharding: As given to `train`.

    Returns:
        A `Replay`: `state`, whose global_step is `step`, and `args`.

    Raises:
        CheckpointError: The checkpoint is corrupted (the message has its name).
        ValueError: There is no checkpoint or state before the step, or the batches cannot be set to it.

    Example:
        >>> import jax.numpy as jnp, jstep, tempfile
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> def make_state():
        ...     return jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> directory, batches = tempfile.mkdtemp(), [jnp.float32(n) for n in range(9)]
        >>> state = jstep.train(train_step, make_state(), batches, 9, checkpoint_dir=directory)
        >>> state, args = jstep.replay(train_step, make_state(), batches, directory, 5)
        >>> print(state.global_step, state.params["w"], *args)
        5 3.0625 5.0
    """
    step = as_int(step, "step", 0, "the number of updates before the one to replay")
    steps_per_call = as_steps_per_call(steps_per_call, batches)
    stages = stages_of(train_step)
    check(state, step)
    if isinstance(checkpoint_dir, Saver) and prefix == "model":
        prefix = checkpoint_dir.prefix
    check_locations(checkpoint_dir, prefix, None, batch_sharding)

    start, state, position = _restored_start(state, checkpoint_dir, prefix, step)
    loop = LoopState(start, state)
    source = source_of(batches, start, step + 1, position, state=lambda: loop.state)
    source = _seekable(source, batches, start, position)
    items = copied_batches(source)
    programs = Programs(stages, steps_per_call, state=state)
    if step > start:
        made = programs.calls(
            items, start, StageBoundaries(stages, source.next_change).ends(start, step), batch_sharding
        )
        run_steps(loop, programs, _exactly(made, step - start), step)
        if loop.step < step:
            raise _too_few(loop.step, step)
    last = next(make_calls(items, step, batch_sharding, on_device=programs.on_device), None)
    if last is None:
        raise _too_few(step, step)
    check_step(step, loop.state, start if step > start else None)
    return Replay(loop.state, last.args)


def _restored_start(state: TrainState, checkpoint_dir: Any, prefix: str, step: int) -> tuple[int, TrainState, Any]:
    """Return the step to start from, the state, and the position of the batches if it was saved."""
    there: list[int] = []
    where = "no checkpoint_dir was given"
    if checkpoint_dir is not None:
        own = not isinstance(checkpoint_dir, Saver)
        with Saver(checkpoint_dir, prefix=prefix) if own else contextlib.nullcontext(checkpoint_dir) as saver:
            there = saver.all_steps()
            start = max((one for one in there if one <= step), default=None)
            if start is not None:
                _log(checkpoint_name(saver.prefix, start), start, step)
                with internal_transfers():
                    state, extra = saver.restore(state, step=start), saver.extra(start)
                return start, state, saved_position(extra) if isinstance(extra, dict) else None
        found = f"checkpoints of the steps {shown(there)}" if there else f"no checkpoint {prefix}-*"
        where = f"{os.fspath(checkpoint_dir if own else checkpoint_dir.directory)} has {found}"
    with internal_transfers():
        start = global_step(state) if trees.donated_leaf(state) is None else None
    if start is None or start > step:
        given = "was donated" if start is None else f"is at step {start}"
        raise ValueError(
            f"step={step}: nothing lies before it: {where}, and the state given {given}. Give the state that the run "
            "started from, or a later step"
        )
    origin = "" if checkpoint_dir is None else ", because there is no checkpoint before it"
    _log(f"the given state{origin}", start, step)
    return start, state, None


def _log(origin: str, start: int, step: int) -> None:
    _logger.info("replay: from %s (step %d), %d steps to step %d", origin, start, step - start, step)


def _seekable(source: Source, batches: Any, start: int, position: Any) -> Source:
    is_lost = source.position is not None and position is None and start > 0
    if source.seekable and not is_lost:
        return source
    why = f"the checkpoint of step {start} has no position for them" if is_lost else "they have no position to set"
    raise ValueError(
        f"batches={shown(batches)}: must be able to go to step {start}, and {why}. Give jstep.batches, a list, a "
        "function of the step, or a loader with get_state and set_state, or with state_dict and load_state_dict, whose "
        "run kept checkpoints"
    )


def _exactly(made: Iterator[Call], steps: int) -> Iterator[Call]:
    """Iterate over the calls of so many steps, without reading batches of later ones."""
    for call in made:
        yield call
        steps -= call.steps
        if steps <= 0:
            return


def _too_few(reached: int, step: int) -> ValueError:
    return ValueError(
        f"step={step}: the batches end after {reached} of the {step + 1} that it needs (the last is batch {step}); "
        "give the batches of that run, or an earlier step"
    )
