"""Compilation: programs compiled in background threads, what each thread has compiled, and the times of a start."""

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core.annotations import Tree
from jstep.core.exceptions import forget_frames, scoped
from jstep.core.meshes import dims_of
from jstep.core.threads import MAKING, doing, in_background
from jstep.core.trees import shape_of
from jstep.loop.calls import Call
from jstep.loop.signals import StopSignals, StopWaiting
from jstep.loop.stages import Stage

_logger = logging.getLogger("jstep")

# Programs compiled in background threads: later ones of a run before they are due, and one that is due, apart.

_POLL_SECS = 0.1
_MOST_AHEAD = 2
"""The maximum number of programs compiled ahead, because each takes device memory."""


Compiling = Callable[[str], contextlib.AbstractContextManager[object]]
"""A context for the time in which the loop waits for a program of the name that it is given."""


class CompileJob(NamedTuple):
    """A program to be compiled.

    Attributes:
        first: The first step that runs it.
        name: The name, for logs.
        make: `make(args)` compiles the program for the shapes of the arguments of one step.
        args: These shapes; None for those of the latest call.
        is_quiet: Whether to log nothing.
    """

    first: int
    name: str
    make: Callable[[tuple[Any, ...]], None]
    args: tuple[Any, ...] | None = None
    is_quiet: bool = False


class BackgroundCompiler:
    """Compiler of programs in threads, one after the other; it blocks the loop if a program is due but not ready.

    Errors are logged only; the step that needs the program raises them. A compilation cannot be cancelled: if the run
    returns while one is in progress, the process waits for it before it exits.

    Args:
        signals: End the wait for a program.

    Attributes:
        jobs: The programs to compile after a call, in the order of their steps.
        begun: The programs that were begun, and that no call has needed yet.
        closed: Set when the run has ended.
    """

    def __init__(self, signals: StopSignals) -> None:
        self._signals = signals
        self.jobs: deque[CompileJob] = deque()
        self.begun: deque[tuple[CompileJob, Future[None]]] = deque()
        self.closed = threading.Event()

    def before(self, step: int, compiling: Compiling, *, may_leave: bool) -> None:
        """Wait for the programs that are due at this step, in the context `compiling(name)`.

        Raises:
            StopWaiting: The run is stopping, and may leave the call at this step.
        """
        while self.begun and step >= self.begun[0][0].first:
            with compiling(self.begun[0][0].name):
                self._signals.wait_for(self.begun[0][1], may_leave=may_leave)
            self.begun.popleft()
        while self.jobs and step >= self.jobs[0].first:
            self.jobs.popleft()  # not begun: the step compiles it

    def after(self, args: tuple[Any, ...]) -> None:
        """Begin the next compilation, after a step with these arguments."""
        if not self.jobs or len(self.begun) == _MOST_AHEAD or (self.begun and not self.begun[-1][1].done()):
            return
        job = self.jobs.popleft()
        self.begin(job, shapes_of(args) if job.args is None else job.args)

    def begin(self, job: CompileJob, args: tuple[Any, ...] = ()) -> None:
        """Begin a compilation at once, for shapes of the arguments of one step."""
        task = functools.partial(self.compile_job, job, args)
        self.begun.append((job, in_background(task, name="jstep-compile")))

    def compile_job(self, job: CompileJob, args: tuple[Any, ...]) -> None:
        """Compile a program; all that a thread does."""
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
        """Begin no further compilations; log a line if the process has to wait for one."""
        self.jobs.clear()
        self.closed.set()
        if not all(future.done() for _, future in self.begun):
            _logger.info(_LEFT)


def is_done(future: "Future[Any]", is_over: Callable[[], bool]) -> bool:
    """Wait for something in the background, but not past the end of the run; return whether it is done.

    It waits again and again: a signal that arrives just before a wait without a time-out is handled only after it.
    """
    while not wait([future], timeout=_POLL_SECS).done:
        if is_over():
            return False
    return True


