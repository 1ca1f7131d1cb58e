"""When programs are compiled: in the background before they are due, or at their first call.

A compilation cannot be interrupted, so each runs in a thread of its own, for which the loop waits.
"""

import contextlib
import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jstep.compiling.chunks import Chunk, ProgramChanges
from jstep.compiling.programs import Program, ProgramTable, shapes_of
from jstep.compiling.stages import Stage
from jstep.compiling.start_times import CompileCounts, StartTimes, thread_counts
from jstep.core import trees
from jstep.core.exceptions import forget_frames, note
from jstep.core.jaxprs import body_of, copied_inputs
from jstep.core.logs import logger
from jstep.core.signals import StopSignals
from jstep.core.stopwatch import STARTING, Stopwatch
from jstep.core.threads import MAKING, Task, doing, run_in_background
from jstep.core.trees import Optimizer, Tree
from jstep.data.batch_placement import as_shardings, copy_batch, make_placer
from jstep.data.batch_sources import BatchSource
from jstep.slots.matching import describe_difference
from jstep.state.train_state import TrainState
from jstep.training.apply_gradients import check_fits
from jstep.training.explain import explain
from jstep.training.step import TrainStep, step_function

_MAX_AHEAD = 2
"""The maximum number of programs compiled ahead; each takes device memory."""
_MANY_PROGRAMS = 5
"""The number of programs of a stage, each for another shape of the batch, after which padding is
recommended."""
_HINT = "; if it is the smaller last batch of an epoch, drop_remainder=True leaves it out"


class CompileJob(NamedTuple):
    """A program to be compiled.

    Attributes:
        first: The first step that needs it.
        make: Compiles it for the arguments of one step, of which only the shapes matter. For the
            first program it ignores them, and waits for the shapes of the first batch.
        args: The shapes to call `make` with; None for those of the latest chunk when the
            compilation begins.
        is_quiet: Whether nothing is logged about it.
    """

    first: int
    name: str
    make: Callable[[tuple[Any, ...]], None]
    args: tuple[Any, ...] | None = None
    is_quiet: bool = False


class BegunJob(NamedTuple):
    """A job whose compilation is in progress, or has ended."""

    job: CompileJob
    task: Task[None]


class _Shapes(NamedTuple):
    """The shapes that a program was compiled for."""

    batch: Tree
    state: Tree


Peek = Callable[[Callable[[], bool]], Any]
"""`peek(is_over)` waits for the first batch, or its shapes; it returns None if there is none, or
once `is_over()`."""


