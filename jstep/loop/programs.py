"""The programs of a run, and the table in which the program of a call is looked up.

A *stage* is a training step, from one step of the run on. A *program* runs one step of a stage, or loops over the steps
of a call, for batches of some shapes. A *call* is a program, arguments, and a number of steps; see `calls.py`.
`dispatch.py` runs it.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.exceptions import forget_frames
from jstep.core.meshes import mesh_of, using_mesh
from jstep.hooks.metric_sums import NO_CONSTANTS, Accumulate, MetricSums, find_skip_metric
from jstep.loop.calls import AUTO, Call, CopiedBatches, ProgramFor, make_calls, shapes_in
from jstep.loop.compiler import Compilations, Compiling, in_silence, shapes_of, stack_shapes
from jstep.loop.stages import Stage, TrainSteps, make_stages
from jstep.state.global_step import require_alive
from jstep.state.train_state import keep_roles
from jstep.training.looped import LoopedStep, TracedStep, loop_step
from jstep.training.metrics import Constants
from jstep.training.step import TrainStep, call_step, jitted_program

_logger = logging.getLogger("jstep")


class Program:
    """The training step of a stage, or a loop over 1 to `max_steps` of its steps.

    Attributes:
        is_stacked: Whether the arguments of the steps are stacked.
        step_args: For a loop, the shapes of the arguments of one step.
    """

    def __init__(
        self,
        stage: Stage,
        loop: LoopedStep | None = None,
        step_args: tuple[Any, ...] = (),
        traced: TracedStep | None = None,
    ) -> None:
        self.stage, self.step_args = stage, step_args
        self.step: Any = stage.single if loop is None else loop
        self.is_looped, self.is_stacked = loop is not None, loop is not None and loop.max_steps is not None
        self.max_steps = 1 if loop is None else loop.max_steps or 1
        self._columns: Any = None if loop is None or traced is None else loop.accumulate(traced)
        self.rows: int | None = None
        self.constants = NO_CONSTANTS  # of the latest call
        # A program that could not be traced ahead has failed; its first call raises the error.
        self.is_called = self.has_failed = False

    def run(self, state: Tree, call: Call, sums: MetricSums) -> Any:
        """Run the steps of a call; return state and last metrics."""
        if self.is_looped:
            before = sums.begin(self._columns, state.global_step)
            new, metrics, after = call_step(self.step, state, (np.int32(call.steps), before, *call.args))
            self.constants = metrics.constants
            sums.ran(call.first, call.steps, after, metrics.constants)
            return new, metrics.merged()
        if isinstance(self.step, TrainStep):
            new, metrics = call_step(self.step, state, call.args)
            self.constants = metrics.constants
            if sums.is_wanted and type(metrics.computed) is dict:
                sums.add(call.first, metrics.computed, metrics.constants.skipped, metrics.constants)
            return new, metrics.merged()
        # A step that jstep did not make.
        require_alive(state)  # on a mesh, JAX would crash
        result = self.step(state, *call.args)
        if not (isinstance(result, tuple) and len(result) == 2):
            return result
        self.constants = Constants({}, find_skip_metric(self.step))
        if sums.is_wanted and isinstance(result[1], Mapping):
            sums.add(call.first, result[1], self.constants.skipped)
        return trees.copy_numpy(keep_roles(state, result[0]), "the state that the step returned"), result[1]

    def traceable(self, state: Tree, args: tuple[Any, ...], sums: MetricSums) -> tuple[Any, tuple[Any, ...]]:
        """Return the compiled function of a call, and its arguments after the state; for arrays or shapes."""
        if self.is_looped:
            count = jax.ShapeDtypeStruct((), np.int32)
            args = count, shapes_of(sums.empty(self._columns, state.global_step)), *args
        return (jitted_program(self.step, state, args) if isinstance(self.step, TrainStep) else self.step), args

    def repeated(self, call: Call, sums: MetricSums) -> Callable[..., Any]:
        """Return a function `repeat(state, *call.args)` that adds no metrics; its `donate` is that of the step."""
        if not self.is_looped:
            step: Callable[..., Any] = self.step
            return step

        def repeat(state: Tree, *args: Any) -> Any:
            before = sums.empty(self._columns, state.global_step)
            new, metrics, _ = call_step(self.step, state, (np.int32(call.steps), before, *args))
            return new, metrics.merged()

        repeat.donate = self.step.donate  # type: ignore[attr-defined]
        return repeat


class _MaxSteps(NamedTuple):
    """The maximum number of steps of a call, which "auto" switches; None for calls that are not stacked."""

    now: int | None
    switch_at: float = math.inf
    then: int | None = None


class ProgramTable:
    """The programs of a run, by stage, maximum number of steps of a call, and shapes of the batches.

    Programs are looked up where batches are made into calls, which may be a thread; the first lookup for new shapes
    traces the step.
    """

    def __init__(
        self,
        train_steps: TrainSteps,
        steps_per_call: int | str = 1,
        *,
        state: Tree,
        sums: MetricSums | None = None,
        compiling: Compiling = in_silence,
    ) -> None:
        self.is_auto, self.is_looped = steps_per_call == AUTO, steps_per_call != 1
        self.train_steps, self.stages = train_steps, make_stages(train_steps, compiled=self.is_looped)
        # One attribute, because a thread that makes calls reads it.
        self._max_steps = _MaxSteps(None if self.is_auto else int(steps_per_call))
        self._programs: dict[Any, Program] = {}
        # A step that is not compiled needs its batches on the device.
        self.on_device = not self.is_looped and not all(stage.is_compiled for stage in self.stages)
        self.sums = MetricSums() if sums is None else sums
        self.state_shapes = shapes_of(state)
        self.tracing = threading.Lock()  # held while any thread traces a program for new shapes
        self.compilations = Compilations(compiling, has_several=self.is_looped or len(self.stages) > 1)

    def stage_of(self, step: int) -> Stage:
        return self.stages[self.train_steps.index(step)]

    # From batches to calls.

    def calls(
        self, items: CopiedBatches, start: int, ends: Iterable[float], sharding: object, *, one_step: bool = False
    ) -> Iterator[Call]:
        """Return the batches from a step on as calls that end at `ends`, or at every step if `one_step`."""
        program_for: ProgramFor = (lambda step, *_: Program(self.stage_of(step))) if one_step else self.program_for
        return make_calls(items, start, program_for, sharding, on_device=self.on_device, ends=ends)

    def program_for(self, step: int, shapes: Tree, args: Callable[[], tuple[Any, ...]]) -> Program:
        """Return the program of calls from `step`; trace the step if the shapes are new."""
        stage, max_steps = self.stage_of(step), self._max_steps
        key = stage, max_steps.now if step < max_steps.switch_at else max_steps.then, shapes
        cached = self._programs.get(key)
        if cached is not None:
            return cached
        if not self.is_looped:
            return self._programs.setdefault(key, Program(stage))
        with self.compilations.waiting(stage), self.tracing:  # the first program is compiled in another thread
            if key in self._programs:
                return self._programs[key]
            program = Program(stage)
            try:
                loop, step_args = self._loop(*key[:2]), shapes_of(args())
                traced = loop.prepare(self.state_shapes, step_args)
                if not traced.is_slow_in_loops:
                    program = Program(stage, loop, step_args, traced)
                elif not any(other.stage is stage and not other.is_looped for other in self._programs.values()):
                    what = "XLA runs convolutions on a CPU much slower in a loop"
                    _logger.info("%s runs one step per call: %s", stage.name, what)
            except Exception as error:  # the step that needs it raises and explains it
                _logger.debug("%s cannot be looped: %s", stage.name, error)
                forget_frames(error)
                program.has_failed = True
            self._programs[key] = program
            return program

    def _loop(self, stage: Stage, max_steps: int | None) -> LoopedStep:
        return loop_step(stage.step, max_steps, Accumulate(self.sums.limit))

    # Compile programs before they are due.

    def compile(self, step: int, args: tuple[Any, ...]) -> None:
        self.compilations.mark_ahead(self.stage_of(step))
        self._compile(self.program_for(step, shapes_in(trees.args_to_batch(args)), lambda: args), args)

    def _compile(self, program: Program, args: tuple[Any, ...]) -> None:
        if program.has_failed:
            return
        args = stack_shapes(args, program.max_steps) if program.is_stacked else args
        with using_mesh(mesh_of(self.state_shapes)):
            try:
                step, args = program.traceable(self.state_shapes, args, self.sums)
                traced = step.trace(self.state_shapes, *args)
            except Exception:
                program.has_failed = True
                raise
            traced.lower().compile()

    def compile_longer(self, max_steps: int, since: Stage) -> None:
        """Compile loops of up to `max_steps` steps for the looped programs of a stage and later ones."""
        for (stage, _, shapes), program in list(self._programs.items()):
            if program.is_looped and stage.first >= since.first:
                loop = self._loop(stage, max_steps)
                with self.tracing:
                    longer = Program(stage, loop, program.step_args, loop.prepare(self.state_shapes, program.step_args))
                self._compile(longer, program.step_args)
                self.compilations.mark_ahead(longer)
                self._programs[stage, max_steps, shapes] = longer

    def switch(self, max_steps: int, first: int) -> None:
        self._max_steps = _MaxSteps(None, first, max_steps)