def compile_apart(lowered: Any, signals: StopSignals, *, may_leave: bool) -> None:
    """Compile a program in a thread, and count it as compiled by this one: a wait can be ended, but XLA cannot.

    Args:
        lowered: The lowered program.
        signals: End the wait.
        may_leave: Whether they may.

    Raises:
        StopWaiting: The run is stopping. The process ends only after the compilation.
    """

    def compiled() -> Compiled:
        lowered.compile()
        return compiled_here()

    future = in_background(compiled, name="jstep-compile-due")
    try:
        signals.wait_for(future, may_leave=may_leave)
    except StopWaiting:
        _logger.info(_LEFT)
        raise
    compiled_here().took(future.result())


_LEFT = "a compilation in the background cannot be stopped: the process ends when it has finished"


def shapes_of(tree: Tree) -> Any:
    """The shapes of arrays, for which JAX finds the same program as for the arrays."""
    return jax.tree.map(_shape, tree)


def _shape(leaf: object) -> Any:
    if isinstance(leaf, jax.Array):
        # Uncommitted arrays are compiled for like NumPy arrays, without a sharding.
        return shape_of(leaf, leaf.sharding if leaf.committed else None, weak=True)
    return shape_of(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf


def type_text(leaf: object) -> str:
    """The dtype and shape of an argument of a step, such as `float32[8, 2]`."""
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(getattr(leaf, 'shape', ()))}"


def stacked_shapes(tree: Tree, steps: int) -> Any:
    """The shapes of a batch stacked over several steps."""

    def leaf(one: Any) -> Any:
        if not isinstance(one, jax.ShapeDtypeStruct):
            return _shape(np.stack([one] * steps))
        sharding = one.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *dims_of(sharding.spec)))
        return jax.ShapeDtypeStruct((steps, *one.shape), one.dtype, sharding=sharding)

    return jax.tree.map(leaf, tree)


# Counts, by thread, of compiled programs, of cache hits, and of the seconds spent compiling.


@dataclasses.dataclass(slots=True)
class Compiled:
    """The compilations of a thread so far.

    Attributes:
        programs: The number of programs that it has compiled or found in the persistent cache.
        hits: The number of those that it has found.
        seconds: The seconds that it has traced, lowered and compiled.
        unfinished: When it last traced or lowered a program that it has not compiled since; 0 if there is none.
        spans: The spans of time that `seconds` consists of.
    """

    programs: int = 0
    hits: int = 0
    seconds: float = 0.0
    unfinished: float = 0.0
    spans: deque[tuple[float, float]] = dataclasses.field(default_factory=lambda: deque(maxlen=1000))

    def traced(self, duration_secs: float) -> None:
        """Count a part of a compilation that has ended."""
        self.unfinished = now = time.perf_counter()
        begin = now - duration_secs
        while self.spans and self.spans[-1][0] >= begin:  # the nested spans, which JAX reports first
            inner = self.spans.pop()
            self.seconds -= inner[1] - inner[0]
        self.spans.append((begin, now))
        self.seconds += duration_secs

    def finished(self) -> None:
        """Count a program that is compiled, or was found in the cache."""
        self.programs += 1
        self.unfinished = 0.0

    def hit(self) -> None:
        """Count a program that was found in the cache."""
        self.hits += 1

    def took(self, there: "Compiled") -> None:
        """Count what another thread compiled for this one."""
        self.programs += there.programs
        self.hits += there.hits
        self.seconds += there.seconds
        self.unfinished = 0.0


def compiled_here() -> Compiled:
    """The record of this thread, which is kept up to date."""
    return _of_thread.compiled


class _OfThread(threading.local):
    def __init__(self) -> None:  # called in each thread that uses it
        self.compiled = Compiled()


_of_thread = _OfThread()


def _count_compilation(event: str, duration_secs: float, **_: str | int) -> None:
    if event.startswith("/jax/core/compile/"):
        compiled_here().traced(duration_secs)
    if event == "/jax/core/compile/backend_compile_duration":
        compiled_here().finished()


def _count_hit(event: str, **_: str | int) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        compiled_here().hit()


jax.monitoring.register_event_duration_secs_listener(_count_compilation)
jax.monitoring.register_event_listener(_count_hit)


# What a run has compiled, and what is logged of it.


def in_silence(name: str) -> contextlib.AbstractContextManager[object]:
    """A context that shows nothing while a program is compiled."""
    return contextlib.nullcontext()


