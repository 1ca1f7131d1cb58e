"""The programs of a run: the shapes of batches and of the state, and the program of a stage for them.

The glossary of CONTRIBUTING.md defines these words. `compiling.py` decides when a program is compiled, and
`dispatch.py` runs it.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import trees
from jstep.core.exceptions import forget_frames
from jstep.core.jaxprs import is_slow_in_loops
from jstep.core.logs import logger
from jstep.core.meshes import dims_of, internal_transfers, mesh_of, using_mesh
from jstep.core.trees import Tree, shape_of
from jstep.loop.chunks import Chunk
from jstep.loop.stages import Stage, TrainSteps, name_of_step
from jstep.metering.cadence import NEVER
from jstep.metering.device_sums import Accumulate
from jstep.metering.metric_sums import NO_CONSTANTS, MetricSums
from jstep.state.global_step import check_alive
from jstep.state.train_state import keep_roles
from jstep.training.explain import call_custom_step
from jstep.training.looped import LoopedStep, TracedStep, loop_step
from jstep.training.metrics import flat_metrics, has_ratios
from jstep.training.optimizer_metrics import CustomStepMetrics
from jstep.training.skipped_updates import mark_guards, restore_guards
from jstep.training.step import TrainStep, call_step, jitted_program, keep_kind

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


def shapes_of_leaves(leaves: list[Any], structure: Any) -> Any:
    shapes: list[Any] = [structure]
    for leaf in leaves:
        shapes.append((leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else type(leaf))
    return tuple(shapes)


# Programs.


class Program:
    """The train step of a stage, or a loop over 1 to `max_steps` of its steps.

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

    def run(self, state: Tree, chunk: Chunk, sums: MetricSums) -> Any:
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
        return self._run_custom(state, chunk, sums)

    def _run_custom(self, state: Tree, chunk: Chunk, sums: MetricSums) -> Any:
        """Run a step that jstep did not make."""
        check_alive(state)  # on a mesh, JAX would crash
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
        if self.is_stacked:
            args = _stack_shapes(args, self.max_steps)
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
        self.stages = _make_stages(train_steps, is_looped=self.is_looped)
        # The maximum number of steps of a call; None for calls that are not stacked.
        self.max_steps = None if self.is_auto else int(steps_per_call)
        # By stage, maximum number of steps, and shapes.
        self._programs: dict[Any, Program] = {}
        self.on_device = not self.is_looped and not all(stage.is_compilable for stage in self.stages)
        self.sums = MetricSums() if sums is None else sums
        self.state_shapes = shapes_of(state)
        self.tracing = threading.Lock()
        self.compiling = compiling
        self._loop_thread = threading.get_ident()

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
        # The first program is traced in another thread, while the loop waits for something else.
        is_loop_waiting = threading.get_ident() == self._loop_thread
        with self.compiling(stage.name) if is_loop_waiting else contextlib.nullcontext(), self.tracing:
            if key not in self._programs:  # the other thread may have traced it meanwhile
                self._programs[key] = self._try_looped(stage, max_steps, args)
            return self._programs[key]

    def _try_looped(self, stage: Stage, max_steps: int | None, args: Callable[[], tuple[Any, ...]]) -> Program:
        """Return a loop over the steps of a stage, or a program of one step where a loop is slow or impossible."""
        try:
            program, traced = self._looped(stage, max_steps, shapes_of(args()))
            is_slow = is_slow_in_loops(traced.jaxpr.jaxpr)
        except Exception as error:  # the step that needs it raises and explains it
            logger.debug("%s cannot be looped: %s", stage.name, error)
            forget_frames(error)
            return Program(stage, has_failed=True)
        if is_slow:
            stage.mark_slow()
            return Program(stage)
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

    def compile_with_max_steps(self, max_steps: int) -> None:
        """Compile each looped program again, for calls of up to so many steps."""
        for (stage, _, shapes), program in list(self._programs.items()):
            if not program.is_looped:
                continue
            with self.tracing:
                longer, _ = self._looped(stage, max_steps, program.step_args)
            longer.compile(self.state_shapes, program.step_args, self.sums)
            self._programs[stage, max_steps, shapes] = longer


def _make_stages(train_steps: TrainSteps, *, is_looped: bool) -> list[Stage]:
    has_several = len(train_steps.values) > 1
    stages = []
    for first, stop, step in train_steps.stages():
        name = name_of_step(step) if has_several else getattr(step, "__name__", "train_step")
        # A loop traces a step that is not compiled: then a single step is compiled, too.
        single = step if hasattr(step, "lower") or not is_looped else TrainStep(step, donate=False)
        stages.append(Stage(step, name, first, single, NEVER if stop is None else stop))
    return stages
