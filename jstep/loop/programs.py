"""The compiled programs of a run: for each stage, one that runs 1 to `steps_per_call` steps."""

import contextlib
import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.core import trees
from jstep.core.checks import shown
from jstep.core.meshes import in_background, internal_transfers, mesh_of, using_mesh
from jstep.core.placement import refuse_compile_only
from jstep.core.programs import shards_arrays
from jstep.data.to_devices import mesh_without_batch
from jstep.distributed import processes
from jstep.hooks.metric_sums import MetricSums
from jstep.hooks.metric_sums_program import Accumulate, Columns, skip_metric_of
from jstep.hooks.stock import StepCounterHook
from jstep.hooks.timeline import STARTING, Stopwatch
from jstep.loop.compiler import BackgroundCompiler, compile_apart, compiled_here, shapes_of, stacked_shapes, type_text
from jstep.loop.feeder import AHEAD, Call, CopiedBatches, Plan, TrainSteps, make_calls, name_of_step
from jstep.loop.stopping import StopWaiting
from jstep.state.global_step import get_global_step, require_alive
from jstep.state.train_state import TrainState, keep_roles, require_state
from jstep.training.explain import explain, explain_one_argument
from jstep.training.looped import LoopedStep, looped_step
from jstep.training.metrics import Constants
from jstep.training.step import TrainStep, refuse_a_loss, run, trace_of

# Checks of the arguments of `train`, before anything is opened.


def check(state: Any, last_step: int) -> None:
    """Refuse a state without a scalar global step, or a last_step that its dtype cannot hold.

    Raises:
        RuntimeError: The state has no global step.
    """
    refuse_compile_only(require_state(state), "state")
    if np.ndim(state.global_step):
        raise ValueError(
            f"state: its global_step has shape {np.shape(state.global_step)}, must be a scalar: a population "
            "under train shares one step. Map all other leaves: axes = jax.tree.map(lambda _: 0, "
            "jax.eval_shape(create, seed)).replace(global_step=None), states = jax.vmap(create, out_axes=axes)(seeds), "
            "and in jstep.TrainStep the step jax.vmap(step, in_axes=(axes, None), out_axes=(axes, 0)); see the recipe "
            "'Hyperparameter sweeps with vmap'. Members at different steps need a custom loop, and a Saver"
        )
    step = get_global_step(state)
    if step is None:
        # Raises the error of StepCounterHook, which every run has.
        StepCounterHook().begin(state)
        return
    last = np.iinfo(step.dtype).max
    if last_step > last:
        raise ValueError(
            f"last_step={last_step}: must be at most {last}, the last step that {step.dtype} can hold; under "
            "jax_enable_x64 steps are int64"
        )


def check_result(result: Any) -> tuple[TrainState, Any]:
    """Return the result of a step; refuse anything but a state and metrics."""
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
    return state, metrics


# `steps_per_call="auto"`: choose the most steps of a call from the times of the first calls.

_logger = logging.getLogger("jstep")

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

    def before(self, state: Any) -> float:
        """Called before a call of one step; return the time, for `after`."""
        if self._calls >= _UNTIMED:
            jax.block_until_ready(state)
        return self._clock()

    def after(self, began: float, state: Any, first: int) -> None:
        """Called after it, with the state that it returned, and the step at which it began."""
        self._calls += 1
        if self._calls <= _UNTIMED:
            return
        jax.block_until_ready(state)
        self._seconds.append(self._clock() - began)
        if self.is_over:
            self._choose(min(self._seconds), first + 1 + AHEAD)

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


def is_compiled(step: Any) -> bool:
    """Whether a step is compiled, so that it receives JAX arrays whatever it is called with."""
    return isinstance(step, TrainStep) or hasattr(step, "lower")


class Looped(NamedTuple):
    """The program of calls of several steps, for one shape of the batches.

    Attributes:
        step: The program.
        args: The shapes of the arguments of one step.
        columns: What the program accumulates.
    """

    step: LoopedStep
    args: tuple[Any, ...]
    columns: Columns


