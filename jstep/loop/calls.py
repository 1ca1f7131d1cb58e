"""Batches as the arguments of calls, each of one step or several, and how many steps of a call "auto" chooses."""

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.annotations import Tree
from jstep.core.threads import in_background
from jstep.core.trees import arguments_of
from jstep.data.placement import as_shardings, placement
from jstep.distributed import processes

# What a call is.


@dataclasses.dataclass(slots=True)  # not frozen: creating a frozen one takes four times as long
class Call:
    """The batches of one call, and the program that runs its steps.

    Attributes:
        program: The `Program`.
        args: The arguments of one step; if stacked, those of `program.most` steps, the last ones being padding.
        steps: The number of steps.
        first: The step at which the call begins.
        position: The position of the source after these batches, from `position_of`; None if not known.
        must_run: Whether its batches cannot be made again, so that no signal may prevent the call.
    """

    program: Any
    args: tuple[Any, ...]
    steps: int
    first: int
    position: Any = None
    must_run: bool = False

    @property
    def of_one(self) -> tuple[Any, ...]:
        """The arguments of one step, or their shapes."""
        of_one: tuple[Any, ...] = self.program.of_one if self.program.is_looped else self.args
        return of_one

    def trace(self, state: Tree) -> Any:
        """The trace of one of its steps, with the state that the call returned; None if it cannot be traced."""
        return self.program.stage.trace(state, self.of_one)

    def rows(self) -> int | None:
        """The size of the leading axis of all arguments of a step; None if the sizes differ or none has one."""
        axis = int(self.program.is_stacked)
        shapes = [getattr(leaf, "shape", None) for leaf in jax.tree.leaves(self.args)]
        sizes = {shape[axis] for shape in shapes if shape is not None and len(shape) > axis}
        return sizes.pop() if len(sizes) == 1 else None


CopiedBatches = Iterator[tuple[Any, Any]]
"""Batches that no other code writes to, each with the position after it."""
ProgramFor = Callable[[int, Any, Callable[[], tuple[Any, ...]]], Any]
"""`program_for(step, shapes, args)`, as `ProgramTable.program_for`."""


def make_calls(
    items: CopiedBatches,
    start: int,
    program_for: ProgramFor,
    sharding: object = None,
    *,
    on_device: bool = False,
    ends: Iterable[float] = (math.inf,),
) -> Iterator[Call]:
    """Yield batches as calls. One of several steps ends where its program, the shapes of the batches or `ends` require.

    Args:
        items: The batches, from `copied_batches`.
        start: The step of the first batch.
        program_for: Returns the program for batches of some shapes.
        sharding: The sharding of a batch, as in `prefetch_to_device`; None does not move it.
        on_device: Whether to put batches without a sharding on the default device, for a step that is not compiled:
            such a step would see NumPy arrays or JAX arrays, depending on whether batches are prefetched.
        ends: The steps at which calls must end, in order; the last one ends the run.
    """
    one = None if sharding is None and not on_device else placement(as_shardings(sharding))
    several = None if sharding is None else placement(as_shardings(sharding, stacked=True))
    step, item = start, None
    for end in ends:
        while step < end:
            item = item or next(items, None)
            if item is None:
                return
            batch, position = item
            shapes = shapes_in(batch)
            program = program_for(step, shapes, functools.partial(_arguments, batch, one))
            some, item = [batch], None
            while len(some) < min(program.most, end - step) and (item := next(items, None)) is not None:
                if shapes_in(item[0]) != shapes:
                    break
                some.append(item[0])
                position, item = item[1], None
            place = one
            if program.is_stacked:
                batch, place = _stacked(some, program.most), several
            yield Call(program, _arguments(batch, place), len(some), step, position)
            step += len(some)


def _arguments(batch: Tree, place: Callable[[Any], Any] | None) -> tuple[Any, ...]:
    return arguments_of(batch if place is None else place(batch))


def shapes_in(batch: Tree) -> Any:
    """The structure, shapes and dtypes of a batch; batches that can be stacked agree in them."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple([(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else type(leaf) for leaf in leaves])


def _stacked(some: list[Any], most: int) -> Any:
    """Stack batches of the same shapes; the last one is repeated where there are fewer than `most`."""

    def stack(*column: Any) -> Any:
        return _stack_arrays(column) if isinstance(column[0], jax.Array) else np.stack(column)

    return jax.tree.map(stack, *some, *[some[-1]] * (most - len(some)))


_stack_arrays = jax.jit(jnp.stack)  # one dispatch for all leaves of a column


# `steps_per_call="auto"`: choose the most steps of a call from the times of the first calls.

_logger = logging.getLogger("jstep")

AHEAD = 2
"""The number of calls whose batches a thread reads ahead of the loop."""
AUTO = "auto"
LONGEST_CALL, MOST = 5e-3, 64
"""The seconds that a call may take, and the most steps that it may have."""
_UNTIMED, _TIMED = 2, 5
"""The number of calls that compile and warm up, and of those that are timed."""


def most_steps(seconds: float) -> int:
    """The most steps of a call, a power of two, for steps that take some seconds each."""
    most = 1
    while most < MOST and 2 * most * seconds <= LONGEST_CALL:
        most *= 2
    return most


class AutoSteps:
    """Timer of the first calls of a run, which then switches to longer calls once their program is compiled.

    It waits for the device during the calls that it times, so that their times are those of the device. Processes of
    one run switch at the same step, which lies beyond all that a thread of any of them has read ahead; for that, they
    wait for the compilation.

    Args:
        compile: `compile(most)` compiles the program of up to that many steps.
        switch: `switch(most, first)` makes calls of up to that many steps, from step `first` on.
        clock: Returns seconds; replaced in tests.
    """

    def __init__(
        self,
        compile: Callable[[int], object],
        switch: Callable[[int, int], object],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._compile, self._switch, self._clock = compile, switch, clock
        self._calls = 0
        self._seconds: list[float] = []

    @property
    def is_over(self) -> bool:
        """Whether the number of steps is chosen."""
        return len(self._seconds) == _TIMED

    def timed(self, run: Callable[..., Any], state: Tree, call: Call, *args: Any) -> Any:
        """Return `run(state, call, *args)`, a state and others, for a call of one step."""
        self._calls += 1
        if self._calls > _UNTIMED:
            jax.block_until_ready(state)
        began = self._clock()
        result = run(state, call, *args)
        if self._calls > _UNTIMED:
            jax.block_until_ready(result[0])
            self._seconds.append(self._clock() - began)
        if self.is_over:
            self._choose(min(self._seconds), call.first + 1 + AHEAD)
        return result

    def _choose(self, seconds: float, beyond: int) -> None:
        if not processes.is_single_process():
            (slowest,) = processes.max_over_processes(np.array([round(seconds * 1e6)], np.int32))
            seconds = float(slowest) / 1e6
        most = most_steps(seconds)
        steps = "1 step" if most == 1 else f"up to {most} steps"
        _logger.info('steps_per_call="auto": %s a call, as a step takes %.3g ms', steps, 1e3 * seconds)
        if most == 1:
            return
        if processes.is_single_process():
            in_background(functools.partial(self._prepare, most, beyond), name="jstep-compile")
        else:
            self._prepare(most, beyond)

    def _prepare(self, most: int, first: int) -> None:
        failed = False
        try:
            self._compile(most)
        except Exception as error:
            failed = True
            _logger.warning("the program of %d steps could not be compiled: %s: %s", most, type(error).__name__, error)
        if not processes.any_process(failed):
            self._switch(most, first)
