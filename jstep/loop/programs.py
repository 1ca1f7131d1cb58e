"""The programs of a run: its stages, the program for the shapes of a batch, and the batches of each call.

The glossary of CONTRIBUTING.md defines these words. `compiling.py` decides when a program is compiled, and
`dispatch.py` runs it.
"""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.checks import as_function
from jstep.core.exceptions import forget_frames
from jstep.core.jaxprs import is_slow_in_loops
from jstep.core.logs import logger
from jstep.core.meshes import dims_of, internal_transfers, mesh_of, using_mesh
from jstep.core.trees import Tree, batch_to_args, shape_of
from jstep.data.batch_placement import as_shardings, make_placer
from jstep.data.steps import Staircase, as_staircase
from jstep.metering.cadence import NEVER
from jstep.metering.device_sums import Accumulate
from jstep.metering.metric_sums import NO_CONSTANTS, MetricSums
from jstep.state.global_step import require_alive
from jstep.state.train_state import keep_roles
from jstep.training.explain import call_custom_step
from jstep.training.looped import LoopedStep, TracedStep, loop_step
from jstep.training.metrics import flat_metrics, has_ratios
from jstep.training.optimizer_metrics import CustomStepMetrics
from jstep.training.skipped_updates import mark_guards, restore_guards
from jstep.training.step import TrainStep, call_step, jitted_program, keep_kind, trace_program
from jstep.training.watched_updates import remember_updates, watch_updates

# Stages.

TrainSteps = Staircase[Callable[..., Any]]


def as_stages(train_step: object) -> TrainSteps:
    form = "(state, *args) -> (state, metrics)"
    return as_staircase(train_step, "train_step", lambda value, name: as_function(value, name, form))


def name_of_step(step: object) -> str:
    return str(getattr(step, "title", None) or getattr(step, "__name__", "train_step"))


def lanes_of(step: object) -> int | None:
    lanes = getattr(step, "lanes", None)
    return lanes if isinstance(lanes, int) else None


