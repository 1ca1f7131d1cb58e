"""The calls of a run: their steps under "auto", and the checks and warnings of the first one."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jstep.compiling.chunks import Chunk
from jstep.compiling.compiler import Compiler
from jstep.compiling.programs import Program, ProgramTable, shapes_of
from jstep.core import processes
from jstep.core.agreed_shapes import AgreedShapes
from jstep.core.checks import describe_type, format_value
from jstep.core.jaxprs import shards_arrays
from jstep.core.logs import logger
from jstep.core.signals import StopSignals
from jstep.core.stopwatch import STARTING, Stopwatch
from jstep.core.threads import run_in_background
from jstep.core.trees import Tree
from jstep.data.batch_placement import mesh_without_batch
from jstep.metering.metric_sums import NO_CONSTANTS
from jstep.metrics.totals import MeanOf
from jstep.state.train_state import TrainState
from jstep.training.metrics import LOSS, Constants
from jstep.training.watched_updates import known_updates, warn_of_unfrozen

ChunkListener = Callable[[Chunk, Any], None]
"""`listener(chunk, state)` is called after the call of a chunk, with the state that it returned."""
CountExamples = Callable[[int | None, tuple[Any, ...]], int | None]
"""`count_examples(rows, shapes)`: the number of examples in a batch of these shapes, whose leading
axis is `rows`."""


class Dispatch:
    """The calls of a run: `state, metrics = dispatch(state, chunk)`.

    It waits for the device only to time "auto".

    Args:
        first_call: A context for the first call of the run.
        stage_listeners: Called after the first call of each stage.
        count_examples: How to count the examples of a batch; None if each row is one.

    Attributes:
        call_listeners: Called after each call.
        due_listeners: The listeners of the latest call. The run calls them once it has the new
            state: an error of a listener must not lose it, as the one before was donated.
    """

    def __init__(
        self,
        table: ProgramTable,
        *,
        signals: StopSignals | None = None,
        first_call: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        watch: Stopwatch | None = None,
        stage_listeners: Sequence[ChunkListener] = (),
        count_examples: CountExamples | None = None,
    ) -> None:
        self.table = table
        self._first_call = first_call
        self._stage_listeners = stage_listeners
        self._count_examples = count_examples
        self._watch = Stopwatch() if watch is None else watch
        self.compiler = Compiler(table, StopSignals() if signals is None else signals, self._watch)
        self.call_listeners: Sequence[ChunkListener] = ()
        self.due_listeners: Sequence[ChunkListener] = ()
        self._auto = AutoSteps(table) if table.is_auto else None
        self._latest: Program | None = None
        # With `on_device`, some step is not compiled. It may make arrays of equal shapes from
        # batches of different ones. So processes may rightly pass it batches of different shapes,
        # and these are not compared.
        self._agreed: AgreedShapes | None = None
        if not processes.is_single_process() and not table.on_device:
            self._agreed = AgreedShapes()

    def compile_for(self, state: Tree, chunk: Chunk) -> None:
        """Compile what a call needs; no signal is obeyed between this and the call."""
        self.compiler.wait(chunk.first, can_interrupt=chunk.can_interrupt)
        if not chunk.program.is_called:
            with self._watch.phase(STARTING), self._context_of_call():
                self.compiler.compile_due(state, chunk)

    def __call__(self, state: Tree, chunk: Chunk) -> Any:
        program = chunk.program
        counts = self.compiler.counts
        programs_before = counts.programs
        if self._agreed is not None:
            # The program stands for the shapes of the batch: it was found by them, and is compared
            # by identity.
            self._agreed.check(state, chunk.args, program)
        if not program.is_settled:
            self.compile_for(state, chunk)
        began = self._watch.clock()
        if program.is_settled and not is_profiling():  # without contexts, which take a microsecond
            result = program.run(state, chunk, self.table.sums)
        else:
            result = self._run_in_contexts(state, chunk, began)
        self.due_listeners = self.call_listeners
        # A program that was called before is compiled again for another state.
        has_compiled = not program.is_called or counts.programs != programs_before
        if has_compiled:
            self._note_compiled(state, chunk, result, began)
        self._latest = program
        if not program.is_settled:
            self._settle(chunk)
        return result

    def _settle(self, chunk: Chunk) -> None:
        """After a call of a program: begin the next compilation, or mark the program as settled.

        A run plans its compilations before the first call, so none follows once they are done.
        """
        compiler = self.compiler
        if compiler.jobs:
            compiler.begin_next(chunk.step_args)
        is_compiling = bool(compiler.jobs or compiler.begun)
        is_timed = self._auto is not None and chunk.program.is_looped
        chunk.program.is_settled = not is_compiling and not is_timed

    # The listeners are replaced, not changed in place: the run may be calling them.

    def add_listener(self, listener: ChunkListener) -> None:
        self.call_listeners = (*self.call_listeners, listener)

    def remove_listener(self, listener: ChunkListener) -> None:
        self.call_listeners = tuple(other for other in self.call_listeners if other != listener)

    def _context_of_call(self) -> contextlib.AbstractContextManager[Any]:
        return self._first_call() if self._latest is None else _NO_CONTEXT

    def _run_in_contexts(self, state: Tree, chunk: Chunk, began: float) -> Any:
        """Run a chunk whose program is new, whose time counts, or that is being profiled."""
        program = chunk.program
        annotation: contextlib.AbstractContextManager[Any] = _NO_CONTEXT
        if is_profiling():
            annotation = jax.profiler.StepTraceAnnotation("train", step_num=chunk.first)
        watching: contextlib.AbstractContextManager[Any] = _NO_CONTEXT
        if not program.is_called:
            watching = program.stage.watching()
        try:
            with self._context_of_call(), annotation, watching:
                if self._auto is None or not program.is_looped:
                    return program.run(state, chunk, self.table.sums)
                result = self._auto.run_timed(state, chunk)
        except BaseException:
            if not program.is_called:  # perhaps it cannot be compiled
                self._watch.reassign(STARTING, self._watch.clock() - began)
            raise
        if self._auto.is_over:
            self._auto = None
        return result

    def _note_compiled(self, state: Tree, chunk: Chunk, result: Any, began: float) -> None:
        """Count the time of a call that compiled as `starting`; check a stage's first result."""
        program = chunk.program
        is_first_of_stage = program.stage.begin()
        self.compiler.log_if_recompiled(state, chunk, is_first_of_stage=is_first_of_stage)
        if is_first_of_stage:
            check_result(result)
        if not program.is_called:
            rows = chunk.rows()
            if self._count_examples is not None:
                rows = self._count_examples(rows, shapes_of(chunk.step_args))
            program.mark_called(rows)
        self._watch.reassign(STARTING, self._watch.clock() - began)
        if not is_first_of_stage:
            return
        self._warn_of_unfrozen(chunk)
        if self._latest is None:
            warn_of_redundant_rows(chunk, result[0])
        self.due_listeners = (*self._stage_listeners, *self.call_listeners)

    def _warn_of_unfrozen(self, chunk: Chunk) -> None:
        stage = chunk.program.stage
        trained = known_updates(stage.step)
        # A run that resumes within a stage has trained its leaves before.
        if trained is None or chunk.first != stage.first:
            return
        earlier = []
        for other in self.table.stages:
            updates = known_updates(other.step)
            if other.first < stage.first and updates is not None:
                earlier.append(updates)
        warn_of_unfrozen(stage.name, stage.first, earlier, trained)

    @property
    def constants(self) -> Constants:
        return NO_CONSTANTS if self._latest is None else self._latest.constants


