"""The programs of a run, and the table in which the program of a call is looked up.

A *stage* is a training step, from one step of the run on. A *program* runs one step of it, or, as a loop, as many as a
call has, for batches of some shapes. A *call* is a program, arguments, and a number of steps: `calls.py`. What runs it
is `dispatch.py`.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.exceptions import forget_frames
from jstep.core.meshes import mesh_of, using_mesh
from jstep.hooks.metric_sums import NONE, Accumulate, MetricSums, skip_metric_of
from jstep.loop.calls import AUTO, Call, CopiedBatches, ProgramFor, make_calls, shapes_in
from jstep.loop.compiler import Compilations, Compiling, in_silence, shapes_of, stacked_shapes
from jstep.loop.stages import Stage, TrainSteps, made_stages
from jstep.state.global_step import require_alive
from jstep.state.train_state import keep_roles
from jstep.training.looped import LoopedStep, TracedStep, looped_step
from jstep.training.metrics import Constants
from jstep.training.step import TrainStep, program_of, run

_logger = logging.getLogger("jstep")


class Program:
    """What runs the steps of a call: the training step of a stage, or a loop over 1 to `most` of them.

    Args:
        stage: The stage.
        loop: The loop; None for calls of one step.
        of_one: The shapes of the arguments of one step, for a loop.
        traced: The trace of one step, for a loop.

    Attributes:
        stage: The stage.
        step: The training step, or the loop.
        is_looped: Whether it is a loop.
        most: The most steps of a call.
        is_stacked: Whether the arguments of the steps are stacked.
        of_one: The shapes of the arguments of one step, for a loop; otherwise they are those of the call.
        rows: The number of rows of a batch; None if not known. Known after the first call.
        constants: The constant metrics of the latest call, which are not computed by the step.
        is_called: Whether a call of it was made.
        has_failed: Whether it could not be traced before its first call, which raises the error.
    """

    def __init__(
        self,
        stage: Stage,
        loop: LoopedStep | None = None,
        of_one: tuple[Any, ...] = (),
        traced: TracedStep | None = None,
    ) -> None:
        self.stage, self.of_one = stage, of_one
        self.step: Any = stage.single if loop is None else loop
        self.is_looped, self.is_stacked = loop is not None, loop is not None and loop.most is not None
        self.most = 1 if loop is None else loop.most or 1
        self._columns: Any = None if loop is None or traced is None else loop.accumulate(traced)
        self.rows: int | None = None
        self.constants = NONE
        self.is_called = self.has_failed = False

    def run(self, state: Tree, call: Call, sums: MetricSums) -> Any:
        """Run the steps of a call; return the new state and the metrics of the last one."""
        if self.is_looped:
            before = sums.begin(self._columns, state.global_step)
            new, metrics, after = run(self.step, state, (np.int32(call.steps), before, *call.args))
            self.constants = metrics.constants
            sums.ran(call.first, call.steps, after, metrics.constants)
            return new, metrics.whole()
        if isinstance(self.step, TrainStep):
            new, metrics = run(self.step, state, call.args)
            self.constants = metrics.constants
            if sums.is_wanted and type(metrics.computed) is dict:
                sums.add(call.first, metrics.computed, metrics.constants.skipped, metrics.constants)
            return new, metrics.whole()
        # A step that jstep did not make.
        require_alive(state)  # on a mesh, JAX would crash
        result = self.step(state, *call.args)
        if not (isinstance(result, tuple) and len(result) == 2):
            return result
        self.constants = Constants({}, skip_metric_of(self.step))
        if sums.is_wanted and isinstance(result[1], Mapping):
            sums.add(call.first, result[1], self.constants.skipped)
        return trees.owned(keep_roles(state, result[0]), "the state that the step returned"), result[1]

    def traceable(self, state: Tree, args: tuple[Any, ...], sums: MetricSums) -> tuple[Any, tuple[Any, ...]]:
        """The compiled function of a call, and its arguments besides the state; for arrays or shapes."""
        if self.is_looped:
            count = jax.ShapeDtypeStruct((), np.int32)
            args = count, shapes_of(sums.empty(self._columns, state.global_step)), *args
        return (program_of(self.step, state, args) if isinstance(self.step, TrainStep) else self.step), args

    def repeated(self, call: Call, sums: MetricSums) -> Callable[..., Any]:
        """A function that repeats a call, `again(state, *call.args)`, without adding its metrics to the sums."""
        if not self.is_looped:
            step: Callable[..., Any] = self.step
            return step
        return _Repeated(self.step, call.steps, lambda state: sums.empty(self._columns, state.global_step))

    def called(self, call: Call) -> None:
        """Its first call was made."""
        self.is_called, self.rows = True, call.rows()

    def failed(self) -> None:
        """It could not be traced."""
        self.has_failed = True


class _Repeated:
    """A function that repeats a call of several steps.

    Attributes:
        donate: Whether it donates the state.
    """

    def __init__(self, step: LoopedStep, steps: int, before: Callable[[Any], Any]) -> None:
        self._step, self._steps, self._before, self.donate = step, np.int32(steps), before, step.donate

    def __call__(self, state: Tree, *args: Any) -> Any:
        new, metrics, _ = run(self._step, state, (self._steps, self._before(state), *args))
        return new, metrics.whole()


class ProgramTable:
    """The programs of a run, by stage, most steps of a call, and shapes of the batches.

    With `steps_per_call` = 1, a program is the training step. Otherwise it loops over the steps of a call, as many as
    there are. Programs are looked up where batches are made into calls, which may be a thread; the first lookup for
    new shapes traces the step.

    Args:
        train_steps: The training steps, by the step at which each begins.
        steps_per_call: The most steps of a call, or "auto".
        state: The state, or its template.
        sums: Receives the metrics of all steps.
        compiling: A context for the time in which the loop waits for a program of the name that it is given.

    Attributes:
        train_steps: The training steps.
        stages: The stages, in order.
        on_device: Whether batches must be put on the device, for a step that is not compiled.
        is_looped: Whether calls may take several steps.
        is_auto: Whether the most steps of a call are chosen from the times of the first calls.
        sums: The sums.
        state_shapes: The shapes of the state.
        tracing: Held while a program for new shapes is traced, by whichever thread needs it first.
        compilations: What is compiled, and what is logged of it.
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
        self.train_steps, self.stages = train_steps, made_stages(train_steps, compiled=self.is_looped)
        # The most steps of a call, None for one that is not stacked; from a step on, those that "auto" chose. One
        # attribute, which a thread that makes calls reads.
        self._most: tuple[int | None, float, int | None] = (
            None if self.is_auto else int(steps_per_call),
            math.inf,
            None,
        )
        self._programs: dict[Any, Program] = {}
        self.on_device = not self.is_looped and not all(stage.is_compiled for stage in self.stages)
        self.sums = MetricSums() if sums is None else sums
        self.state_shapes = shapes_of(state)
        self.tracing = threading.Lock()
        self.compilations = Compilations(self.steps, compiling, has_several=self.is_looped or len(self.stages) > 1)

    def stage_of(self, step: int) -> Stage:
        """The stage that contains a step."""
        return self.stages[self.train_steps.index(step)]

    def steps(self) -> list[Any]:
        """All steps and loops that there are programs of."""
        return list({id(one.step): one.step for one in list(self._programs.values())}.values())

    # From batches to calls.

    def calls(
        self, items: CopiedBatches, start: int, ends: Iterable[float], sharding: object, *, one_step: bool = False
    ) -> Iterator[Call]:
        """The batches from a step on, as calls, which end at the steps `ends`; of one step each if `one_step`."""

        def alone(step: int, *_: object) -> Program:
            return Program(self.stage_of(step))

        program_for: ProgramFor = alone if one_step else self.program_for
        return make_calls(items, start, program_for, sharding, on_device=self.on_device, ends=ends)

    def program_for(self, step: int, shapes: Tree, args: Callable[[], tuple[Any, ...]]) -> Program:
        """Return the program of calls with batches of some shapes; trace the step when the shapes are new.

        Args:
            step: The step at which the call begins.
            shapes: The shapes of a batch, from `shapes_in`.
            args: Returns the arguments of one step, or their shapes.
        """
        stage, (most, later, longer) = self.stage_of(step), self._most
        key = stage, most if step < later else longer, shapes
        found = self._programs.get(key)
        if found is not None:
            return found
        if not self.is_looped:
            return self._programs.setdefault(key, Program(stage))
        with self.compilations.waiting(stage), self.tracing:  # the first program is compiled in a thread of its own
            if key in self._programs:
                return self._programs[key]
            made = Program(stage)
            try:
                loop, of_one = self._loop(*key[:2]), shapes_of(args())
                traced = loop.prepare(self.state_shapes, of_one)
                if not traced.is_slow_in_loops:
                    made = Program(stage, loop, of_one, traced)
                elif not any(one.stage is stage and not one.is_looped for one in self._programs.values()):
                    what = "XLA runs convolutions on a CPU much slower in a loop"
                    _logger.info("%s runs one step a call: %s", stage.name, what)
            except Exception as error:  # the step that needs it raises, where the error is described
                _logger.debug("%s cannot be looped: %s", stage.name, error)
                forget_frames(error)
                made.failed()
            self._programs[key] = made
            return made

    def _loop(self, stage: Stage, most: int | None) -> LoopedStep:
        return looped_step(stage.step, most, Accumulate(self.sums.limits))

    # Compile programs before they are due.

    def compile(self, step: int, args: tuple[Any, ...]) -> None:
        """Compile the program for the batches from a step on, for shapes, before its call needs it."""
        self.compilations.begun_ahead(self.stage_of(step))
        self._compile(self.program_for(step, shapes_in(trees.batch_of(args)), lambda: args), args)

    def _compile(self, program: Program, args: tuple[Any, ...]) -> None:
        """Compile a program for the shapes of the arguments of one step."""
        if program.has_failed:
            return
        args = stacked_shapes(args, program.most) if program.is_stacked else args
        with using_mesh(mesh_of(self.state_shapes)):
            try:
                step, args = program.traceable(self.state_shapes, args, self.sums)
                traced = step.trace(self.state_shapes, *args)
            except Exception:
                program.failed()
                raise
            traced.lower().compile()

    def compile_longer(self, most: int, since: Stage) -> None:
        """Compile the programs of up to `most` steps that follow those of one step, of a stage and later ones."""
        for (stage, _, shapes), one in list(self._programs.items()):
            if one.is_looped and stage.first >= since.first:
                loop = self._loop(stage, most)
                with self.tracing:
                    longer = Program(stage, loop, one.of_one, loop.prepare(self.state_shapes, one.of_one))
                self._compile(longer, one.of_one)
                self.compilations.begun_ahead(longer)
                self._programs[stage, most, shapes] = longer

    def switch(self, most: int, first: int) -> None:
        """Make calls of up to `most` steps, from step `first` on."""
        self._most = None, first, most