class Compiler:
    """Compiles a run's programs: in background threads, one at a time, and at their first calls.

    Errors in the background are only logged: the step that needs the program raises them.

    Attributes:
        counts: The compilations that the loop's thread has waited for.
        jobs: The programs to be compiled ahead, in the order of their steps.
        begun: The jobs in progress or done whose programs no call has needed yet.
        closed: Set once the run closes, so that no thread waits for the shapes of a batch.
    """

    def __init__(self, table: ProgramTable, signals: StopSignals, watch: Stopwatch) -> None:
        self.table = table
        self._signals = signals
        self._watch = watch
        self.counts = thread_counts()
        self.jobs: deque[CompileJob] = deque()
        self.begun: deque[BegunJob] = deque()
        self.closed = threading.Event()
        # The id of a compiled function → the number of its programs.
        self._num_programs: dict[int, int] = {}
        # The program that was compiled last because it was due.
        self._latest_due: Program | None = None
        self._shapes: _Shapes | None = None  # of the latest compilation
        # The id of a stage → how often it was compiled because its batch had another shape.
        self._recompilations = Counter[int]()

    # In the background.

    def begin_first(
        self, first: int, batch_sharding: object, times: StartTimes, peek: Peek
    ) -> None:
        """Begin to compile the first program, once `peek` knows its shapes."""
        stage = self.table.stage_of(first)

        # The shapes that the job is given are ignored: they are known only once `peek` returns.
        def make(_: tuple[Any, ...]) -> None:
            batch = peek(self.closed.is_set)
            if batch is None:
                return
            args = _shapes_as_args(batch, batch_sharding)
            del batch  # so that only the loop holds it
            with times.compiling():
                self.table.compile(first, args)

        if stage.is_compilable:
            self._begin(CompileJob(first, stage.name, make, is_quiet=True))

    def plan(self, source: BatchSource, first: int, last_step: int, batch_sharding: object) -> None:
        """Queue the compilations of later programs, and check the stages.

        The stages are checked with their batches if these are known now. `begin_next` begins the
        compilations, one at a time.
        """
        table = self.table
        steps = list(
            ProgramChanges(table.train_steps, source.next_change).start_steps(first, last_step)
        )
        for step in steps:
            _check_increments(table.stage_of(step), has_several=len(table.stages) > 1)
        if len(steps) == 1:
            return
        # The optimizers that are known to fit. That of the first stage is checked by its call,
        # which follows.
        fitting = [_optimizer_of(table.stage_of(first))]
        seen: set[Any] = set()
        for step in steps:
            stage = table.stage_of(step)
            is_first = step == first
            begins_stage = step == stage.first
            optimizer = _optimizer_of(stage)
            args = None
            # If the source does not know its shapes, `item` may have to make the batch. That is
            # worth it only for a later stage.
            has_shapes = source.knows_shapes or (source.has_items and begins_stage and not is_first)
            if has_shapes and stage.is_compilable:
                args = shapes_of_batch(source, step, batch_sharding)
                if args is None:  # the batches end earlier
                    break
                key = (stage, trees.structure(args), tuple(jax.tree.leaves(args)))
                if key in seen:
                    continue
                seen.add(key)
            if is_first:
                continue  # its program is compiled in any case: here only its shapes are noted
            if optimizer is not None and all(optimizer is not other for other in fitting):
                _check_optimizer(optimizer, table.state_shapes, step)
                fitting.append(optimizer)
            if args is not None:
                _check_stage(stage, table.state_shapes, args, step)
            # Without shapes of its own, a new stage is compiled for those of the latest chunk.
            if stage.is_compilable and (begins_stage or args is not None):
                self.jobs.append(
                    CompileJob(step, stage.name, functools.partial(table.compile, step), args)
                )

    def _begin(self, job: CompileJob, args: tuple[Any, ...] = ()) -> None:
        task = functools.partial(_compile_job, job, args)
        self.begun.append(BegunJob(job, run_in_background(task, name="jstep-compile")))

    def begin_next(self, args: tuple[Any, ...]) -> None:
        """Begin the next compilation, for the shapes of `args` if the job has none of its own."""
        if not self.jobs or len(self.begun) == _MAX_AHEAD:
            return
        if self.begun and not self.begun[-1].task.done():  # one at a time
            return
        job = self.jobs.popleft()
        self._begin(job, shapes_of(args) if job.args is None else job.args)

    def wait(self, step: int, *, can_interrupt: bool) -> None:
        """Wait for the programs in progress that this step needs; drop its jobs not yet begun."""
        while self.begun:
            job, task = self.begun[0]
            if step < job.first:
                break
            with self._watch.phase(STARTING), self.table.compiling(job.name):
                self._signals.wait_for(task, can_interrupt=can_interrupt)
            # Only now: if a signal ends the wait, `close` still finds the job.
            self.begun.popleft()
        while self.jobs and step >= self.jobs[0].first:
            self.jobs.popleft()  # the step compiles it

    def close(self) -> None:
        """Begin no further compilations; those in progress continue."""
        self.jobs.clear()
        self.closed.set()
        for _, task in self.begun:
            _warn_if_running(task)

    # At the first call.

    def compile_due(self, state: Tree, chunk: Chunk) -> None:
        """Compile a chunk's program in another thread, so that a signal may end the wait."""
        program = chunk.program
        stage = program.stage
        if program is self._latest_due:
            return  # it was compiled before the hooks of the call (`HookRunner.make_run_chunk`)
        self._latest_due = program
        can_interrupt = chunk.can_interrupt
        self._log_compilation(chunk)
        if program.has_failed or not stage.is_compilable or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return
        interruptible: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if can_interrupt:
            interruptible = self._signals.allow_interrupts()
        with self.table.compiling(stage.name):
            try:
                with interruptible:
                    lowered = program.lower(state, chunk.args, self.table.sums)
            except Exception as error:
                forget_frames(error)
                return  # the call raises it again, and explains it
            try:
                compile_apart(lowered, self._signals, can_interrupt=can_interrupt)
            except Exception as error:
                if isinstance(program.step, TrainStep):
                    explain(error, state, chunk.args, donates=program.step.donate)
                raise

    def _log_compilation(self, chunk: Chunk) -> None:
        """Log which of several programs is compiled now, unless it was compiled before."""
        program = chunk.program
        stage = program.stage
        has_several = self.table.is_looped or len(self.table.stages) > 1
        if not has_several or stage.is_begun or stage.is_compiled_ahead:
            return
        if _count_programs(program.step) == 0:
            logger.info("compiling %s for %s", stage.name, _steps(chunk))

    def log_if_recompiled(self, state: Tree, chunk: Chunk, *, is_first_of_stage: bool) -> None:
        """If a call has compiled its program, and not for the first time, log why."""
        program = chunk.program
        stage = program.stage
        num_programs = _count_programs(program.step)
        if num_programs is None:
            num_programs = self.counts.programs
        has_grown = num_programs > self._num_programs.get(id(program.step), 0)
        self._num_programs[id(program.step)] = num_programs
        if not has_grown:
            return
        previous = self._shapes
        self._shapes = _Shapes(
            batch=shapes_of(trees.args_to_batch(chunk.step_args)), state=shapes_of(state)
        )
        was_ready = program.is_compiled_ahead and not program.is_called
        is_expected = is_first_of_stage or was_ready
        if previous is not None and stage.is_compilable and not is_expected:
            self._log_recompilation(chunk, previous, self._shapes)

    def _log_recompilation(self, chunk: Chunk, old: _Shapes, new: _Shapes) -> None:
        stage = chunk.program.stage
        batch_difference = _recompilation_cause("batch", old.batch, new.batch)
        state_difference = _recompilation_cause("state", old.state, new.state)
        differences = [text for text in (batch_difference, state_difference) if text]
        why = "; ".join(differences) or "JAX's settings, or its steps per call, differ"
        logger.info("compiled %s again for %s: %s", stage.name, _steps(chunk), why)
        if batch_difference:
            self._warn_of_shapes(stage)

    def _warn_of_shapes(self, stage: Stage) -> None:
        self._recompilations[id(stage)] += 1
        if self._recompilations[id(stage)] == _MANY_PROGRAMS - 1:
            # The first compilation was not counted.
            logger.warning(
                "%s was compiled %d times, for batches of as many shapes, and "
                "waits for the compiler at each new one: pad batches to a few "
                "shapes, see docs: recipes/batch-shapes",
                stage.name,
                _MANY_PROGRAMS,
            )