_NO_CONTEXT = contextlib.nullcontext()
is_profiling = getattr(jax.profiler.StepTraceAnnotation, "is_enabled", lambda: True)
"""Whether a trace of the profiler is on, which costs less than an annotation."""


# `steps_per_call="auto"`: the maximum number of steps of a call is chosen from the times and the
# lengths of calls.

MAX_CALL_SECS = 5e-3
"""The maximum duration of a call, in seconds."""
MAX_STEPS_PER_CALL = 64
_UNTIMED_CALLS = 2
"""The number of calls for compilation and warm-up, before those that are timed."""
_TIMED_CALLS = 5


def choose_max_steps(seconds: float) -> int:
    """Return how many steps of this duration a call may have: a power of 2, at least 1."""
    exponent = max(0, math.floor(math.log2(MAX_CALL_SECS / seconds)))
    return int(min(MAX_STEPS_PER_CALL, 2**exponent))


class AutoSteps:
    """Times the first calls of a run, then switches to longer ones, and times these as well.

    It waits for the device to time calls. A call of one quick step takes many times as long as the
    step, because it is dispatched and waited for. So the time of a step is measured again in the
    longer calls, until these need not be any longer. Calls that hooks end early are padded to the
    maximum, so the maximum is lowered if no call was longer than half of it. All processes switch
    after the same call.

    Attributes:
        is_over: Whether no more calls are timed.
    """

    def __init__(self, table: ProgramTable, clock: Callable[[], float] = time.perf_counter) -> None:
        self.is_over = False
        self._table = table
        self._clock = clock
        # The latest choice; `table.max_steps` becomes it once its programs are compiled.
        self._max_steps = table.max_steps
        self._calls_left = _UNTIMED_CALLS + _TIMED_CALLS
        self._seconds = math.inf  # of a step, in the shortest call so far
        self._longest = 1  # steps of a call, since the last choice

    def run_timed(self, state: Tree, chunk: Chunk) -> Any:
        if self._table.max_steps != self._max_steps:  # the chosen program is being compiled
            return chunk.program.run(state, chunk, self._table.sums)
        self._calls_left -= 1
        is_timed = self._calls_left < _TIMED_CALLS
        if is_timed:
            jax.block_until_ready(state)
        began = self._clock()
        result = chunk.program.run(state, chunk, self._table.sums)
        if is_timed:
            jax.block_until_ready(result[0])
            self._seconds = min(self._seconds, (self._clock() - began) / chunk.steps)
            self._longest = max(self._longest, chunk.steps)
        if not self._calls_left:
            self._choose(self._seconds)
        return result

    def _choose(self, seconds: float) -> None:
        if not processes.is_single_process():
            seconds = float(processes.max_over_processes(np.array([seconds], np.float32))[0])
        before = self._max_steps or 1
        max_steps = choose_max_steps(seconds)
        if self._longest <= before // 2:
            # The least power of 2 that holds the longest call is less than `before`.
            max_steps = 2 ** math.ceil(math.log2(self._longest))
            text = (
                'steps_per_call="auto": %s per call, as none had more than %d '
                "(one step takes %.3g ms)"
            )
            logger.info(text, _steps_text(max_steps), self._longest, 1e3 * seconds)
            self._begin_switch(max_steps, is_last=True)
        elif max_steps <= before:
            text = 'steps_per_call="auto": %s per call (one step takes %.3g ms)'
            logger.info(text, _steps_text(before), 1e3 * seconds)
            self.is_over = True
        else:
            self._begin_switch(max_steps, is_last=False)

    def _begin_switch(self, max_steps: int, *, is_last: bool) -> None:
        self._max_steps = None if max_steps == 1 else max_steps
        self._calls_left = _UNTIMED_CALLS + _TIMED_CALLS
        self._longest = 1
        switch = functools.partial(self._switch, self._max_steps, is_last=is_last)
        if processes.is_single_process():
            run_in_background(switch, name="jstep-compile")
        else:
            switch()  # not in a thread, because it calls a collective

    def _switch(self, max_steps: int | None, *, is_last: bool) -> None:
        has_failed = False
        try:
            self._table.compile_with_max_steps(max_steps)
        except Exception as error:
            has_failed = True
            text = "the program of %s could not be compiled: %s: %s"
            logger.warning(text, _steps_text(max_steps), type(error).__name__, error)
        if processes.any_process(has_failed):
            self.is_over = True
            return
        self._table.max_steps = max_steps
        self.is_over = is_last