@dataclasses.dataclass(eq=False)
class Stage:
    """A training step of a run, from `first` to before `stop`. `single` runs one step.

    Attributes:
        is_ahead: Whether its first program was compiled before it was due.
        is_slow: Whether XLA runs it much slower in a loop.
    """

    step: Any
    name: str
    first: int
    single: Any
    stop: float = NEVER
    is_begun: bool = False
    is_ahead: bool = False
    is_slow: bool = False

    def begin(self) -> bool:
        is_first = not self.is_begun
        self.is_begun = True
        return is_first

    def mark_slow(self) -> None:
        if not self.is_slow:
            logger.info("%s runs one step per call: XLA runs convolutions on a CPU much slower in a loop", self.name)
        self.is_slow = True

    @property
    def is_compilable(self) -> bool:
        return hasattr(self.single, "lower")

    def trace(self, state: Tree, args: tuple[Any, ...]) -> Any:
        """The `jax.stages.Traced` of one step; None if the step is not compiled."""
        if isinstance(self.single, TrainStep):
            return trace_program(self.single, state, args)
        if not hasattr(self.single, "trace"):
            return None
        with using_mesh(mesh_of((state, args))), self.watching():
            return self.single.trace(state, *args)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note what the step trains, if it is traced in this context."""
        with watch_updates() as found:
            yield
        remember_updates(self.step, found)


# Shapes, for which JAX finds the same program as for the arrays.


def shapes_of(tree: Tree) -> Any:
    return jax.tree.map(_shape, tree)


def _shape(leaf: object) -> Any:
    if isinstance(leaf, jax.Array):
        # Uncommitted arrays are compiled for like NumPy arrays, without a sharding.
        return shape_of(leaf, leaf.sharding if leaf.committed else None, weak=True)
    return shape_of(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf


def type_text(leaf: object) -> str:
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(getattr(leaf, 'shape', ()))}"


def _stack_shapes(tree: Tree, steps: int) -> Any:
    def leaf(shape: Any) -> Any:
        if not isinstance(shape, jax.ShapeDtypeStruct):
            return _shape(np.stack([shape] * steps))
        sharding = shape.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *dims_of(sharding.spec)))
        return jax.ShapeDtypeStruct((steps, *shape.shape), shape.dtype, sharding=sharding)

    return jax.tree.map(leaf, tree)


# Programs.


class Program:
    """The training step of a stage, or a loop over 1 to `max_steps` of its steps.

    Attributes:
        step_args: For a loop, the shapes of the arguments of one step.
        has_failed: Whether it could not be traced or lowered ahead; its first call raises the error.
        is_ahead: Whether it was compiled before its first call.
    """

    def __init__(
        self,
        stage: Stage,
        loop: LoopedStep | None = None,
        step_args: tuple[Any, ...] = (),
        columns: Any = None,
        *,
        has_failed: bool = False,
    ) -> None:
        self.stage = stage
        self.step_args = step_args
        self._columns = columns
        self.step: Any = stage.single if loop is None else loop
        self.is_looped = loop is not None
        self.is_stacked = loop is not None and loop.max_steps is not None
        self.max_steps = 1 if loop is None else loop.max_steps or 1
        self.rows: int | None = None
        self.constants = NO_CONSTANTS
        self.has_failed = has_failed
        self.is_called = False
        self.is_ahead = False
        self._custom_step = CustomStepMetrics(self.step)
        self._casts = False  # whether a function that jstep did not compile returned weak values

    def mark_called(self, rows: int | None) -> None:
        """Note that the first call has returned, and the rows of its batch."""
        self.is_called = True
        self.rows = rows

    def run(self, state: Tree, chunk: "Chunk", sums: MetricSums) -> Any:
        if self.is_looped:
            before = sums.begin_call(self._columns, state.global_step)
            new, metrics, after = call_step(self.step, state, (np.int32(chunk.steps), before, *chunk.args))
            self.constants = metrics.constants
            sums.end_call(chunk.first, chunk.steps, after, metrics.constants)
            return new, metrics.merged()
        if isinstance(self.step, TrainStep):
            new, metrics = call_step(self.step, state, chunk.args)
            self.constants = metrics.constants
            if (sums.is_wanted or metrics.constants.has_ratios) and type(metrics.computed) is dict:
                sums.add(chunk.first, metrics.computed, metrics.constants.skipped, metrics.constants)
            return new, metrics.merged()
        # A step that jstep did not make.
        require_alive(state)  # on a mesh, JAX would crash
        call = self.step if self.is_called else functools.partial(call_custom_step, self.step)
        marked, guard_slots = mark_guards(state, may_be_donated=True)
        result, reported = self._custom_step.call(call, marked, chunk.args)
        if not (isinstance(result, tuple) and len(result) == 2):
            return result
        new, metrics = result
        metrics, self.constants = self._custom_step.join(reported, flat_metrics(metrics), new, chunk.args)
        new, metrics = restore_guards(guard_slots, new, metrics)
        if isinstance(metrics, dict) and (sums.is_wanted or has_ratios(metrics)):
            sums.add(chunk.first, metrics)
        # The kind of what a compiled function returns is known from its first call. Weak values are cast at each.
        is_known = self.is_called and self.stage.is_compilable
        if not is_known:
            self._casts = any(map(trees.is_weak, jax.tree.leaves(new)))
        if is_known and not self._casts:
            new = keep_roles(state, new)
        else:
            new = keep_kind(self.stage.name, state, new)
        return trees.copy_numpy(new, "the state that the step returned"), metrics

    def lower(self, state: Tree, args: tuple[Any, ...], sums: MetricSums) -> Any:
        with using_mesh(mesh_of((state, args))):
            if self.is_looped:
                count = jax.ShapeDtypeStruct((), np.int32)
                args = count, shapes_of(sums.zeros(self._columns, state.global_step)), *args
            step = jitted_program(self.step, state, args) if isinstance(self.step, TrainStep) else self.step
            with self.stage.watching():
                traced = step.trace(state, *args)
            with internal_transfers():
                return traced.lower()

    def compile(self, state_shapes: Tree, args: tuple[Any, ...], sums: MetricSums) -> None:
        if self.has_failed:
            return
        args = _stack_shapes(args, self.max_steps) if self.is_stacked else args
        try:
            lowered = self.lower(state_shapes, args, sums)
        except Exception:
            self.has_failed = True
            raise
        lowered.compile()
        self.is_ahead = True


AUTO = "auto"


class ProgramTable:
    """The programs of a run, by stage, maximum number of steps of a call, and shapes of the batches.

    Attributes:
        compiling: `compiling(name)`: a context for the time in which the loop waits for a program.
        on_device: Whether batches without a sharding are put on the default device.
        tracing: Held while any thread traces a program for new shapes.
    """

    def __init__(
        self,
        train_steps: TrainSteps,
        steps_per_call: int | str = 1,
        *,
        state: Tree,
        sums: MetricSums | None = None,
        compiling: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.is_auto = steps_per_call == AUTO
        self.is_looped = steps_per_call != 1
        self.train_steps = train_steps
        self.stages = [
            Stage(
                step,
                name_of_step(step) if len(train_steps.values) > 1 else getattr(step, "__name__", "train_step"),
                first,
                step if hasattr(step, "lower") or not self.is_looped else TrainStep(step, donate=False),
                NEVER if stop is None else stop,
            )
            for first, stop, step in train_steps.stages()
        ]
        # The maximum number of steps of a call; None for calls that are not stacked.
        self.max_steps = None if self.is_auto else int(steps_per_call)
        self._programs: dict[Any, Program] = {}
        self.on_device = not self.is_looped and not all(stage.is_compilable for stage in self.stages)
        self.sums = MetricSums() if sums is None else sums
        self.state_shapes = shapes_of(state)
        self.tracing = threading.Lock()
        self.compiling, self._thread = compiling, threading.get_ident()

    def stage_of(self, step: int) -> Stage:
        return self.stages[self.train_steps.index(step)]

    def program_for(self, step: int, shapes: Tree, args: Callable[[], tuple[Any, ...]]) -> Program:
        stage = self.stage_of(step)
        max_steps = self.max_steps
        key = stage, max_steps, shapes
        if key in self._programs:
            return self._programs[key]
        if not self.is_looped:
            return self._programs.setdefault(key, Program(stage))
        waits = threading.get_ident() == self._thread  # the loop; the first program is compiled in another thread
        with self.compiling(stage.name) if waits else contextlib.nullcontext(), self.tracing:
            if key in self._programs:
                return self._programs[key]
            try:
                program, traced = self._looped(stage, max_steps, shapes_of(args()))
                if is_slow_in_loops(traced.jaxpr.jaxpr):
                    stage.mark_slow()
                    program = Program(stage)
            except Exception as error:  # the step that needs it raises and explains it
                logger.debug("%s cannot be looped: %s", stage.name, error)
                forget_frames(error)
                program = Program(stage, has_failed=True)
            self._programs[key] = program
            return program

    def _looped(self, stage: Stage, max_steps: int | None, step_args: tuple[Any, ...]) -> tuple[Program, TracedStep]:
        loop = loop_step(stage.step, max_steps, Accumulate(self.sums.limit))
        with stage.watching():
            traced = loop.prepare(self.state_shapes, step_args)
        return Program(stage, loop, step_args, loop.accumulate(traced)), traced

    # Compile programs before they are due.

    def compile(self, step: int, args: tuple[Any, ...]) -> None:
        self.stage_of(step).is_ahead = True
        shapes = shapes_of_leaves(*trees.flatten(trees.args_to_batch(args)))
        program = self.program_for(step, shapes, lambda: args)
        program.compile(self.state_shapes, args, self.sums)

    def compile_longer(self, max_steps: int) -> None:
        for (stage, _, shapes), program in list(self._programs.items()):
            if program.is_looped:
                with self.tracing:
                    longer, _ = self._looped(stage, max_steps, program.step_args)
                longer.compile(self.state_shapes, program.step_args, self.sums)
                self._programs[stage, max_steps, shapes] = longer


# Chunks, and the steps at which they end.


@dataclasses.dataclass(slots=True)  # not frozen: creating a frozen one takes four times as long
class Chunk:
    """The batches of one call, and the program that runs its steps.

    Attributes:
        args: For one step, or stacked for `program.max_steps` steps and padded at the end.
        first: The step of the state that it begins with.
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
        return self.program.stage.trace(state, self.step_args)

    def rows(self) -> int | None:
        axis = int(self.program.is_stacked)
        shapes = [getattr(leaf, "shape", None) for leaf in jax.tree.leaves(self.args)]
        sizes = {shape[axis] for shape in shapes if shape is not None and len(shape) > axis}
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
    """Yield batches as chunks, which end where the program, the shapes or `ends` require it."""
    place_one = None if sharding is None and not on_device else make_placer(as_shardings(sharding))
    place_stacked = None if sharding is None else make_placer(as_shardings(sharding, stacked=True))
    items = iter(batches)
    step = start
    item: Any = None
    program: Any = None
    shapes: Any = None
    for end in ends:
        while step < end:
            item = item or next(items, None)
            if item is None:
                return
            before = shapes
            batch, shapes, position = item
            if program is None or program.is_looped or step >= program.stage.stop or shapes != before:
                program = program_for(step, shapes, functools.partial(_arguments, batch, place_one))
            chunk = [batch]
            item = None
            max_steps = min(program.max_steps, end - step)
            while len(chunk) < max_steps and (item := next(items, None)) is not None:
                if item[1] != shapes:
                    break
                chunk.append(item[0])
                position = item[2]
                item = None
            place = place_one
            if program.is_stacked:
                batch = _stacked(chunk, program.max_steps)
                place = place_stacked
            args = batch_to_args(batch if place is None else place(batch))  # as in `_arguments`, without its call
            yield Chunk(program, args, len(chunk), step, position)
            step += len(chunk)