@dataclasses.dataclass
class Stage:
    """A training step and its programs.

    Attributes:
        step: The training step, as given.
        name: Its name, for logs.
        first: The first step of the stage.
        single: The step that runs calls of one step; a function that is not compiled is compiled if others are looped.
        plans: The most steps of a call, and the shapes of a batch → how calls are made.
        known: The plans and shapes whose program is compiled.
        is_begun: Whether a call of it was made.
        is_slow_in_loops: Whether XLA runs it much slower in a loop than by itself, which is logged once.
        is_train_step: Whether `single` is a `TrainStep`, whose constant metrics are known.
    """

    step: Any
    name: str
    first: int
    single: Any
    plans: dict[Any, Plan] = dataclasses.field(default_factory=dict)
    known: set[Any] = dataclasses.field(default_factory=set)
    is_begun: bool = False
    is_slow_in_loops: bool = False
    is_train_step: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.is_train_step = isinstance(self.single, TrainStep)


class Dispatched(NamedTuple):
    """A call that was dispatched.

    Attributes:
        stage: Its stage.
        call: The call.
        state: The state that it returned.
        args: The arguments of one step, or their shapes.
        constants: The metrics that it did not compute.
    """

    stage: Stage
    call: Call
    state: Any
    args: tuple[Any, ...]
    constants: Constants

    def trace(self) -> Any:
        """The trace of the step that ran, or None."""
        return trace_step(self.stage.single, self.state, self.args)


def warn_of_redundant_rows(done: Dispatched) -> None:
    """Log a warning if every device of the state's mesh does the same work, because nothing is split over them.

    This is certain only if the parameters are replicated, no array of the batch is on the mesh, and the step shards
    nothing itself. Any other layout may be intended, and gives no warning.
    """
    params = jax.tree.leaves(done.state.params)
    mesh = mesh_without_batch(params, done.args)
    if mesh is None or jax.process_index() != 0:
        return
    if not all(isinstance(leaf, jax.Array) and leaf.is_fully_replicated for leaf in params):
        return
    traced = done.trace()
    if traced is None or shards_arrays(traced.jaxpr):
        return
    _logger.warning(
        "batches are not sharded and parameters are replicated, so each of the %d devices computes all rows of every "
        "batch; give train batch_sharding=%r, or place the batches on the mesh",
        mesh.size,
        mesh.axis_names[0],
    )