def _steps_text(max_steps: int | None) -> str:
    return f"up to {max_steps} steps" if (max_steps or 1) > 1 else "1 step"


# Checks and warnings.


def check_result(result: object) -> None:
    state: Any = None
    metrics: Any = None
    if isinstance(result, tuple) and len(result) == 2:
        state, metrics = result
    if not isinstance(state, TrainState) or not isinstance(metrics, Mapping):
        returned = describe_type(result)
        if isinstance(result, tuple) and result:
            kinds = ", ".join(type(part).__name__ for part in result)
            returned = f"({kinds})"
        raise TypeError(
            "train_step must return (state, metrics), a TrainState and a mapping "
            f"of names to values, got {returned}; jstep.minimize(loss_fn, "
            "optimizer) makes such a step from a loss"
        )
    for name in metrics:
        if not isinstance(name, str):
            raise TypeError(
                f"train_step: the name of a metric must be a string, got {format_value(name)}"
            )
    if isinstance(metrics.get(LOSS), MeanOf):
        raise TypeError(
            "train_step: the metric 'loss' must be a number, got a mean_of; give that another name"
        )


def warn_of_redundant_rows(chunk: Chunk, state: Tree) -> None:
    params = jax.tree.leaves(state.params)
    mesh = mesh_without_batch(params, chunk.step_args)
    if mesh is None or not processes.is_process_0():
        return
    if not all(isinstance(leaf, jax.Array) and leaf.is_fully_replicated for leaf in params):
        return
    traced = chunk.trace(state)
    if traced is None or shards_arrays(traced.jaxpr):
        return
    logger.warning(
        "batches are not sharded and parameters are replicated, so each of the %d devices computes "
        "all rows of every batch; give train batch_sharding=%r, or place the batches on the mesh",
        mesh.size,
        mesh.axis_names[0],
    )
