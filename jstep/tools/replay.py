"""Going back to a step."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jstep.checkpoint import Saver
from jstep.core.checks import as_int, shown
from jstep.core.contexts import internal_transfers
from jstep.loop.batch_feeder import Call, copied_batches, make_calls
from jstep.loop.checks import check, check_alive
from jstep.loop.options import check_locations
from jstep.loop.positions import saved_position
from jstep.loop.programs import Programs
from jstep.loop.run_steps import run_steps
from jstep.loop.sources import Source, source_of
from jstep.loop.stages import StageBoundaries, call_lengths, stages_of
from jstep.state import TrainState, global_step


class Replay(NamedTuple):
    """The update `step` → step + 1, before it is made: `train_step(state, *args)` makes it again.

    Attributes:
        state: The state before it.
        args: Its arguments: the batch.
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
    steps_per_call: int = 1,
    batch_sharding: Any = None,
) -> Replay:
    """The state before the update `step` → step + 1 of an earlier run, and that update's arguments, bit for bit.

    It restores the newest checkpoint up to that step and makes the steps between again, as the run did: with
    `steps_per_call`, several in one call. Where there is no such checkpoint it starts from `state`. Nothing is written.

    "The loss was NaN at step 7310": the update 7309 → 7310 made it. From the arguments that `train` was given,

        state, args = jstep.replay(train_step, state, batches, checkpoint_dir, 7309)
        print(jstep.find_nonfinite(train_step, state, *args))

    says at which line of the loss, of which numbers. Or look closer: `loss_fn(state.params, *args)` is the loss,
    `train_step(state, *args)` takes the step.

    What hooks changed in the state between that checkpoint and the step is not replayed (a hook that returns a
    TrainState, such as `ReduceOnPlateau`): the checkpoint after the change has it. A loader that keeps its position
    is set to where it was; start it anew before another use.

    Args:
        train_step: What `train` was given.
        state: What `train` was given: its structure and places, and where to start where no checkpoint lies before the
            step. It is used up, as by `train`.
        batches: What `train` was given: an object with `batches[N]`, a function of the step, or a loader whose
            position is kept: with `get_state` and `set_state`, or `state_dict` and `load_state_dict`.
        checkpoint_dir: What `train` was given.
        step: The number of updates before the one to look at, ≥ 0.
        prefix: Of the checkpoints.
        steps_per_call: What `train` was given.
        batch_sharding: What `train` was given.

    Returns:
        A `Replay`: `state`, whose global_step is `step`, and `args`.

    Raises:
        CheckpointError: The checkpoint is damaged (names it).
        ValueError: Nothing lies before the step, or the batches cannot go there.

    Example:
        >>> import jax.numpy as jnp, jstep, tempfile
        >>> optimizer = jstep.gradient_descent(0.25)
        >>> train_step = jstep.minimize(lambda params, x: (params["w"] - x) ** 2, optimizer)
        >>> def make_state():
        ...     return jstep.TrainState.create({"w": 0.0}, optimizer)
        >>> directory, batches = tempfile.mkdtemp(), [jnp.float32(n) for n in range(9)]
        >>> state = jstep.train(train_step, make_state(), batches, 9, checkpoint_dir=directory, progress=False)
        >>> state, args = jstep.replay(train_step, make_state(), batches, directory, 5)
        >>> print(state.global_step, state.params["w"], *args)
        5 3.0625 5.0
    """
    step = as_int(step, "step", 0, "the number of updates before the one to look at")
    steps_per_call = as_int(steps_per_call, "steps_per_call", 1)
    stages = stages_of(train_step)
    check(state, step)
    if isinstance(checkpoint_dir, Saver) and prefix == "model":
        prefix = checkpoint_dir.prefix
    check_locations(checkpoint_dir, prefix, None, batch_sharding)

    start, state, position = _restored_start(state, checkpoint_dir, prefix, step)
    source = _seekable(source_of(batches, start, step + 1, position), batches, start, position)
    items = copied_batches(source)
    programs = Programs(stages, several=steps_per_call > 1)
    if step > start:
        boundaries = StageBoundaries(stages, source.next_change)
        steps = call_lengths(start, step, steps_per_call, lambda n: boundaries.after(n, step))
        between = None if steps_per_call == 1 else steps
        made = make_calls(
            items, start, between, batch_sharding, on_device=programs.on_device, stack_one=programs.stacks_one
        )
        loop = run_steps(programs, state, _exactly(made, step - start), start, step)
        if loop.step < step:
            raise _too_few(loop.step, step)
        state = loop.state
    last = next(make_calls(items, step, None, batch_sharding, on_device=programs.on_device), None)
    if last is None:
        raise _too_few(step, step)
    with internal_transfers():
        arrived = global_step(state)
    if arrived != step:
        raise ValueError(
            f"train_step: must advance global_step by one, but after {step - start} steps from {start} it is {arrived}"
        )
    return Replay(state, last.args)


def _restored_start(state: TrainState, checkpoint_dir: Any, prefix: str, step: int) -> tuple[int, TrainState, Any]:
    """The step to start from, the state, and the position of the batches, if it was kept."""
    before: list[int] = []
    there: list[int] = []
    if checkpoint_dir is not None:
        own = not isinstance(checkpoint_dir, Saver)
        with Saver(checkpoint_dir, prefix=prefix) if own else contextlib.nullcontext(checkpoint_dir) as saver:
            there = saver.all_steps()
            before = [one for one in there if one <= step]
            if before:
                with internal_transfers():
                    state = saver.restore(state, step=before[-1])
                    extra = saver.extra(before[-1])
                return before[-1], state, saved_position(extra) if isinstance(extra, dict) else None
    with internal_transfers():
        start = global_step(state) if not _donated(state) else None
    if start is None or start > step:
        where = "no checkpoint_dir was given" if checkpoint_dir is None else f"{os.fspath(_directory(checkpoint_dir))} "
        if checkpoint_dir is not None:
            where += f"has checkpoints of the steps {shown(there)}" if there else f"has no checkpoint {prefix}-*"
        given = "was donated" if start is None else f"is at step {start}"
        raise ValueError(
            f"step={step}: nothing lies before it: {where}, and the state given {given}. Give the state that the run "
            "started from, or a later step"
        )
    return start, state, None


def _donated(state: TrainState) -> bool:
    try:
        check_alive(state)
    except RuntimeError:
        return True
    return False


def _directory(checkpoint_dir: Any) -> Any:
    return checkpoint_dir.directory if isinstance(checkpoint_dir, Saver) else checkpoint_dir


def _seekable(source: Source, batches: Any, start: int, position: Any) -> Source:
    is_lost = source.position is not None and position is None and start > 0
    if source.seekable and not is_lost:
        return source
    why = f"the checkpoint of step {start} has no position of it" if is_lost else "it has no position to go to"
    raise ValueError(
        f"batches={shown(batches)}: must be able to go to step {start}, and {why}. Give jstep.batches, a list, a "
        "function of the step, or a loader with get_state and set_state, or with state_dict and load_state_dict, whose "
        "run kept checkpoints"
    )


def _exactly(made: Iterator[Call], steps: int) -> Iterator[Call]:
    """The calls of so many steps: no batch is taken that belongs to later ones."""
    for call in made:
        yield call
        steps -= call.steps
        if steps <= 0:
            return


def _too_few(reached: int, step: int) -> ValueError:
    return ValueError(
        f"step={step}: the batches end after {reached} of the {step + 1} that it takes (the last is batch {step}); "
        "give the batches of that run, or an earlier step"
    )