def _count_programs(step: Any) -> int | None:
    """Return how many programs JAX has for a compiled function; None if that is unknown.

    `_cache_size` of a function of `jax.jit` is private, an exception to our rule; only log lines
    depend on it. The public `jax.monitoring` counts all that a thread compiles, including the
    programs that sum metrics and those of hooks. Without `_cache_size`, its counts are used.
    """
    cache_size = getattr(step, "_cache_size", None)
    return None if cache_size is None else int(cache_size())


def _recompilation_cause(name: str, old: Tree, new: Tree) -> str:
    """Describe how two trees of shapes differ, so that JAX recompiles; "" if they are alike."""
    different = describe_difference(new, old)
    if different:
        return f"its {name} is now one {different}"
    if trees.structure(new) != trees.structure(old):
        return f"its {name} is now one in other containers"
    pairs = zip(trees.leaves_with_paths(new), jax.tree.leaves(old), strict=True)
    for (path, new_leaf), old_leaf in pairs:
        new_place = _placement(new_leaf)
        old_place = _placement(old_leaf)
        if new_place != old_place:
            return (
                f"the placement of its {name} differs ({path or 'the array'}: {old_place} "
                f"before, {new_place} now)"
            )
    return ""


def _placement(leaf: Any) -> str:
    place = str(getattr(leaf, "sharding", None) or "anywhere")
    if getattr(leaf, "weak_type", False):
        return f"{place}, of weak type"
    return place


def _steps(chunk: Chunk) -> str:
    return "1 step" if chunk.program.max_steps == 1 else f"1 to {chunk.program.max_steps} steps"


def _compile_job(job: CompileJob, args: tuple[Any, ...]) -> None:
    began = time.perf_counter()
    try:
        with doing(MAKING):
            job.make(args)
    except Exception as error:
        forget_frames(error)
        if not job.is_quiet:
            text = "%s, which step %d needs, could not be compiled ahead: %s: %s"
            logger.warning(text, job.name, job.first, type(error).__name__, error)
    else:
        if not job.is_quiet:
            text = "compiled %s ahead of step %d, in the background, in %.1f s"
            logger.info(text, job.name, job.first, time.perf_counter() - began)