class Programs:
    """The programs of a run. Each call runs its steps with the program for it, and each compilation is logged.

    With `steps_per_call` = 1, a call is a call of the training step. Otherwise a program loops over the steps of a
    call, as many as there are: one program for each stage and each shape of the batches.

    Args:
        stages: The training steps, by the step at which each begins.
        steps_per_call: The most steps of a call, or "auto".
        state: The state, or its template.
        sums: Receives the metrics of all steps.
        first_call: A context manager for the very first call.
        watch: The stopwatch of the run; compilation is not counted as time of the steps.

    Attributes:
        on_device: Whether batches must be put on the device, for a step that is not compiled.
        is_looped: Whether calls may take several steps.
        state_shapes: The shapes of the state.
        first_compiler: Compiles the first program in the background; None if it is not.
        ahead_compiler: Compiles later programs in the background, or None.
        after_call: Functions that are called after each call was dispatched, with a `Dispatched`.
        after_first: Functions that are called after the first call of each stage.
        compiling: A context for the time in which the loop waits for a program of the name that it is given.
        tracing: Held while a program for new shapes is traced, by whichever thread needs it first.
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
        self._firsts = stages
        # The most steps of a call, None for one that is not stacked; from a step on, those that "auto" chose. One
        # attribute, which a thread that plans calls reads.
        self._most: tuple[int | None, float, int | None] = (None if is_auto else int(steps_per_call), math.inf, None)
        self.is_looped = several = steps_per_call != 1
        self._auto = AutoSteps(self._compile_most, self._switch) if is_auto else None
        self.stages = [
            Stage(
                step,
                name_of_step(step) if len(stages.values) > 1 else getattr(step, "__name__", "train_step"),
                first,
                _single(step, several),
            )
            for step, first in zip(stages.values, stages.firsts, strict=True)
        ]
        self.on_device = not several and not all(map(is_compiled, stages.values))
        self.sums = MetricSums() if sums is None else sums
        self.state_shapes = shapes_of(state)
        self.first_compiler: BackgroundCompiler | None = None
        self.ahead_compiler: BackgroundCompiler | None = None
        self._first_call: Callable[[], contextlib.AbstractContextManager[Any]] | None = first_call
        self.after_call: list[Callable[[Dispatched], None]] = []
        self.after_first: list[Callable[[Dispatched], None]] = []
        self._prepared: set[Any] = set()
        self.compiling: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        self.tracing = threading.Lock()
        self._stage, self._until = self.stages[0], -1.0
        self._attend_from = -1.0  # the step from which a call is attended
        self._shapes: Any = None  # those of the latest call
        self.may_leave_call: Callable[[], bool] = lambda: False
        self.may_be_left = False
        self._constants = Constants({}, skip_metric_of(stages.values[0]))
        # A step that is not compiled may make arrays of equal shapes from batches of different ones.
        self._agreed = None if processes.is_single_process() or self.on_device else processes.AgreedShapes()
        self._compiled = compiled_here()  # by the thread that runs the loop
        self._watch = Stopwatch() if watch is None else watch
        self._as_starting = functools.partial(self._watch.part, STARTING)

    def stage_of(self, step: int) -> Stage:
        """The stage that contains a step."""
        return self.stages[self._firsts.index(step)]

    def calls(
        self, items: CopiedBatches, start: int, ends: Iterable[int] | None = None, sharding: Any = None
    ) -> Iterator[Call]:
        """The batches from a step on, as calls, which end at the steps `ends`."""
        plan = self.plan if self.is_looped else None
        return make_calls(items, start, sharding, on_device=self.on_device, plan=plan, ends=ends or ())

    def plan(self, step: int, shapes: Any, args: Callable[[], tuple[Any, ...]]) -> Plan:
        """Plan the calls with batches of some shapes, from a step on; trace the step when the shapes are new.

        Args:
            step: The step.
            shapes: Identifies the shapes.
            args: Returns the arguments of one step, or their shapes.
        """
        stage, (most, later, longer) = self.stage_of(step), self._most
        most = most if step < later else longer
        found = stage.plans.get((most, shapes))
        if found is None:
            with self.tracing:  # the first program is compiled in a thread of its own
                found = stage.plans[most, shapes] = self._new_plan(stage, most, args)
        return found

    def _new_plan(self, stage: Stage, most: int | None, args: Callable[[], tuple[Any, ...]]) -> Plan:
        try:
            return self._looped_plan(stage, most, args())
        except Exception as error:  # the step that needs it raises, where the error is described
            _logger.debug("%s cannot be looped: %s", stage.name, error)
            return Plan()

    def _looped_plan(self, stage: Stage, most: int | None, args: tuple[Any, ...]) -> Plan:
        accumulate = Accumulate(self.sums.limits)
        step, args = looped_step(stage.step, most, accumulate), shapes_of(args)
        one = step.prepare(self.state_shapes, args)
        if not one.is_slow_in_loops:
            return Plan(most or 1, Looped(step, args, accumulate(one)), is_stacked=most is not None)
        if not stage.is_slow_in_loops:
            stage.is_slow_in_loops = True
            _logger.info("%s runs one step a call: XLA runs convolutions on a CPU much slower in a loop", stage.name)
        return Plan()

    def compile(self, step: int, args: tuple[Any, ...]) -> bool:
        """Compile the program for the batches from a step on, for shapes; return False if it was compiled before."""
        stage = self.stage_of(step)
        key = (stage.first, trees.structure(args), tuple(jax.tree.leaves(args)))
        if key in self._prepared:
            return False
        self._prepared |= {key, stage.first}
        plan = self.plan(step, key, lambda: args) if self.is_looped else Plan()
        self._compile_plan(stage, plan, args)
        return True

    def _compile_plan(self, stage: Stage, plan: Plan, args: tuple[Any, ...]) -> None:
        """Compile the program of a plan, for the shapes of the state and of the arguments of one step."""
        args = stacked_shapes(args, plan.most) if plan.is_stacked else args
        with using_mesh(mesh_of(self.state_shapes)):
            self._trace(stage, plan.looped, self.state_shapes, args).lower().compile()

    def _trace(self, stage: Stage, looped: Looped | None, state: Any, args: tuple[Any, ...]) -> Any:
        """The trace of the program of a call, for arrays or shapes; None if it is not compiled."""
        if looped is None:
            return trace_step(stage.single, state, args)
        count = jax.ShapeDtypeStruct((), np.int32)
        sums = shapes_of(self.sums.empty(looped.columns, state.global_step))
        return trace_of(looped.step, state, (count, sums, *args))

    def _compile_most(self, most: int) -> None:
        """Compile the programs of up to `most` steps, for the shapes that calls of one step have had."""
        stage = self._stage
        for plan in list(stage.plans.values()):
            if plan.looped is not None:
                args = plan.looped.args
                self._compile_plan(stage, self._looped_plan(stage, most, args), args)

    def _switch(self, most: int, first: int) -> None:
        """Make calls of up to `most` steps, from step `first` on."""
        self._most = None, first, most

    def release(self) -> None:
        """Drop references to the run."""
        self.first_compiler = self.ahead_compiler = None
        self.after_call, self.after_first, self.compiling = [], [], contextlib.nullcontext

    @property
    def constant_metrics(self) -> Any:
        """The names of the metrics of the latest call that are constants, not computed by the step."""
        return self._constants.values.keys()

    @property
    def skip_metric(self) -> str | None:
        """The metric of the latest call that is 1 if the whole update was skipped; None without a guard."""
        return self._constants.skipped

    def __call__(self, state: Any, call: Call) -> Any:
        """Run the steps of a call; return the new state and the metrics of its last step."""
        if self._agreed is not None:
            self._agreed.check(state, call.args)
        # Calls of one step of `TrainStep` cost a small step no more than they must: the rest is decided before them.
        if call.first >= self._attend_from or call.looped is not None or call.shapes != self._shapes:
            return self._attended(state, call)
        before, seconds = self._compiled.programs, self._compiled.seconds
        result = self._run(self._stage, state, call)
        if self._compiled.programs != before:
            self._compiled_again(self._stage, call, seconds)
        return result

    def _attended(self, state: Any, call: Call) -> Any:
        """Run the steps of a call that is the first of its stage or shapes, or looped, or that others look at."""
        if call.first >= self._until or call.first < self._stage.first:
            self._enter(call.first)
        stage = self._stage
        if self.first_compiler is not None:
            self.first_compiler.before(call.first, compiling=self.compiling)
            self.first_compiler = None
        if self.ahead_compiler is not None:
            self.ahead_compiler.before(call.first, self._as_starting, self.compiling)
        is_first, stage.is_begun = not stage.is_begun, True
        if is_first:
            self._log_compilation(stage, call)
        before, seconds = self._compiled.programs, self._compiled.seconds
        auto = None if self._auto is None or self._auto.is_over or call.looped is None else self._auto
        first_call, self._first_call = self._first_call, None
        with contextlib.nullcontext() if first_call is None else first_call():
            self._compile_new(stage, state, call)
            began = 0.0 if auto is None else auto.before(state)
            result = self._run(stage, state, call)
        if is_first:
            check_result(result)
        if auto is not None:
            auto.after(began, result[0], call.first)
        if self._compiled.programs != before:
            self._compiled_again(stage, call, seconds, is_first=is_first)
        is_watched = bool(self.after_call) or self.ahead_compiler is not None
        if is_first or is_watched:
            self._record(stage, call, result, is_first)
        self._attend_from = -1.0 if is_watched or not stage.is_train_step else self._until
        return result

    def _compiled_again(self, stage: Stage, call: Call, seconds: float, *, is_first: bool = False) -> None:
        """Count the time of a compilation since `seconds` as start-up, and log one that is not the first."""
        self._watch.reassign(STARTING, self._compiled.seconds - seconds)
        if not is_first and (call.looped is not None or is_compiled(stage.single)):
            self._log_recompilation(stage, call)

    def _compile_new(self, stage: Stage, state: Any, call: Call) -> None:
        """Compile the program of a call whose shapes are new. What is wrong with the step, the call itself explains.

        Raises:
            StopWaiting: The run is stopping.
        """
        self._shapes, key = call.shapes, (call.most, call.shapes)
        if key in stage.known or not is_compiled(stage.single) or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return
        stage.known.add(key)
        with self.compiling(stage.name), using_mesh(mesh_of((state, call.args))):
            self.may_be_left = True
            try:
                if self.may_leave_call():
                    raise StopWaiting
                traced = self._trace(stage, call.looped, state, call.args)
                with internal_transfers():
                    lowered = traced.lower()
            except Exception:
                return
            finally:
                self.may_be_left = False
            try:
                compile_apart(lowered, self.may_leave_call)
            except Exception as error:
                if stage.is_train_step:
                    explain(error, state, call.args, donates=stage.single.donate)
                raise

    def _run(self, stage: Stage, state: Any, call: Call) -> Any:
        step, looped, sums = stage.single, call.looped, self.sums
        try:
            if looped is not None:
                before = sums.begin(looped.columns, state.global_step)
                new, metrics, after = run(looped.step, state, (np.int32(call.steps), before, *call.args))
                sums.ran(call.first, call.steps, after, metrics.constants)
            elif stage.is_train_step:
                new, metrics = run(step, state, call.args)
                if sums.is_wanted and type(metrics.computed) is dict:
                    sums.add(call.first, metrics.computed, metrics.constants.skipped, metrics.constants)
            else:
                return self._run_other(stage, state, call)
        except Exception as error:
            explain_one_argument(error, call.args)
            refuse_a_loss(stage.step, state, looped.args if looped is not None else call.args, error)
            raise
        self._constants = metrics.constants
        return new, metrics.whole()

    def _run_other(self, stage: Stage, state: Any, call: Call) -> Any:
        """Run a step that jstep did not make."""
        if trees.is_donated(state):  # on a mesh, JAX would crash
            require_alive(state)
        result = stage.single(state, *call.args)
        if not (isinstance(result, tuple) and len(result) == 2):
            return result
        self._constants = Constants({}, skip_metric_of(stage.single))
        if self.sums.is_wanted and isinstance(result[1], Mapping):
            self.sums.add(call.first, result[1], self._constants.skipped)
        return trees.owned(keep_roles(state, result[0])), result[1]

    def _record(self, stage: Stage, call: Call, result: Any, is_first: bool) -> None:
        """Tell those who look that a call was dispatched."""
        new, _ = result
        args = call.args if call.looped is None else call.looped.args
        done = Dispatched(stage, call, new, args, self._constants)
        if self.ahead_compiler is not None:
            self.ahead_compiler.after(done.state, args)
        for look in self.after_call:
            look(done)
        if not is_first:
            return
        if sum(stage.is_begun for stage in self.stages) == 1:
            warn_of_redundant_rows(done)
        for look in self.after_first:
            look(done)

    def repeated(self, call: Call) -> Any:
        """A function that repeats a call, `again(state, *call.args) -> (state, metrics)`; call it after the call."""
        stage, looped = self.stage_of(call.first), call.looped
        if looped is None and not stage.is_train_step:
            return stage.single
        step = stage.single if looped is None else looped.step

        def again(state: Any, *args: Any) -> Any:
            if looped is not None:
                args = np.int32(call.steps), self.sums.empty(looped.columns, state.global_step), *args
            new, metrics, *_ = run(step, state, args)
            return new, metrics.whole()

        again.donate = step.donate  # type: ignore[attr-defined]
        return again

    def _enter(self, step: int) -> None:
        """Switch to the stage that contains a step."""
        stop = self._firsts.edge_after(step)
        self._stage, self._until = self.stage_of(step), math.inf if stop is None else stop

    def _log_compilation(self, stage: Stage, call: Call) -> None:
        """Log why a program is compiled, unless the run has only one."""
        step: Any = stage.single if call.looped is None else call.looped.step
        size = getattr(step, "_cache_size", None)
        if not (self.is_looped or len(self.stages) > 1) or size is None or size() or stage.first in self._prepared:
            return
        _logger.info("compiling %s for %s", stage.name, _steps(call))

    def _log_recompilation(self, stage: Stage, call: Call) -> None:
        shapes = ", ".join(map(type_text, jax.tree.leaves(call.args)[:5]))
        _logger.info(
            "compiled %s again for %s: its batch differs from earlier ones in shapes, dtypes or placement (%s), or its "
            "state in placement",
            stage.name,
            _steps(call),
            shapes,
        )


def trace_step(step: Any, state: Any, args: tuple[Any, ...]) -> Any:
    """The trace of a call of a step, for arrays or shapes. JAX caches it, so a call and its trace share the work.

    Args:
        step: The step.
        state: Its state.
        args: Its other arguments.

    Returns:
        A `jax.stages.Traced`; None for a step that is not compiled, which cannot be traced.
    """
    if isinstance(step, TrainStep):
        return trace_of(step, state, args)
    if not hasattr(step, "trace"):
        return None
    with using_mesh(mesh_of((state, args))):
        return step.trace(state, *args)


def _single(step: Any, several: bool) -> Any:
    return step if is_compiled(step) or not several else TrainStep(step, donate=False)


def _steps(call: Call) -> str:
    return "1 step" if call.most == 1 else f"1 to {call.most} steps"