def _arguments(batch: Tree, place: Callable[[Any], Any] | None) -> tuple[Any, ...]:
    return batch_to_args(batch if place is None else place(batch))


def shapes_of_leaves(leaves: list[Any], structure: Any) -> Any:
    shapes: list[Any] = [structure]
    for leaf in leaves:
        shapes.append((leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else type(leaf))
    return tuple(shapes)


def _stacked(batches: list[Any], max_steps: int) -> Any:
    def stack(*column: Any) -> Any:
        return _stack_arrays(column) if isinstance(column[0], jax.Array) else np.stack(column)

    return jax.tree.map(stack, *batches, *[batches[-1]] * (max_steps - len(batches)))


_stack_arrays = jax.jit(jnp.stack)  # one dispatch for all leaves of a column

_MAX_CHANGES = 64
"""The maximum number of changes of batch shapes to compile ahead."""


class Boundaries(NamedTuple):
    """The steps at which another stage begins or the shapes of the batches change."""

    stages: TrainSteps
    next_change: Callable[[int], int | None]

    def after(self, step: int, last_step: int) -> int:
        ends = last_step, self.next_change(step), self.stages.next_stage_start(step)
        return min(end for end in ends if end is not None)

    def ends(self, start: int, last_step: int, due_after: Callable[[int], int] = lambda step: NEVER) -> Iterator[int]:
        """Yield the steps at which chunks must end."""
        step = start
        while step < last_step:
            step = min(self.after(step, last_step), due_after(step))
            yield step

    def starts(self, start: int, last_step: int) -> Iterator[int]:
        for stage in self.stages.stages():
            first = max(start, stage.first)
            end = last_step if stage.stop is None else min(stage.stop, last_step)
            for _ in range(1 + _MAX_CHANGES):
                if first < end:
                    yield first
                    first = self.after(first, end)
