"""The programs of a run: what runs the steps of a call.

A *stage* is a training step, from one step of the run on. A *program* runs one step of it (`OneStep`), or as many as a
call has (`StepLoop`), for batches of some shapes. A *call* is a program, arguments, and a number of steps.
"""

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jstep.core import trees
from jstep.core.checks import shown
from jstep.core.exceptions import forget_frames
from jstep.core.jaxprs import shards_arrays
from jstep.core.meshes import internal_transfers, mesh_of, using_mesh
from jstep.core.stopwatch import STARTING, Stopwatch
from jstep.data.placement import mesh_without_batch
from jstep.distributed import processes
from jstep.hooks.metric_sums import NONE, Accumulate, MetricSums, skip_metric_of
from jstep.hooks.run_hook import Call
from jstep.loop.calls import AUTO, AutoSteps, CopiedBatches, ProgramFor, make_calls, shapes_in
from jstep.loop.compiler import BackgroundCompiler, compile_apart, compiled_here, shapes_of, stacked_shapes, type_text
from jstep.loop.signals import StopWaiting
from jstep.loop.stages import Stage, TrainSteps, made_stages
from jstep.state.global_step import require_alive
from jstep.state.train_state import TrainState, keep_roles
from jstep.training.explain import explain, explain_one_argument
from jstep.training.looped import LoopedStep, TracedStep, looped_step
from jstep.training.metrics import Constants
from jstep.training.step import TrainStep, program_of, refuse_a_loss, run

_logger = logging.getLogger("jstep")


class _Calls:
    """What is known of a program from its calls.

    Attributes:
        rows: As in `LoopState`; known after the first call.
        constants: The constant metrics of the latest call.
        is_called: Whether a call of it was made.
        has_failed: Whether it could not be traced before its first call, which raises the error.
    """

    rows: int | None = None
    constants = NONE
    is_called = has_failed = False


class OneStep(_Calls):
    """The program of calls of one step: the training step of a stage.

    Args:
        stage: The stage.

    Attributes:
        step: The step.
        most: 1: the most steps of a call.
        is_stacked: False: whether the arguments of the steps are stacked.
        args: None: the arguments of one step are those of the call.
    """

    most, is_stacked, args = 1, False, None

    def __init__(self, stage: Stage) -> None:
        self.stage, self.step = stage, stage.single

    def run(self, state: Any, call: Call, sums: MetricSums) -> Any:
        """Run the step; return the new state and its metrics."""
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

    def traceable(self, state: Any, args: tuple[Any, ...], sums: MetricSums) -> tuple[Any, tuple[Any, ...]]:
        """The compiled function of a call, and its arguments besides the state; for arrays or shapes."""
        return (program_of(self.step, state, args) if isinstance(self.step, TrainStep) else self.step), args

    def repeated(self, call: Call, sums: MetricSums) -> Callable[..., Any]:
        """A function that repeats a call, without adding its metrics to the sums."""
        step: Callable[..., Any] = self.step
        return step


class StepLoop(_Calls):
    """The program of calls of 1 to `most` steps with batches of some shapes: a loop, as long as the call is.

    Args:
        stage: The stage.
        step: The loop.
        args: The shapes of the arguments of one step.
        one: The trace of one step.

    The attributes are those of `OneStep`.
    """

    def __init__(self, stage: Stage, step: LoopedStep, args: tuple[Any, ...], one: TracedStep) -> None:
        self.stage, self.step, self.args = stage, step, args
        self.most, self.is_stacked = step.most or 1, step.most is not None
        self._columns = step.accumulate(one)

    def run(self, state: Any, call: Call, sums: MetricSums) -> Any:
        """Run the steps; return the new state and the metrics of the last one."""
        before = sums.begin(self._columns, state.global_step)
        new, metrics, after = run(self.step, state, (np.int32(call.steps), before, *call.args))
        self.constants = metrics.constants
        sums.ran(call.first, call.steps, after, metrics.constants)
        return new, metrics.whole()

    def traceable(self, state: Any, args: tuple[Any, ...], sums: MetricSums) -> tuple[Any, tuple[Any, ...]]:
        """The compiled function of a call, and its arguments besides the state; for arrays or shapes."""
        count = jax.ShapeDtypeStruct((), np.int32)
        args = count, shapes_of(sums.empty(self._columns, state.global_step)), *args
        return program_of(self.step, state, args), args

    def repeated(self, call: Call, sums: MetricSums) -> Callable[..., Any]:
        """A function that repeats a call, without adding its metrics to the sums."""

        def again(state: Any, *args: Any) -> Any:
            before = sums.empty(self._columns, state.global_step)
            new, metrics, _ = run(self.step, state, (np.int32(call.steps), before, *args))
            return new, metrics.whole()

        again.donate = self.step.donate  # type: ignore[attr-defined]
        return again