class Compilations:
    """The compilations of a run, and what is logged of them.

    Args:
        steps: Returns all steps and loops that there are programs of.
        compiling: A context for the time in which the loop waits for a program of the name that it is given.
        has_several: Whether the run may have several programs, so that it is said why one is compiled.

    Attributes:
        compiled: What the thread that runs the loop has compiled.
        compiling: The context.
    """

    def __init__(self, steps: Callable[[], list[Any]], compiling: Compiling, *, has_several: bool) -> None:
        self._steps, self.compiling, self._has_several = steps, compiling, has_several
        self._begun: set[Stage] = set()
        self._ahead: set[Any] = set()  # stages and programs
        self._size = 0.0  # of the steps' caches of compiled programs
        self.compiled = compiled_here()

    def waiting(self, stage: Stage) -> contextlib.AbstractContextManager[object]:
        """A context for a trace, which the loop waits for if this is its thread."""
        return self.compiling(stage.name) if compiled_here() is self.compiled else contextlib.nullcontext()

    def begun_ahead(self, what: object) -> None:
        """A program, or one of a stage, is compiled ahead of its first call."""
        self._ahead.add(what)

    def begins(self, call: Call) -> None:
        """Log why a program is compiled for a call, unless the run has only one."""
        stage, size = call.program.stage, getattr(call.program.step, "_cache_size", None)
        is_due = self._has_several and stage not in self._begun and stage not in self._ahead
        if is_due and size is not None and not size():
            _logger.info("compiling %s for %s", stage.name, _steps(call))

    def ended(self, call: Call) -> bool:
        """Log a program that was compiled again, for other arguments; return whether this was the first of its stage.

        Call it after the first call of a program, and after any other that has compiled: its step, or the sums.
        """
        program = call.program
        stage, is_first = program.stage, program.stage not in self._begun
        size, self._size = self._size, self._size_of_caches()
        if is_first:
            self._begun.add(stage)
        elif self._size > size and stage.is_compiled and program not in self._ahead:
            _logger.info(
                "compiled %s again for %s: its batch differs from earlier ones in shapes, dtypes or placement (%s), or "
                "its state in placement",
                stage.name,
                _steps(call),
                ", ".join(map(type_text, jax.tree.leaves(call.args)[:5])),
            )
        self._ahead.discard(program)  # another compilation of it is for other arguments
        return is_first

    def _size_of_caches(self) -> float:
        """The number of programs that the steps have compiled, as far as they say it."""
        sizes = [getattr(step, "_cache_size", None) for step in self._steps()]
        return sum(self.compiled.programs if size is None else size() for size in sizes)


def _steps(call: Call) -> str:
    return "1 step" if call.program.most == 1 else f"1 to {call.program.most} steps"


# The times of a start, in which restoring, compiling and the first batch overlap.


@dataclasses.dataclass
class StartTimes:
    """The duration of each part of a start, in seconds; parts overlap.

    Attributes:
        began: When the start began.
        parts: Name of the part → seconds.
        is_cached: Whether the compiled programs were found in JAX's persistent cache.
    """

    began: float = dataclasses.field(default_factory=time.perf_counter)
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    is_cached: bool = False

    def left(self, seconds: float) -> float:
        """Return what is left of some seconds, counted from the begin of the start."""
        return max(0.0, self.began + seconds - time.perf_counter())

    @scoped
    def part(self, name: str) -> Iterator[None]:
        """Time a part."""
        then = time.perf_counter()
        try:
            yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - then

    @scoped
    def compiling(self) -> Iterator[None]:
        """Time compilation, and record whether JAX's persistent cache had the programs."""
        here = compiled_here()
        hits, before = here.hits, here.programs
        with self.part("compile"):
            yield
        if here.programs > before:
            self.is_cached = here.programs - before <= here.hits - hits

    def log(self) -> None:
        """Log one line when the first step has been dispatched."""
        names = ("devices", "restore", "compile", "first batch")
        words = [
            f"{name} {self.parts[name]:.1f}{' (cached)' if name == 'compile' and self.is_cached else ''}"
            for name in names
            if name in self.parts
        ]
        if words:
            _logger.info("first step after %.1f s: %s", time.perf_counter() - self.began, ", ".join(words))
