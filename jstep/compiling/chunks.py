"""The batches of each call with their program, and the steps at which calls end."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jstep.compiling.stages import TrainSteps
from jstep.core.trees import Tree, batch_to_args
from jstep.data.batch_placement import as_shardings, make_placer
from jstep.hooks.cadence import NEVER


@dataclasses.dataclass(slots=True)  # not frozen: creating a frozen one takes four times as long
class Chunk:
    """The batches of one call, and the program that runs its steps.

    Attributes:
        args: For one step, or stacked for `program.max_steps` steps and padded at the end.
        first: The step of the state that it begins with.
        position: The position of the source after the last batch of the chunk.
        can_interrupt: Whether a signal may prevent the call, because its batches can be made again.
    """

    program: Any
    args: tuple[Any, ...]
    steps: int
    first: int
    position: Any = None
    can_interrupt: bool = True

    @property
    def step_args(self) -> tuple[Any, ...]:
        step_args: tuple[Any, ...] = self.program.step_args if self.program.is_looped else self.args
        return step_args

    def trace(self, state: Tree) -> Any:
        return self.program.stage.trace(state, self.step_args)

    def rows(self) -> int | None:
        """Return the number of rows of each batch; None if its leaves differ in it."""
        axis = 1 if self.program.is_stacked else 0
        sizes: set[int] = set()
        for leaf in jax.tree.leaves(self.args):
            shape = getattr(leaf, "shape", ())
            if len(shape) > axis:
                sizes.add(shape[axis])
        return sizes.pop() if len(sizes) == 1 else None


CopiedBatches = Iterator[tuple[Any, Any, Any]]
"""Batches, each with its shapes and the position after it."""
ProgramFor = Callable[[int, Any, Callable[[], tuple[Any, ...]]], Any]
"""`program_for(step, shapes, args)`, such as `ProgramTable.program_for`."""


def make_chunks(
    batches: Iterable[tuple[Any, Any, Any]],
    start: int,
    program_for: ProgramFor,
    sharding: object = None,
    *,
    on_device: bool = False,
    ends: Iterable[float] = (math.inf,),
) -> Iterator[Chunk]:
    """Yield batches as chunks, which end where the program, the shapes or `ends` require it.

    Args:
        batches: As `CopiedBatches`.
        start: The step of the first batch.
        on_device: Whether batches are put on the default device, as in `ProgramTable`.
        ends: The steps at which chunks must end, in increasing order; no chunk follows the last
            one.
    """
    place_one: Callable[[Any], Any] | None = None
    place_stacked: Callable[[Any], Any] | None = None
    if sharding is not None or on_device:
        place_one = make_placer(as_shardings(sharding))
    if sharding is not None:
        place_stacked = make_placer(as_shardings(sharding, stacked=True))
    items = iter(batches)
    step = start
    item: Any = None  # a batch that was read, and is in no chunk yet
    program: Any = None
    shapes: Any = None
    for end in ends:
        while step < end:
            item = item or next(items, None)
            if item is None:
                return
            previous_shapes = shapes
            batch, shapes, position = item
            # A looped program is looked up for each call: a longer one may have replaced it.
            is_other_stage = program is None or step >= program.stage.stop
            if is_other_stage or program.is_looped or shapes != previous_shapes:
                program = program_for(step, shapes, functools.partial(_make_args, batch, place_one))
            item = None
            if not program.is_stacked:
                # As `_make_args`, without its call.
                args = batch_to_args(batch if place_one is None else place_one(batch))
                yield Chunk(program, args, 1, step, position)
                step += 1
                continue
            batches_of_call = [batch]
            max_steps = min(program.max_steps, end - step)
            while len(batches_of_call) < max_steps:
                item = next(items, None)
                # An item with other shapes ends this chunk, and begins the next one.
                if item is None or item[1] != shapes:
                    break
                batches_of_call.append(item[0])
                position = item[2]
                item = None
            num_steps = len(batches_of_call)
            batch = _stack_batches(batches_of_call, program.max_steps)
            # Here and not when it is assigned again: the call would hold each batch twice, and a
            # stage that is not stacked would hold those of the latest one that is.
            del batches_of_call
            yield Chunk(program, _make_args(batch, place_stacked), num_steps, step, position)
            step += num_steps


def _make_args(batch: Tree, place: Callable[[Any], Any] | None) -> tuple[Any, ...]:
    return batch_to_args(batch if place is None else place(batch))


def _stack_batches(batches: list[Any], max_steps: int) -> Any:
    """Stack batches for a program of `max_steps` steps.

    The last one is repeated as padding, which is not trained on.
    """

    def stack(*column: Any) -> Any:
        if isinstance(column[0], jax.Array):
            return _stack_arrays(column)
        return np.stack(column)

    padding = [batches[-1]] * (max_steps - len(batches))
    return jax.tree.map(stack, *batches, *padding)


_stack_arrays = jax.jit(jnp.stack)  # one dispatch, and not one for each batch


# The steps at which calls end.

_MAX_CHANGES = 64
"""The maximum number of changes of batch shapes to compile ahead."""


class ProgramChanges(NamedTuple):
    """The steps at which calls need another program.

    There, another stage begins, or the shapes of the batches change.
    """

    stages: TrainSteps
    next_shape_change: Callable[[int], int | None]

    def _next_change(self, step: int, last_step: int) -> int:
        next_step = last_step
        for other in (self.next_shape_change(step), self.stages.next_stage_start(step)):
            if other is not None:
                next_step = min(next_step, other)
        return next_step

    def end_steps(
        self, first: int, last_step: int, next_due: Callable[[int], int] = lambda step: NEVER
    ) -> Iterator[int]:
        """Yield the steps at which chunks must end: the program changes, or a hook is due."""
        step = first
        while step < last_step:
            step = min(self._next_change(step, last_step), next_due(step))
            yield step

    def start_steps(self, first: int, last_step: int) -> Iterator[int]:
        """Yield the first step, and those with which another stage or other shapes begin."""
        for stage in self.stages.stages():
            step = max(first, stage.first)
            end = last_step if stage.stop is None else min(stage.stop, last_step)
            for _ in range(1 + _MAX_CHANGES):
                if step >= end:
                    break
                yield step
                step = self._next_change(step, end)
