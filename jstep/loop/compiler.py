"""Compilation in background threads, the record of what each thread compiled, and the times of a start."""

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core import stopwatch
from jstep.core.annotations import Tree
from jstep.core.exceptions import context_manager, forget_frames
from jstep.core.meshes import dims_of
from jstep.core.threads import MAKING, doing, in_background
from jstep.core.trees import shape_of
from jstep.loop.calls import Call
from jstep.loop.signals import StopSignals
from jstep.loop.stages import Stage

_logger = logging.getLogger("jstep")

# Background compilation: programs of later stages, ahead of time; and the one needed now, so that the wait can be
# interrupted.

_MAX_AHEAD = 2
"""The maximum number of programs compiled ahead; each takes device memory."""


Compiling = Callable[[str], contextlib.AbstractContextManager[object]]
"""`compiling(name)`: a context for the time in which the loop waits for the program of that name."""


class CompileJob(NamedTuple):
    """A program to be compiled by `make(args)`.

    Attributes:
        args: The shapes for one step; None for the latest call's.
    """

    first: int
    name: str
    make: Callable[[tuple[Any, ...]], None]
    args: tuple[Any, ...] | None = None
    is_quiet: bool = False


class BackgroundCompiler:
    """Compiler of programs in background threads, one at a time; the loop waits if a due program is not ready.

    Errors are logged only, because the step that needs the program raises them. A compilation cannot be cancelled: the
    process waits for it before it exits.
    """

    def __init__(self, signals: StopSignals) -> None:
        self._signals = signals
        self.jobs: deque[CompileJob] = deque()  # in the order of their steps
        self.begun: deque[tuple[CompileJob, Future[None]]] = deque()  # not needed by a call yet
        self.closed = threading.Event()

    def before(self, step: int, compiling: Compiling, *, may_leave: bool) -> None:
        """Wait for the programs that are due at this step, unless the run stops and may leave the call."""
        while self.begun and step >= self.begun[0][0].first:
            with compiling(self.begun[0][0].name):
                self._signals.wait_for(self.begun[0][1], may_leave=may_leave)
            self.begun.popleft()
        while self.jobs and step >= self.jobs[0].first:
            self.jobs.popleft()  # not begun: the step compiles it

    def after(self, args: tuple[Any, ...]) -> None:
        """Begin the next compilation, after a step with these arguments."""
        if not self.jobs or len(self.begun) == _MAX_AHEAD or (self.begun and not self.begun[-1][1].done()):
            return
        job = self.jobs.popleft()
        self.begin(job, shapes_of(args) if job.args is None else job.args)

    def begin(self, job: CompileJob, args: tuple[Any, ...] = ()) -> None:
        task = functools.partial(self.compile_job, job, args)
        self.begun.append((job, in_background(task, name="jstep-compile")))

    def compile_job(self, job: CompileJob, args: tuple[Any, ...]) -> None:
        then = time.perf_counter()
        try:
            with doing(MAKING):
                job.make(args)
        except Exception as error:
            forget_frames(error)
            if not job.is_quiet:
                text = "%s, which step %d needs, could not be compiled ahead: %s: %s"
                _logger.warning(text, job.name, job.first, type(error).__name__, error)
        else:
            if not job.is_quiet:
                text = "compiled %s ahead of step %d, in the background, in %.1f s"
                _logger.info(text, job.name, job.first, time.perf_counter() - then)

    def close(self) -> None:
        """Begin no further compilations; those in progress go on."""
        self.jobs.clear()
        self.closed.set()
        for _, future in self.begun:
            _say_at_end(future)


def compile_apart(lowered: Any, signals: StopSignals, *, may_leave: bool) -> None:
    """Compile in another thread, but count it for this one: the wait can be interrupted, XLA cannot."""

    def compiled() -> Compiled:
        lowered.compile()
        return thread_record()

    future = in_background(compiled, name="jstep-compile-due")
    try:
        signals.wait_for(future, may_leave=may_leave)
    except BaseException:
        _say_at_end(future)
        raise
    thread_record().add(future.result())


def _say_at_end(future: "Future[Any]") -> None:
    if not future.done():
        _logger.warning("a compilation in the background cannot be stopped: the process ends when it has finished")


def shapes_of(tree: Tree) -> Any:
    """Return shapes, for which JAX finds the same program as for the arrays."""
    return jax.tree.map(_shape, tree)


def _shape(leaf: object) -> Any:
    if isinstance(leaf, jax.Array):
        # Uncommitted arrays are compiled for like NumPy arrays, without a sharding.
        return shape_of(leaf, leaf.sharding if leaf.committed else None, weak=True)
    return shape_of(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf


def type_text(leaf: object) -> str:
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(getattr(leaf, 'shape', ()))}"


def stack_shapes(tree: Tree, steps: int) -> Any:
    def leaf(shape: Any) -> Any:
        if not isinstance(shape, jax.ShapeDtypeStruct):
            return _shape(np.stack([shape] * steps))
        sharding = shape.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *dims_of(sharding.spec)))
        return jax.ShapeDtypeStruct((steps, *shape.shape), shape.dtype, sharding=sharding)

    return jax.tree.map(leaf, tree)


# Counts, by thread, of compiled programs, of cache hits, and of the seconds spent compiling.


