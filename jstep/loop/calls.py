"""Calls, each with the batches of one or several steps, and the number of steps that "auto" chooses."""

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
from jstep.core.trees import batch_to_args
from jstep.data.placement import as_shardings, make_placer
from jstep.distributed import processes

_logger = logging.getLogger("jstep")


@dataclasses.dataclass(slots=True)  # not frozen: creating a frozen one takes four times as long
class Call:
    """The batches of one call, and the program that runs its steps.

    Attributes:
        args: For one step, or stacked for `program.max_steps` steps and padded at the end.
        position: The position of the batches after it.
        must_run: Whether its batches cannot be made again, so no signal may prevent it.
    """

    program: Any
    args: tuple[Any, ...]
    steps: int
    first: int
    position: Any = None
    must_run: bool = False

    @property
    def step_args(self) -> tuple[Any, ...]:
        step_args: tuple[Any, ...] = self.program.step_args if self.program.is_looped else self.args
        return step_args

    def trace(self, state: Tree) -> Any:
        """Return the trace of one step, or None, given the state that the call returned."""
        return self.program.stage.trace(state, self.step_args)

    def rows(self) -> int | None:
        """Return the size of the leading axis of all arguments; None if sizes differ or none has one."""
        axis = int(self.program.is_stacked)
        shapes = [getattr(leaf, "shape", None) for leaf in jax.tree.leaves(self.args)]
        sizes = {shape[axis] for shape in shapes if shape is not None and len(shape) > axis}
        return sizes.pop() if len(sizes) == 1 else None


CopiedBatches = Iterator[tuple[Any, Any]]
"""Batches that no other code writes to, each with the position after it."""
ProgramFor = Callable[[int, Any, Callable[[], tuple[Any, ...]]], Any]
"""`program_for(step, shapes, args)`, such as `ProgramTable.program_for`."""


def make_calls(
    items: CopiedBatches,
    start: int,
    program_for: ProgramFor,
    sharding: object = None,
    *,
    on_device: bool = False,
    ends: Iterable[float] = (math.inf,),
) -> Iterator[Call]:
    """Yield batches as calls, which end where the program, the shapes of the batches or `ends` require it.

    Args:
        on_device: Whether to put batches without a sharding on the default device: a step that is not compiled would
            otherwise see NumPy or JAX arrays depending on prefetching.
    """
    place_one = None if sharding is None and not on_device else make_placer(as_shardings(sharding))
    place_stacked = None if sharding is None else make_placer(as_shardings(sharding, stacked=True))
    step, item = start, None
    program: Any = None
    shapes: Any = None
    for end in ends:
        while step < end:
            item = item or next(items, None)
            if item is None:
                return
            batch, position = item
            before, shapes = shapes, shapes_in(batch)
            if program is None or program.is_looped or step >= program.stage.stop or shapes != before:
                program = program_for(step, shapes, functools.partial(_arguments, batch, place_one))
            some, item = [batch], None
            while len(some) < min(program.max_steps, end - step) and (item := next(items, None)) is not None:
                if shapes_in(item[0]) != shapes:
                    break
                some.append(item[0])
                position, item = item[1], None
            place = place_one
            if program.is_stacked:
                batch, place = _stacked(some, program.max_steps), place_stacked
            args = batch_to_args(batch if place is None else place(batch))
            yield Call(program, args, len(some), step, position)
            step += len(some)


def _arguments(batch: Tree, place: Callable[[Any], Any] | None) -> tuple[Any, ...]:
    return batch_to_args(batch if place is None else place(batch))


def shapes_in(batch: Tree) -> Any:
    leaves, structure = jax.tree_util.tree_flatten(batch)
    shapes: list[Any] = [structure]
    for leaf in leaves:
        shapes.append((leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else type(leaf))
    return tuple(shapes)


def _stacked(some: list[Any], max_steps: int) -> Any:
    """Stack batches; repeat the last one if there are fewer than `max_steps`."""

    def stack(*column: Any) -> Any:
        return _stack_arrays(column) if isinstance(column[0], jax.Array) else np.stack(column)

    return jax.tree.map(stack, *some, *[some[-1]] * (max_steps - len(some)))


_stack_arrays = jax.jit(jnp.stack)  # one dispatch for all leaves of a column


# `steps_per_call="auto"`: choose the maximum number of steps of a call from the times of the first calls.

AHEAD = 2
"""The number of calls that a thread reads ahead of the loop."""
AUTO = "auto"
MAX_CALL_SECS, MAX_STEPS_PER_CALL = 5e-3, 64
"""The maximum duration of a call in seconds, and its maximum number of steps."""
_UNTIMED, _TIMED = 2, 5
"""The number of calls for compilation and warm-up, and of timed calls."""


def choose_max_steps(seconds: float) -> int:
    """Return the maximum number of steps of a call, a power of two, from the duration of a step."""
    max_steps = 1
    while max_steps < MAX_STEPS_PER_CALL and 2 * max_steps * seconds <= MAX_CALL_SECS:
        max_steps *= 2
    return max_steps


class AutoSteps:
    """Timer of the first calls of a run, which then switches to longer calls once their program is compiled.

    All processes switch at the same step, after everything read ahead; for this they wait for the compilation.
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
        return len(self._seconds) == _TIMED

    def timed(self, run: Callable[..., Any], state: Tree, call: Call, *args: Any) -> Any:
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
            seconds = float(processes.max_over_processes(np.array([seconds], np.float32))[0])
        max_steps = choose_max_steps(seconds)
        steps = "1 step" if max_steps == 1 else f"up to {max_steps} steps"
        _logger.info('steps_per_call="auto": %s per call (one step takes %.3g ms)', steps, 1e3 * seconds)
        if max_steps == 1:
            return
        if processes.is_single_process():
            in_background(functools.partial(self._prepare, max_steps, beyond), name="jstep-compile")
        else:
            self._prepare(max_steps, beyond)

    def _prepare(self, max_steps: int, first: int) -> None:
        failed = False
        try:
            self._compile(max_steps)
        except Exception as error:
            failed = True
            _logger.warning(
                "the program of %d steps could not be compiled: %s: %s", max_steps, type(error).__name__, error
            )
        if not processes.any_process(failed):
            self._switch(max_steps, first)
