"""The programs of a run: shapes of batches and of the state, and a stage's program for them.

The glossary of CONTRIBUTING.md defines these words. `compiler.py` decides when a program is
compiled, and `dispatch.py` runs it.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.compiling.chunks import Chunk
from jstep.compiling.stages import Stage, TrainSteps, name_of_step
from jstep.core import trees
from jstep.core.exceptions import forget_frames
from jstep.core.jaxprs import is_slow_in_loops
from jstep.core.logs import logger
from jstep.core.meshes import dims_of, internal_transfers, mesh_of, using_mesh
from jstep.core.trees import Tree, shape_of
from jstep.hooks.cadence import NEVER
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

# Shapes.


def shapes_of(tree: Tree) -> Any:
    """Return the shapes for which JAX finds the program that it would find for the arrays."""
    return jax.tree.map(_shape, tree)


def _shape(leaf: object) -> Any:
    if isinstance(leaf, jax.Array):
        # Uncommitted arrays are compiled for like NumPy arrays, without a sharding.
        return shape_of(leaf, leaf.sharding if leaf.committed else None, weak=True)
    if isinstance(leaf, np.ndarray | np.generic):
        return shape_of(leaf)
    return leaf


def type_text(leaf: object) -> str:
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(getattr(leaf, 'shape', ()))}"


def _stack_shapes(tree: Tree, steps: int) -> Any:
    """Return the shapes of `steps` stacked batches; no mesh axis divides the steps."""

    def leaf(shape: Any) -> Any:
        if not isinstance(shape, jax.ShapeDtypeStruct):
            return _shape(np.stack([shape] * steps))
        sharding = shape.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *dims_of(sharding.spec)))
        return jax.ShapeDtypeStruct((steps, *shape.shape), shape.dtype, sharding=sharding)

    return jax.tree.map(leaf, tree)


def shapes_of_leaves(leaves: list[Any], structure: Any) -> Any:
    """Return the shapes of a batch as a key, by which its program is found."""
    shapes: list[Any] = [structure]
    for leaf in leaves:
        shapes.append((leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else type(leaf))
    return tuple(shapes)


# Programs.


class Program:
    """The train step of a stage, or a loop over 1 to `max_steps` of its steps.

    | program | `is_looped` | `is_stacked` | `max_steps` | made if `steps_per_call` is |
    |---|---|---|---|---|
    | one step | no | no | 1 | 1, or the stage cannot be looped, or is slow in a loop |
    | a loop of one step | yes | no | 1 | "auto", until the longer one is compiled |
    | a loop of several steps | yes | yes | K | K > 1, or "auto" later |

    Attributes:
        step_args: For a loop, the shapes of the arguments of one step.
        is_stacked: Whether it takes the batches of several steps, stacked.
        rows: The rows of a batch, or its examples as the user counts them; None if unknown.
        constants: The metrics that are constants of the program; known from its first call on.
        has_failed: Whether it could not be traced or lowered ahead; its first call raises the
            error.
        is_called: Whether its first call has returned.
        is_compiled_ahead: Whether it was compiled before its first call.
        is_settled: Whether a call needs nothing besides `run`: it was called, and nothing is
            compiled ahead or timed.
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
        self._columns = columns  # of the sums of a loop on the device (`device_sums.Columns`)
        self.step: Any = stage.single_step if loop is None else loop
        self.is_looped = loop is not None
        self.is_stacked = False
        self.max_steps = 1
        if loop is not None and loop.max_steps is not None:
            self.is_stacked = True
            self.max_steps = loop.max_steps
        self.rows: int | None = None
        self.constants = NO_CONSTANTS
        self.has_failed = has_failed
        self.is_called = False
        self.is_compiled_ahead = False
        self.is_settled = False
        # Of a step that jstep did not make: whether its state has weak values, which are cast at
        # each call.
        self._returns_weak_values = False
        self._custom_step = CustomStepMetrics(self.step)

    def mark_called(self, rows: int | None) -> None:
        """Note that the first call has returned, and the rows of its batch."""
        self.is_called = True
        self.rows = rows

    def run(self, state: Tree, chunk: Chunk, sums: MetricSums) -> Any:
        if self.is_looped:
            device_sums = sums.begin_call(self._columns, state.global_step)
            args = (np.int32(chunk.steps), device_sums, *chunk.args)
            new, metrics, device_sums = call_step(self.step, state, args)
            self.constants = metrics.constants
            sums.end_call(chunk.first, chunk.steps, device_sums, metrics.constants)
            return new, metrics.merged()
        if isinstance(self.step, TrainStep):
            new, metrics = call_step(self.step, state, chunk.args)
            self.constants = metrics.constants
            # `check_result` rejects metrics that are not a dict.
            if (sums.is_wanted or metrics.constants.has_ratios) and type(metrics.computed) is dict:
                sums.add(
                    chunk.first, metrics.computed, metrics.constants.skipped, metrics.constants
                )
            return new, metrics.merged()
        return self._run_custom(state, chunk, sums)

    def _run_custom(self, state: Tree, chunk: Chunk, sums: MetricSums) -> Any:
        """Run a step that jstep did not make."""
        check_alive(state)  # on a mesh, JAX would crash
        # An error of the first call is explained.
        call = self.step if self.is_called else functools.partial(call_custom_step, self.step)
        # Guards record in the state whether they have skipped the update. From that,
        # `restore_guards` adds the metric `skipped`.
        marked, guard_slots = mark_guards(state, may_be_donated=True)
        # `reported` are the metrics of the optimizers that the step calls, such as the learning
        # rate.
        result, reported = self._custom_step.call(call, marked, chunk.args)
        if not (isinstance(result, tuple) and len(result) == 2):
            return result  # which `check_result` rejects
        new, metrics = result
        metrics, self.constants = self._custom_step.join(
            reported, flat_metrics(metrics), new, chunk.args
        )
        new, metrics = restore_guards(guard_slots, new, metrics)
        if isinstance(metrics, dict) and (sums.is_wanted or has_ratios(metrics)):
            sums.add(chunk.first, metrics)
        # A compiled function always returns states of the kind that its first call returned: these
        # need no further check.
        has_known_kind = self.is_called and self.stage.is_compilable
        if not has_known_kind:
            self._returns_weak_values = any(map(trees.is_weak, jax.tree.leaves(new)))
        if has_known_kind and not self._returns_weak_values:
            new = keep_roles(state, new)
        else:
            new = keep_kind(self.stage.name, state, new)
        return trees.copy_numpy(new, "the state that the step returned"), metrics

    def lower(self, state: Tree, args: tuple[Any, ...], sums: MetricSums) -> Any:
        """Trace and lower the program for arrays or shapes."""
        with using_mesh(mesh_of((state, args))):
            if self.is_looped:
                num_steps = jax.ShapeDtypeStruct((), np.int32)
                device_sums = shapes_of(sums.zeros(self._columns, state.global_step))
                args = (num_steps, device_sums, *args)
            # A compiled step that jstep did not make has the methods of a function of `jax.jit`.
            step = self.step
            if isinstance(step, TrainStep):
                step = jitted_program(step, state, args)
            with self.stage.watching():
                traced = step.trace(state, *args)
            with internal_transfers():
                return traced.lower()

    def compile(self, state_shapes: Tree, args: tuple[Any, ...], sums: MetricSums) -> None:
        """Compile the program ahead of its first call, for the shapes of one step's arguments."""
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
        self.is_compiled_ahead = True