def compile_apart(lowered: Any, signals: StopSignals, *, can_interrupt: bool) -> None:
    """Compile in another thread, but count the compilation for this one."""

    def compiled() -> CompileCounts:
        lowered.compile()
        return thread_counts()

    task = run_in_background(compiled, name="jstep-compile-due")
    try:
        signals.wait_for(task, can_interrupt=can_interrupt)
    except BaseException:
        _warn_if_running(task)
        raise
    thread_counts().add(task.result())


def _warn_if_running(task: Task[Any]) -> None:
    if not task.done():
        logger.warning(
            "a compilation in the background cannot be stopped: the process ends when "
            "it has finished"
        )


def shapes_of_batch(
    source: BatchSource, step: int, batch_sharding: object
) -> tuple[Any, ...] | None:
    try:
        batch = copy_batch(source.item(step), fresh=True)
    except IndexError:
        return None
    try:
        return _shapes_as_args(batch, batch_sharding)
    except ValueError as error:
        note(error, f"This is batch {step}, whose shapes are checked before the first step{_HINT}.")
        raise


def _shapes_as_args(batch: Tree, batch_sharding: object) -> tuple[Any, ...]:
    if batch_sharding is not None:
        batch = make_placer(as_shardings(batch_sharding))(batch)
    return shapes_of(trees.batch_to_args(batch))


# What is checked of a stage before the first step.


def _optimizer_of(stage: Stage) -> Optimizer | None:
    """Return the optimizer of a step of `minimize`; None for any other step."""
    step = step_function(stage.step)
    return None if step is None else step.optimizer


def _check_increments(stage: Stage, *, has_several: bool) -> None:
    """Reject a stage that is known, before it is traced, not to increment the global step."""
    function = step_function(stage.step)
    if function is not None and function.increments is False:
        name = f"train_step[{stage.first}]" if has_several else "train_step"
        raise ValueError(f"{name}: {function.title} {_NO_INCREMENT}")


_NO_INCREMENT = (
    "does not increment global_step, which each step of a run must do once; pass "
    "increment_global_step=False only to updates inside a step of your own, and end it with "
    "state = jstep.increment_global_step(state)"
)


def _check_optimizer(optimizer: Optimizer, state: Tree, step: int) -> None:
    """Check that the state has the slots of an optimizer, which needs no batch."""
    try:
        check_fits(optimizer, state)
    except (TypeError, ValueError) as error:
        text = _describe_misfit(f"train_step[{step}]", step, _FIRST_OF_STAGE, error)
        raise ValueError(f"{text}; another optimizer needs its slots: {_NEW_OPTIMIZER}") from error


_FIRST_OF_STAGE = "the first of its stage"
_NEW_OPTIMIZER = "see docs: recipes/stages#a-new-optimizer-at-a-stage"


def _describe_misfit(name: str, step: int, which: str, error: Exception) -> str:
    return f"{name}: it cannot take step {step}, {which}: {type(error).__name__}: {error}"


def _check_stage(stage: Stage, state: Tree, args: tuple[Any, ...], step: int) -> None:
    """Check that a stage takes a step's batch and returns the next state, of the same structure."""
    if step == stage.first:
        name = f"train_step[{step}]"
        which = _FIRST_OF_STAGE
        hint = ""
    else:
        name = "train_step"
        which = "whose batch has other shapes than the one before"
        hint = _HINT
    try:
        traced = stage.trace(state, args)
        new = traced.out_info[0]
    except Exception as error:
        raise ValueError(f"{_describe_misfit(name, step, which, error)}{hint}") from error
    different = describe_difference(new, state)
    if different:
        raise ValueError(
            f"{name}: all train steps of a run share one structure of the state, but this one "
            f"returns a state {different}; freeze parameters with var_list, and give all stages "
            "optimizers with the same slots"
        )
    # For a step of `minimize`, `_check_increments` knows this without a trace.
    if step_function(stage.step) is None and _keeps_step(traced, state, args):
        raise ValueError(f"{name}: {stage.name} {_NO_INCREMENT}")


def _keeps_step(traced: Any, state: Tree, args: tuple[Any, ...]) -> bool:
    """Whether a traced step is known to return the global step that it gets.

    Each input leaf is labelled with its index, and each output leaf with the index of the input
    that it copies, or -1.
    """
    treedef = trees.structure((state, args))
    given, _ = treedef.unflatten(range(treedef.num_leaves))
    copied = copied_inputs(body_of(traced.jaxpr))
    labels = [-1 if i is None else i for i in copied]
    returned, *_ = trees.structure(traced.out_info).unflatten(labels)
    if not isinstance(given, TrainState) or not isinstance(returned, TrainState):
        return False
    return bool(returned.global_step == given.global_step)
