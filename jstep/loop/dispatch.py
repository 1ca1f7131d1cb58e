"""Dispatch of calls: compile the program if it is not compiled yet, run it, and explain its errors."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import trees
from jstep.core.annotations import Tree
from jstep.core.checks import describe_type, format_value
from jstep.core.exceptions import context_manager, forget_frames
from jstep.core.jaxprs import shards_arrays
from jstep.core.meshes import internal_transfers, mesh_of, using_mesh
from jstep.core.stopwatch import STARTING, Stopwatch
from jstep.data.placement import mesh_without_batch
from jstep.distributed import processes
from jstep.hooks.metric_sums import NO_CONSTANTS
from jstep.loop.calls import AutoSteps, Call
from jstep.loop.compiler import BackgroundCompiler, compile_apart
from jstep.loop.programs import Program, ProgramTable
from jstep.loop.signals import StopSignals, StopWaiting
from jstep.loop.stages import TrainSteps
from jstep.optimizers.hyperparameters import LEARNING_RATE, is_learning_rate
from jstep.slots.roles import roles_in
from jstep.state.train_state import TrainState
from jstep.training.explain import explain, explain_one_argument
from jstep.training.metrics import Constants
from jstep.training.step import TrainStep, step_function

_ROUNDING = 2**-24
"""What rounding leaves of a rate, as a share of the largest, where a schedule ends at 0."""
_logger = logging.getLogger("jstep")

AfterCall = Callable[[Call, Any], None]
"""`after_call(call, state)`, where the state is the one that the dispatched call returned."""


class Dispatch:
    """The calls of a run: `state, metrics = dispatch(state, call)`. It never waits for the device."""

    def __init__(
        self,
        table: ProgramTable,
        *,
        signals: StopSignals | None = None,
        first_call: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        watch: Stopwatch | None = None,
        after_first: Sequence[AfterCall] = (),
    ) -> None:
        self.table = table
        self._signals = StopSignals() if signals is None else signals
        self.compiler = BackgroundCompiler(self._signals)
        self._first_call = first_call
        self._watch = Stopwatch() if watch is None else watch
        self._after_first = after_first
        self.after_each: list[AfterCall] = []
        self._auto = AutoSteps(self._compile_longer, table.switch) if table.is_auto else None
        self._latest: Program | None = None
        # A step that is not compiled may make arrays of equal shapes from batches of different ones.
        self._agreed = None if processes.is_single_process() or table.on_device else processes.AgreedShapes()

    def __call__(self, state: Tree, call: Call) -> Any:
        program, compiled = call.program, self.table.compilations.compiled
        is_new, before, seconds = not program.is_called, compiled.programs, compiled.seconds
        if self._agreed is not None:
            self._agreed.check(state, call.args, program)
        if self.compiler.begun or self.compiler.jobs:
            self.compiler.before(call.first, self._waiting, may_leave=not call.must_run)
        try:
            with self._first_call() if self._latest is None else contextlib.nullcontext():
                if is_new:
                    self._prepare(program, state, call)
                with jax.profiler.StepTraceAnnotation("train", step_num=call.first) if _is_traced() else _UNMARKED:
                    if self._auto is None or self._auto.is_over or not program.is_looped:
                        result = program.run(state, call, self.table.sums)
                    else:
                        result = self._auto.timed(program.run, state, call, self.table.sums)
        except Exception as error:
            explain_one_argument(error, call.args)
            raise
        if is_new or compiled.programs != before:
            self._follow_up(call, result, compiled.seconds - seconds)
        self._latest = program
        if self.compiler.jobs:
            self.compiler.after(call.step_args)
        for after_call in self.after_each:
            after_call(call, result[0])
        return result

    def _prepare(self, program: Program, state: Tree, call: Call) -> None:
        """Compile a program before its first call; errors in its step are left to the call, which explains them."""
        compilations, stage, signals = self.table.compilations, program.stage, self._signals
        compilations.log_begin(call)
        if program.has_failed or not stage.is_compiled or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return
        with compilations.compiling(stage.name), using_mesh(mesh_of((state, call.args))):
            try:
                if not call.must_run:
                    signals.interrupts = StopWaiting
                    signals.check()
                step, args = program.traceable(state, call.args, self.table.sums)
                traced = step.trace(state, *args)
                with internal_transfers():
                    lowered = traced.lower()
            except Exception as error:
                forget_frames(error)
                return
            finally:
                signals.finish()
            try:
                compile_apart(lowered, signals, may_leave=not call.must_run)
            except Exception as error:
                if isinstance(program.step, TrainStep):
                    explain(error, state, call.args, donates=program.step.donate)
                raise

    def _follow_up(self, call: Call, result: Any, seconds: float) -> None:
        """Check the first call of a program, and any later one that has compiled."""
        is_first = self.table.compilations.log_end(call)
        if is_first:
            check_result(result)
        if not call.program.is_called:
            call.program.is_called, call.program.rows = True, call.rows()
        self._watch.reassign(STARTING, seconds)
        if is_first:
            if self._latest is None:
                warn_of_redundant_rows(call, result[0])
            for after_call in self._after_first:
                after_call(call, result[0])

    @context_manager
    def _waiting(self, name: str) -> Iterator[None]:
        with self._watch.part(STARTING), self.table.compilations.compiling(name):
            yield

    def _compile_longer(self, max_steps: int) -> None:
        if self._latest is not None:
            self.table.compile_longer(max_steps, self._latest.stage)

    def repeated(self, call: Call) -> Callable[..., Any]:
        """Return a function `repeat(state, *call.args) -> (state, metrics)` for a call that was made."""
        return call.program.repeated(call, self.table.sums)

    @property
    def constants(self) -> Constants:
        return NO_CONSTANTS if self._latest is None else self._latest.constants


_UNMARKED = contextlib.nullcontext()
_is_traced = getattr(jax.profiler.StepTraceAnnotation, "is_enabled", lambda: True)
"""Whether a trace of the profiler is on; costs 40 ns, an annotation without a trace 2.7 µs."""


# Checks and warnings.


def warn_of_ended_rate(train_steps: TrainSteps, last_step: int | None, call: Call, state: Tree) -> None:
    """Warn, in the last stage, if all learning rates of its optimizer are 0 in the last two steps of the run."""
    step = step_function(call.program.stage.step)
    if last_step is None or step is None or step.optimizer is None or last_step - call.program.stage.first < 4:
        return
    optimizer, roles = step.optimizer, roles_in(state)
    is_last = train_steps.index(last_step - 1) == train_steps.index(call.first)
    if not is_last or roles.with_detail(LEARNING_RATE):  # a held one is no schedule
        return
    scheduled: list[bool] = []

    def largest(step: Any) -> Any:
        rates = [value for name, value in optimizer.hyperparameters(step).items() if is_learning_rate(name)]
        scheduled.extend(map(trees.is_traced, rates))
        return jnp.max(jnp.stack([jnp.max(jnp.abs(rate)) for rate in rates]))

    steps = np.asarray([1, last_step // 2, last_step - 2, last_step - 1], trees.default_int())
    try:
        jax.eval_shape(jax.vmap(largest), steps)
        if not any(scheduled):
            return
        with internal_transfers():
            *earlier, before, last = np.asarray(jax.jit(jax.vmap(largest))(steps)).tolist()
    except Exception as error:  # a schedule that needs a concrete step, or a hyperparameter that is no number
        _logger.debug("whether the learning rate is 0 in the end is not known: %s", error)
        return
    if before == last <= _ROUNDING * max(earlier) and max(earlier) > 0 and jax.process_index() == 0:
        _logger.warning(
            "the learning rate is 0 in the last steps of the run, before step %d, so these do not train: its schedule "
            "ends before the run does; give it more steps, or end the run earlier (last_step)",
            last_step,
        )


def check_result(result: object) -> None:
    expected = "train_step must return (state, metrics), a TrainState and a mapping of names to values, "
    advice = "; jstep.minimize(loss_fn, optimizer) makes such a step from a loss"
    if not isinstance(result, tuple) or len(result) != 2:
        length = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise TypeError(f"{expected}got {describe_type(result)}{length}{advice}")
    state, metrics = result
    if not isinstance(state, TrainState) or not isinstance(metrics, Mapping):
        raise TypeError(f"{expected}got ({type(state).__name__}, {type(metrics).__name__}){advice}")
    odd = next((name for name in metrics if not isinstance(name, str)), None)
    if odd is not None:
        raise TypeError(f"train_step: the name of a metric must be a string, got {format_value(odd)}")


def warn_of_redundant_rows(call: Call, state: Tree) -> None:
    """Warn if every device of the state's mesh does the same work, because nothing is split over them.

    Any layout but replicated parameters and a batch that is not on the mesh may be intended.
    """
    params = jax.tree.leaves(state.params)
    mesh = mesh_without_batch(params, call.step_args)
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