Program = OneStep | StepLoop
Look = Callable[[Call, Any], None]
"""`look(call, state)`: called with a call that was dispatched, and the state that it returned."""


class Programs:
    """The programs of a run. Each call runs its steps with its program, and each compilation is logged.

    With `steps_per_call` = 1, a call is a call of the training step. Otherwise a program loops over the steps of a
    call, as many as there are: one program for each stage, most steps of a call, and shapes of the batches.

    Args:
        stages: The training steps, by the step at which each begins.
        steps_per_call: The most steps of a call, or "auto".
        state: The state, or its template.
        sums: Receives the metrics of all steps.
        first_call: A context manager for the very first call.
        watch: The stopwatch of the run; compilation is not counted as time of the steps.

    Attributes:
        train_steps: The training steps.
        stages: The stages, in order.
        on_device: Whether batches must be put on the device, for a step that is not compiled.
        is_looped: Whether calls may take several steps.
        state_shapes: The shapes of the state.
        compiler: Compiles programs in the background, before they are due.
        after_call: Functions that are called after each call was dispatched.
        after_first: Functions that are called after the first call of each stage.
        compiling: A context for the time in which the loop waits for a program of the name that it is given.
        tracing: Held while a program for new shapes is traced, by whichever thread needs it first.
        compiled: What the thread that runs the loop has compiled.
        may_leave_call: Whether a signal was received, so that the run need not wait for the program of a call.
        may_be_left: Whether the next call's program is being traced, which a signal may interrupt: nothing is lost.
    """

    def __init__(
        self,
        stages: TrainSteps,
        steps_per_call: int | str = 1,
        *,
        state: Any,
        sums: MetricSums | None = None,
        first_call: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        watch: Stopwatch | None = None,
    ) -> None:
        is_auto = steps_per_call == AUTO
        self.is_looped = steps_per_call != 1
        self.stages = made_stages(stages, compiled=self.is_looped)
        self.train_steps = stages
        # The most steps of a call, None for one that is not stacked; from a step on, those that "auto" chose. One
        # attribute, which a thread that makes calls reads.
        self._most: tuple[int | None, float, int | None] = (None if is_auto else int(steps_per_call), math.inf, None)
        self._auto = AutoSteps(self._compile_most, self._switch) if is_auto else None
        self._programs: dict[Any, Program] = {}  # by stage, most steps, and shapes of a batch
        self.on_device = not self.is_looped and not all(stage.is_compiled for stage in self.stages)
        self.sums = MetricSums() if sums is None else sums
        self.state_shapes = shapes_of(state)
        self.compiler = BackgroundCompiler(lambda: self.may_leave_call())  # which the run sets later
        self.after_call: list[Look] = []
        self.after_first: list[Look] = []
        self.compiling: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        self.tracing = threading.Lock()
        self.may_leave_call: Callable[[], bool] = lambda: False
        self.may_be_left = False
        self._latest: Program | None = None
        self._begun: set[Stage] = set()
        self._slow: set[Stage] = set()
        self._compiled_ahead: set[Stage | Program] = set()
        self._first_call = first_call
        # A step that is not compiled may make arrays of equal shapes from batches of different ones.
        self._agreed = None if processes.is_single_process() or self.on_device else processes.AgreedShapes()
        self.compiled = compiled_here()
        self._size = 0.0  # of the steps' caches of compiled programs
        self._watch = Stopwatch() if watch is None else watch

    def stage_of(self, step: int) -> Stage:
        """The stage that contains a step."""
        return self.stages[self.train_steps.index(step)]

    # From batches to calls.

    def calls(
        self, items: CopiedBatches, start: int, ends: Iterable[float], sharding: Any, *, one_step: bool = False
    ) -> Iterator[Call]:
        """The batches from a step on, as calls, which end at the steps `ends`; of one step each if `one_step`."""

        def alone(step: int, *_: Any) -> Program:
            return OneStep(self.stage_of(step))

        program_for: ProgramFor = alone if one_step else self.program_for
        return make_calls(items, start, program_for, sharding, on_device=self.on_device, ends=ends)

    def program_for(self, step: int, shapes: Any, args: Callable[[], tuple[Any, ...]]) -> Program:
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
            return self._programs.setdefault(key, OneStep(stage))
        waits = compiled_here() is self.compiled  # not a thread that reads ahead
        with self.compiling(stage.name) if waits else contextlib.nullcontext(), self.tracing:
            if key in self._programs:
                return self._programs[key]
            try:
                loop, of_one = self._loop(*key[:2]), shapes_of(args())
                one = loop.prepare(self.state_shapes, of_one)
                made: Program = OneStep(stage) if one.is_slow_in_loops else StepLoop(stage, loop, of_one, one)
            except Exception as error:  # the step that needs it raises, where the error is described
                _logger.debug("%s cannot be looped: %s", stage.name, error)
                forget_frames(error)
                self._programs[key] = single = OneStep(stage)
                single.has_failed = True
                return single
        if made.args is None and stage not in self._slow:
            self._slow.add(stage)
            _logger.info("%s runs one step a call: XLA runs convolutions on a CPU much slower in a loop", stage.name)
        return self._programs.setdefault(key, made)

    def _loop(self, stage: Stage, most: int | None) -> LoopedStep:
        return looped_step(stage.step, most, Accumulate(self.sums.limits))

    # Compile programs before they are due.

    def compile(self, step: int, args: tuple[Any, ...]) -> None:
        """Compile the program for the batches from a step on, for shapes, before its call needs it."""
        self._compiled_ahead.add(self.stage_of(step))
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
                program.has_failed = True
                raise
            traced.lower().compile()

    def _compile_most(self, most: int) -> None:
        """Compile the programs of up to `most` steps that follow those of one step, also of stages compiled ahead."""
        latest = self._latest
        for (stage, _, shapes), one in list(self._programs.items()):
            if isinstance(one, StepLoop) and latest is not None and stage.first >= latest.stage.first:
                loop = self._loop(stage, most)
                with self.tracing:
                    longer = StepLoop(stage, loop, one.args, loop.prepare(self.state_shapes, one.args))
                self._compile(longer, one.args)
                self._compiled_ahead.add(longer)
                self._programs[stage, most, shapes] = longer

    def _switch(self, most: int, first: int) -> None:
        """Make calls of up to `most` steps, from step `first` on."""
        self._most = None, first, most

    # Run a call.

    def __call__(self, state: Any, call: Call) -> Any:
        """Run the steps of a call; return the new state and the metrics of its last step."""
        program, compiled = call.program, self.compiled
        is_new, before, seconds = not program.is_called, compiled.programs, compiled.seconds
        if self._agreed is not None:
            self._agreed.check(state, call.args, program)
        self.compiler.before(call.first, functools.partial(self._watch.part, STARTING), self.compiling)
        try:
            with self._first_call() if self._latest is None else contextlib.nullcontext():
                if is_new:
                    self._prepare(program, state, call)
                if self._auto is None or self._auto.is_over or program.args is None:
                    result = program.run(state, call, self.sums)
                else:
                    result = self._auto.timed(program.run, state, call, self.sums)
        except Exception as error:
            explain_one_argument(error, call.args)
            refuse_a_loss(program.stage.step, state, call.of_one, error)
            raise
        self._latest = program
        if is_new or compiled.programs != before:
            self._follow_up(call, result, compiled.seconds - seconds)
        if self.compiler.jobs:
            self.compiler.after(call.of_one)
        for look in self.after_call:
            look(call, result[0])
        return result

    def _prepare(self, program: Program, state: Any, call: Call) -> None:
        """Compile a program before its first call. What is wrong with its step, the call itself explains.

        Raises:
            StopWaiting: The run is stopping.
        """
        stage = program.stage
        if stage not in self._begun:
            self._log_compilation(call)
        if program.has_failed or not stage.is_compiled or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return
        with self.compiling(stage.name), using_mesh(mesh_of((state, call.args))):
            self.may_be_left = True
            try:
                if self.may_leave_call():
                    raise StopWaiting
                step, args = program.traceable(state, call.args, self.sums)
                traced = step.trace(state, *args)
                with internal_transfers():
                    lowered = traced.lower()
            except Exception as error:
                forget_frames(error)
                return
            finally:
                self.may_be_left = False
            try:
                compile_apart(lowered, self.may_leave_call)
            except Exception as error:
                if isinstance(program.step, TrainStep):
                    explain(error, state, call.args, donates=program.step.donate)
                raise

    def _follow_up(self, call: Call, result: Any, seconds: float) -> None:
        """Look at the first call of a program, and at any later one that has compiled: its step, or the sums."""
        program = call.program
        stage, is_first = program.stage, program.stage not in self._begun
        if is_first:
            check_result(result)
        if not program.is_called:
            program.is_called, program.rows = True, call.rows()
        self._watch.reassign(STARTING, seconds)
        size, self._size = self._size, self._size_of_caches()
        if is_first:
            self._begun.add(stage)
            if len(self._begun) == 1:
                warn_of_redundant_rows(call, result[0])
            for look in self.after_first:
                look(call, result[0])
        elif self._size > size and stage.is_compiled and program not in self._compiled_ahead:
            self._log_recompilation(call)
        self._compiled_ahead.discard(program)  # another compilation of it is for other arguments

    def _size_of_caches(self) -> float:
        """The number of programs that the steps have compiled, as far as they say it."""
        steps = {id(one.step): one.step for one in list(self._programs.values())}
        sizes = [getattr(step, "_cache_size", None) for step in steps.values()]
        return sum(self.compiled.programs if size is None else size() for size in sizes)

    def repeated(self, call: Call) -> Callable[..., Any]:
        """A function that repeats a call, `again(state, *call.args) -> (state, metrics)`; call it after the call."""
        again: Callable[..., Any] = call.program.repeated(call, self.sums)
        return again

    @property
    def constants(self) -> Constants:
        """The constant metrics of the latest call, which are not computed by the step."""
        return NONE if self._latest is None else self._latest.constants

    def _log_compilation(self, call: Call) -> None:
        """Log why a program is compiled, unless the run has only one."""
        program = call.program
        stage, size = program.stage, getattr(program.step, "_cache_size", None)
        has_several = self.is_looped or len(self.stages) > 1
        if has_several and size is not None and not size() and stage not in self._compiled_ahead:
            _logger.info("compiling %s for %s", stage.name, _steps(call))

    def _log_recompilation(self, call: Call) -> None:
        shapes = ", ".join(map(type_text, jax.tree.leaves(call.args)[:5]))
        _logger.info(
            "compiled %s again for %s: its batch differs from earlier ones in shapes, dtypes or placement (%s), or its "
            "state in placement",
            call.program.stage.name,
            _steps(call),
            shapes,
        )