@dataclasses.dataclass(slots=True)
class Compiled:
    """The compilations of a thread so far.

    Attributes:
        programs: The number compiled or found in the persistent cache.
        unfinished: The time at which it last traced or lowered a program that is not compiled yet; 0 if there is none.
        spans: The time spans that add up to `seconds`.
    """

    programs: int = 0
    hits: int = 0
    seconds: float = 0.0
    unfinished: float = 0.0
    spans: deque[tuple[float, float]] = dataclasses.field(default_factory=lambda: deque(maxlen=1000))

    def add_span(self, duration_secs: float) -> None:
        """Count a part of a compilation that has ended."""
        self.unfinished = now = time.perf_counter()
        begin = now - duration_secs
        while self.spans and self.spans[-1][0] >= begin:  # the nested spans, which JAX reports first
            inner = self.spans.pop()
            self.seconds -= inner[1] - inner[0]
        self.spans.append((begin, now))
        self.seconds += duration_secs

    def add(self, there: "Compiled") -> None:
        self.programs += there.programs
        self.hits += there.hits
        self.seconds += there.seconds
        self.unfinished = 0.0


class _OfThread(threading.local):
    def __init__(self) -> None:  # called in each thread that uses it
        self.compiled = Compiled()


_of_thread = _OfThread()


def thread_record() -> Compiled:
    return _of_thread.compiled


def _count_compilation(event: str, duration_secs: float, **_: str | int) -> None:
    if event.startswith("/jax/core/compile/"):
        thread_record().add_span(duration_secs)
    if event == "/jax/core/compile/backend_compile_duration":
        record = thread_record()
        record.programs, record.unfinished = record.programs + 1, 0.0


def _count_hit(event: str, **_: str | int) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        thread_record().hits += 1


jax.monitoring.register_event_duration_secs_listener(_count_compilation)
jax.monitoring.register_event_listener(_count_hit)


# The log of a run's compilations.


def in_silence(name: str) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext()


class Compilations:
    """The log of a run's compilations; `has_several` says whether to log why a program is compiled."""

    def __init__(self, compiling: Compiling, *, has_several: bool) -> None:
        self.compiling, self._has_several = compiling, has_several
        self._begun: set[Stage] = set()
        self._ahead: set[Any] = set()  # stages and programs
        self._sizes: dict[int, int] = {}  # of the steps' program caches
        self.compiled = thread_record()

    def waiting(self, stage: Stage) -> contextlib.AbstractContextManager[object]:
        """Return a context for a trace; the loop waits for it only if this is the loop's thread."""
        return self.compiling(stage.name) if thread_record() is self.compiled else contextlib.nullcontext()

    def mark_ahead(self, what: object) -> None:
        self._ahead.add(what)

    def log_begin(self, call: Call) -> None:
        """Log why a call's program is compiled, unless the run has only one."""
        stage, size = call.program.stage, getattr(call.program.step, "_cache_size", None)
        is_due = self._has_several and stage not in self._begun and stage not in self._ahead
        if is_due and size is not None and not size():
            _logger.info("compiling %s for %s", stage.name, _steps(call))

    def log_end(self, call: Call) -> bool:
        """Log a program that was compiled again, for other arguments; return whether it is the first of its stage."""
        program = call.program
        stage, is_first = program.stage, program.stage not in self._begun
        size = getattr(program.step, "_cache_size", lambda: self.compiled.programs)()
        has_grown, self._sizes[id(program.step)] = size > self._sizes.get(id(program.step), 0), size
        if is_first:
            self._begun.add(stage)
        elif has_grown and stage.is_compiled and program not in self._ahead:
            _logger.info(
                "compiled %s again for %s: its batch differs from earlier ones in shapes, dtypes or placement (%s), or "
                "its state in placement",
                stage.name,
                _steps(call),
                ", ".join(map(type_text, jax.tree.leaves(call.args)[:5])),
            )
        self._ahead.discard(program)  # it is compiled again only for other arguments
        return is_first


def _steps(call: Call) -> str:
    return "1 step" if call.program.max_steps == 1 else f"1 to {call.program.max_steps} steps"


# The times of a start, in which restoring, compiling and the first batch overlap.


@dataclasses.dataclass
class StartTimes:
    """The duration of each part of a start, in seconds; parts overlap."""

    began: float = dataclasses.field(default_factory=lambda: stopwatch.CLOCKS.seconds())
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    is_cached: bool = False

    def left(self, seconds: float) -> float:
        """Return how many of these seconds are left since the start began."""
        return max(0.0, self.began + seconds - stopwatch.CLOCKS.seconds())

    @context_manager
    def part(self, name: str) -> Iterator[None]:
        then = stopwatch.CLOCKS.seconds()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + stopwatch.CLOCKS.seconds() - then

    @context_manager
    def compiling(self) -> Iterator[None]:
        """Time compilation, and record whether JAX's persistent cache had the programs."""
        here = thread_record()
        hits, before = here.hits, here.programs
        with self.part("compile"):
            yield
        if here.programs > before:
            self.is_cached = here.programs - before <= here.hits - hits

    def log(self, before: float) -> None:
        """Log the parts, and the seconds of the process before the call."""
        names = ("devices", "restore", "compile", "first batch")
        words = [
            f"{name} {self.parts[name]:.1f}{' (cached)' if name == 'compile' and self.is_cached else ''}"
            for name in names
            if name in self.parts
        ]
        if words:
            also = f"; before {before:.1f} s" if before >= 0.05 else ""
            seconds = stopwatch.CLOCKS.seconds() - self.began
            _logger.info("first step after %.1f s: %s%s", seconds, ", ".join(words), also)