AUTO = "auto"


_Compiling = Callable[[str], contextlib.AbstractContextManager[object]]


class ProgramTable:
    """The programs of a run, by stage, maximum number of steps per call, and shapes of batches.

    Attributes:
        max_steps: The maximum number of steps of a call; None while "auto" takes one step per call,
            whose batches are not stacked.
        is_looped: Whether programs are loops over steps, if their stages allow it.
        compiling: `compiling(name)`: a context for the time in which the loop waits for a program.
        on_device: Whether batches without a sharding are put on the default device: a step that is
            not compiled would otherwise get NumPy arrays.
        tracing: Held while a thread makes a loop, which traces its step.
    """

    def __init__(
        self,
        train_steps: TrainSteps,
        steps_per_call: int | str = 1,
        *,
        state: Tree,
        sums: MetricSums | None = None,
        compiling: _Compiling = contextlib.nullcontext,
    ) -> None:
        self.is_auto = steps_per_call == AUTO
        self.is_looped = steps_per_call != 1
        self.train_steps = train_steps
        self.stages = _make_stages(train_steps, is_looped=self.is_looped)
        self.max_steps = None if self.is_auto else int(steps_per_call)
        self._programs: dict[Any, Program] = {}
        are_compilable = all(stage.is_compilable for stage in self.stages)
        self.on_device = not self.is_looped and not are_compilable
        self.sums = MetricSums() if sums is None else sums
        self.state_shapes = shapes_of(state)
        self.tracing = threading.Lock()
        self.compiling = compiling
        self._loop_thread = threading.get_ident()

    def stage_of(self, step: int) -> Stage:
        return self.stages[self.train_steps.index(step)]

    def program_for(self, step: int, shapes: Tree, args: Callable[[], tuple[Any, ...]]) -> Program:
        """Return the program of the stage that runs from `step` on, for batches of these shapes.

        `args` returns the arguments of one step, from which a new program is traced.
        """
        stage = self.stage_of(step)
        max_steps = self.max_steps
        key = stage, max_steps, shapes
        if key in self._programs:
            return self._programs[key]
        if not self.is_looped:
            return self._programs.setdefault(key, Program(stage))
        waiting: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        # The first program is traced in another thread.
        if threading.get_ident() == self._loop_thread:
            waiting = self.compiling(stage.name)
        with waiting, self.tracing:
            if key not in self._programs:  # the other thread may have traced it meanwhile
                self._programs[key] = self._try_looped(stage, max_steps, args)
            return self._programs[key]

    def _try_looped(
        self, stage: Stage, max_steps: int | None, args: Callable[[], tuple[Any, ...]]
    ) -> Program:
        """Return a loop over a stage's steps; a one-step program if that is slow or impossible."""
        try:
            program, traced = self._make_loop(stage, max_steps, shapes_of(args()))
            is_slow = is_slow_in_loops(traced.jaxpr.jaxpr)
        except Exception as error:  # the step that needs it raises and explains it
            logger.debug("%s cannot be looped: %s", stage.name, error)
            forget_frames(error)
            return Program(stage, has_failed=True)
        if is_slow:
            stage.mark_slow()
            return Program(stage)
        return program

    def _make_loop(
        self, stage: Stage, max_steps: int | None, step_args: tuple[Any, ...]
    ) -> tuple[Program, TracedStep]:
        loop = loop_step(stage.step, max_steps, Accumulate(self.sums.limit))
        with stage.watching():
            traced = loop.prepare(self.state_shapes, step_args)
        columns = loop.accumulate(traced)
        return Program(stage, loop, step_args, columns), traced

    # Compile programs before they are due.

    def compile(self, step: int, args: tuple[Any, ...]) -> None:
        shapes = shapes_of_leaves(*trees.flatten(trees.args_to_batch(args)))
        program = self.program_for(step, shapes, lambda: args)
        program.compile(self.state_shapes, args, self.sums)
        # If the compilation has failed, the step that needs the program compiles it and logs that.
        if program.is_compiled_ahead:
            program.stage.is_compiled_ahead = True

    def compile_with_max_steps(self, max_steps: int | None) -> None:
        """Compile each looped program for calls of up to `max_steps` steps, if it is missing."""
        for (stage, _, shapes), program in list(self._programs.items()):
            if not program.is_looped or (stage, max_steps, shapes) in self._programs:
                continue
            with self.tracing:
                other, _ = self._make_loop(stage, max_steps, program.step_args)
            other.compile(self.state_shapes, program.step_args, self.sums)
            self._programs[stage, max_steps, shapes] = other


def _make_stages(train_steps: TrainSteps, *, is_looped: bool) -> list[Stage]:
    has_several = len(train_steps.values) > 1
    stages: list[Stage] = []
    for first, stop, step in train_steps.stages():
        name = getattr(step, "__name__", "train_step")
        if has_several:
            # Steps of `minimize` all have the name `train_step`; their titles tell them apart.
            name = name_of_step(step)
        single_step = step
        if is_looped and not hasattr(step, "lower"):
            # A loop traces a step that is not compiled: then a single step is compiled, too.
            single_step = TrainStep(step, donate=False)
        stages.append(Stage(step, name, first, single_step, NEVER if stop is None else stop))
    return stages
