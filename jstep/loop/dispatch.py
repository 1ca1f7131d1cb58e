"""The calls of a run: how many steps they have under "auto", and the checks and warnings of the first one."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core import processes, trees
from jstep.core.agreed_shapes import AgreedShapes
from jstep.core.checks import describe_type, format_value
from jstep.core.jaxprs import shards_arrays
from jstep.core.logs import logger
from jstep.core.meshes import internal_transfers
from jstep.core.stopwatch import STARTING, Stopwatch
from jstep.core.threads import in_background
from jstep.core.trees import Tree
from jstep.data.batch_placement import mesh_without_batch
from jstep.loop.chunks import Chunk
from jstep.loop.compiling import Compiler
from jstep.loop.programs import Program, ProgramTable, shapes_of
from jstep.loop.signals import StopSignals
from jstep.loop.stages import TrainSteps
from jstep.metering.metric_sums import NO_CONSTANTS
from jstep.metrics.totals import MeanOf
from jstep.optimizers.hyperparameters import LEARNING_RATE, is_learning_rate
from jstep.slots.roles import roles_in
from jstep.state.train_state import TrainState
from jstep.training.metrics import LOSS, Constants
from jstep.training.step import step_function
from jstep.training.watched_updates import known_updates, warn_of_unfrozen

_ROUNDING = 2**-24
"""What rounding leaves of a rate where a schedule ends at 0, as a share of the largest."""

AfterChunk = Callable[[Chunk, Any], None]
"""`after_chunk(chunk, state)`, where the state is the one that the dispatched call returned."""


CountExamples = Callable[[int | None, tuple[Any, ...]], int | None]
"""`count_examples(rows, shapes)`: the number of examples in a batch of these shapes, whose leading axis is `rows`."""


class Dispatch:
    """The calls of a run: `state, metrics = dispatch(state, chunk)`. It waits for the device only to time "auto"."""

    def __init__(
        self,
        table: ProgramTable,
        *,
        signals: StopSignals | None = None,
        first_call: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        watch: Stopwatch | None = None,
        after_first: Sequence[AfterChunk] = (),
        count_examples: CountExamples | None = None,
    ) -> None:
        self.table = table
        self._first_call = first_call
        self._after_first = after_first
        self._count_examples = count_examples
        self._watch = Stopwatch() if watch is None else watch
        self.compiler = Compiler(table, StopSignals() if signals is None else signals, self._watch)
        self.after_each: list[AfterChunk] = []
        self._auto = AutoSteps(table) if table.is_auto else None
        self._latest: Program | None = None
        # A step that is not compiled may make arrays of equal shapes from batches of different ones.
        self._agreed = None if processes.is_single_process() or table.on_device else AgreedShapes()

    def prepare(self, state: Tree, chunk: Chunk) -> None:
        """Compile what a call needs; no signal is obeyed between this and the call."""
        self.compiler.wait(chunk.first, can_interrupt=chunk.can_interrupt)
        if not chunk.program.is_called:
            with self._watch.phase(STARTING), self._first_call() if self._latest is None else _UNMARKED:
                self.compiler.compile_due(state, chunk)

    def __call__(self, state: Tree, chunk: Chunk) -> Any:
        program = chunk.program
        compiled = self.compiler.record
        before = compiled.programs
        if self._agreed is not None:
            self._agreed.check(state, chunk.args, program)
        if not program.is_called or self.compiler.begun or self.compiler.jobs:
            self.prepare(state, chunk)
        began = self._watch.clock()
        if program.is_called and self._auto is None and not _is_traced():  # without contexts, which take a microsecond
            result = program.run(state, chunk, self.table.sums)
        else:
            result = self._run_watched(state, chunk, began)
        if not program.is_called or compiled.programs != before:
            self._follow_up(state, chunk, result, began)
        self._latest = program
        if self.compiler.jobs:
            self.compiler.after(chunk.step_args)
        for after_chunk in self.after_each:
            after_chunk(chunk, result[0])
        return result

    def stop_calling(self, after_chunk: AfterChunk) -> None:
        self.after_each = [other for other in self.after_each if other != after_chunk]

    def _run_watched(self, state: Tree, chunk: Chunk, began: float) -> Any:
        """Run a chunk whose program is new, whose time counts, or that is being profiled."""
        annotation = jax.profiler.StepTraceAnnotation("train", step_num=chunk.first) if _is_traced() else _UNMARKED
        try:
            watching = _UNMARKED if chunk.program.is_called else chunk.program.stage.watching()
            with self._first_call() if self._latest is None else _UNMARKED, annotation, watching:
                if self._auto is None or not chunk.program.is_looped:
                    return chunk.program.run(state, chunk, self.table.sums)
                result = self._auto.timed(state, chunk)
        except BaseException:
            if not chunk.program.is_called:  # perhaps it cannot be compiled
                self._watch.reassign(STARTING, self._watch.clock() - began)
            raise
        if self._auto.is_over:
            self._auto = None
        return result

    def _follow_up(self, state: Tree, chunk: Chunk, result: Any, began: float) -> None:
        is_first = self.compiler.note_compiled(state, chunk)
        if is_first:
            check_result(result)
        if not chunk.program.is_called:
            rows = chunk.rows()
            if self._count_examples is not None:
                rows = self._count_examples(rows, shapes_of(chunk.step_args))
            chunk.program.mark_called(rows)
        self._watch.reassign(STARTING, self._watch.clock() - began)
        if is_first:
            self._warn_of_unfrozen(chunk)
            if self._latest is None:
                warn_of_redundant_rows(chunk, result[0])
            for after_chunk in self._after_first:
                after_chunk(chunk, result[0])

    def _warn_of_unfrozen(self, chunk: Chunk) -> None:
        stage = chunk.program.stage
        trained = known_updates(stage.step)
        # A run that resumes within a stage has trained its leaves before.
        if trained is None or chunk.first != stage.first:
            return
        earlier = [known_updates(other.step) for other in self.table.stages if other.first < stage.first]
        warn_of_unfrozen(stage.name, stage.first, [found for found in earlier if found is not None], trained)

    @property
    def constants(self) -> Constants:
        return NO_CONSTANTS if self._latest is None else self._latest.constants


_UNMARKED = contextlib.nullcontext()
_is_traced = getattr(jax.profiler.StepTraceAnnotation, "is_enabled", lambda: True)
"""Whether a trace of the profiler is on, which costs less than an annotation."""


# `steps_per_call="auto"`: the maximum number of steps of a call is chosen from the times of the first calls.

MAX_CALL_SECS, MAX_STEPS_PER_CALL = 5e-3, 64
"""The maximum duration of a call in seconds, and its maximum number of steps."""
_UNTIMED, _TIMED = 2, 5
"""The number of calls for compilation and warm-up, and of timed calls."""


def choose_max_steps(seconds: float) -> int:
    return int(min(MAX_STEPS_PER_CALL, 2 ** max(0, math.floor(math.log2(MAX_CALL_SECS / seconds)))))


class AutoSteps:
    """Times the first calls of a run, waiting for the device, then switches to longer ones.

    All processes switch after the same call.
    """

    def __init__(self, table: ProgramTable, clock: Callable[[], float] = time.perf_counter) -> None:
        self._table = table
        self._clock = clock
        self._left = _UNTIMED + _TIMED
        self._seconds = math.inf

    @property
    def is_over(self) -> bool:
        return not self._left

    def timed(self, state: Tree, chunk: Chunk) -> Any:
        self._left -= 1
        is_timed = self._left < _TIMED
        if is_timed:
            jax.block_until_ready(state)
        began = self._clock()
        result = chunk.program.run(state, chunk, self._table.sums)
        if is_timed:
            jax.block_until_ready(result[0])
            self._seconds = min(self._seconds, self._clock() - began)
        if self.is_over:
            self._choose(self._seconds)
        return result

    def _choose(self, seconds: float) -> None:
        is_alone = processes.is_single_process()
        if not is_alone:
            seconds = float(processes.max_over_processes(np.array([seconds], np.float32))[0])
        max_steps = choose_max_steps(seconds)
        steps = "1 step" if max_steps == 1 else f"up to {max_steps} steps"
        logger.info('steps_per_call="auto": %s per call (one step takes %.3g ms)', steps, 1e3 * seconds)
        lengthen = functools.partial(self._lengthen, max_steps)
        if max_steps > 1:
            in_background(lengthen, name="jstep-compile") if is_alone else lengthen()

    def _lengthen(self, max_steps: int) -> None:
        failed = False
        try:
            self._table.compile_with_max_steps(max_steps)
        except Exception as error:
            failed = True
            text = "the program of %d steps could not be compiled: %s: %s"
            logger.warning(text, max_steps, type(error).__name__, error)
        if not processes.any_process(failed):
            self._table.max_steps = max_steps


# Checks and warnings.


def warn_of_ended_rate(train_steps: TrainSteps, last_step: int | None, chunk: Chunk, state: Tree) -> None:
    """Warn if all learning rates of the last stage are 0 in the last two steps."""
    step = step_function(chunk.program.stage.step)
    first = chunk.program.stage.first
    if last_step is None or step is None or last_step - first < 4 or jax.process_index() != 0:
        return
    is_held = LEARNING_RATE in roles_in(state).arguments.values()
    if is_held or train_steps.value_at(last_step - 1) is not train_steps.value_at(first):
        return  # a held rate is not a schedule, or a later stage has another one
    optimizer: Any = step.optimizer
    scheduled = list[bool]()

    def largest(at: Any) -> Any:
        rates = [value for name, value in optimizer.hyperparameters(at).items() if is_learning_rate(name)]
        scheduled.extend(map(trees.is_traced, rates))
        return jnp.max(jnp.stack([jnp.max(jnp.abs(rate)) for rate in rates]))

    steps = np.asarray([1, last_step // 2, last_step - 2, last_step - 1], trees.default_int())
    try:
        traced = jax.jit(jax.vmap(largest)).trace(steps)
        with internal_transfers():
            *earlier, before, last = traced.lower().compile()(steps).tolist() if any(scheduled) else [0.0] * 4
    except Exception as error:  # a schedule that needs a concrete step, or a hyperparameter that is no number
        logger.debug("whether the learning rate is 0 in the end is not known: %s", error)
        return
    if before == last <= _ROUNDING * max(earlier) and max(earlier) > 0:
        logger.warning(
            "the learning rate is 0 in the last steps of the run, before step %d, so these do not train: its schedule "
            "ends before the run does; give it more steps, or end the run earlier (last_step)",
            last_step,
        )


def check_result(result: object) -> None:
    state, metrics = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    if not isinstance(state, TrainState) or not isinstance(metrics, Mapping):
        kinds = ", ".join(type(part).__name__ for part in result) if isinstance(result, tuple) else ""
        raise TypeError(
            "train_step must return (state, metrics), a TrainState and a mapping of names to values, got "
            f"{f'({kinds})' if kinds else describe_type(result)}"
            "; jstep.minimize(loss_fn, optimizer) makes such a step from a loss"
        )
    odd = next((name for name in metrics if not isinstance(name, str)), None)
    if odd is not None:
        raise TypeError(f"train_step: the name of a metric must be a string, got {format_value(odd)}")
    if isinstance(metrics.get(LOSS), MeanOf):
        raise TypeError("train_step: the metric 'loss' must be a number, got a mean_of; give that another name")


def warn_of_redundant_rows(chunk: Chunk, state: Tree) -> None:
    params = jax.tree.leaves(state.params)
    mesh = mesh_without_batch(params, chunk.step_args)
    if mesh is None or jax.process_index() != 0:
        return
    if not all(isinstance(leaf, jax.Array) and leaf.is_fully_replicated for leaf in params):
        return
    traced = chunk.trace(state)
    if traced is None or shards_arrays(traced.jaxpr):
        return
    logger.warning(
        "batches are not sharded and parameters are replicated, so each of the %d devices computes all rows of every "
        "batch; give train batch_sharding=%r, or place the batches on the mesh",
        mesh.size,
        mesh.axis_names[0],
    )