# Checks, warnings and logs.


def check_result(result: Any) -> None:
    """Refuse the result of a step unless it is a state and metrics."""
    expected = "train_step must return (state, metrics), a TrainState and a mapping of names to values; "
    what = f"{expected}jstep.minimize(loss_fn, optimizer) makes such a step of a loss; it returned"
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"{what} {type(result).__name__}{f' of {len(result)}' if isinstance(result, tuple) else ''}")
    state, metrics = result
    if not isinstance(state, TrainState) or not isinstance(metrics, Mapping):
        raise TypeError(f"{what} ({type(state).__name__}, {type(metrics).__name__})")
    odd = next((name for name in metrics if not isinstance(name, str)), None)
    if odd is not None:
        raise TypeError(f"{expected}the name of a metric must be a string, got {shown(odd)}")


def warn_of_redundant_rows(call: Call, state: Any) -> None:
    """Log a warning if every device of the state's mesh does the same work, because nothing is split over them.

    This is certain only if the parameters are replicated, no array of the batch is on the mesh, and the step shards
    nothing itself. Any other layout may be intended, and gives no warning.
    """
    params = jax.tree.leaves(state.params)
    mesh = mesh_without_batch(params, call.of_one)
    if mesh is None or jax.process_index() != 0:
        return
    if not all(isinstance(leaf, jax.Array) and leaf.is_fully_replicated for leaf in params):
        return
    traced = call.trace(state)
    if traced is None or shards_arrays(traced.jaxpr):
        return
    _logger.warning(
        "batches are not sharded and parameters are replicated, so each of the %d devices computes all rows of every "
        "batch; give train batch_sharding=%r, or place the batches on the mesh",
        mesh.size,
        mesh.axis_names[0],
    )


def _steps(call: Call) -> str:
    return "1 step" if call.program.most == 1 else f"1 to {call.program.most} steps"
