"""Compile the later programs of a run in a background thread, before they are due."""

import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core.meshes import dims_of, in_background
from jstep.loop.signals import StopWaiting

_logger = logging.getLogger("jstep")

_POLL_SECS = 0.1
_MOST_AHEAD = 2
"""The maximum number of programs compiled ahead, because each takes device memory."""


class CompileJob(NamedTuple):
    """A program to be compiled.

    Attributes:
        first: The first step that runs it.
        name: The name, for logs.
        make: `make(state, args)` compiles the program for the shapes of the state and of the latest batch. It returns
            whether there was anything to compile.
    """

    first: int
    name: str
    make: Callable[[Any, tuple[Any, ...]], bool]


class BackgroundCompiler:
    """Compiler of programs in threads, one after the other; it blocks the loop if a program is due but not ready.

    Errors are logged only; the step that needs the program raises them. A compilation cannot be cancelled: if the run
    returns while one is in progress, the process waits for it before it exits.

    Args:
        jobs: The programs to compile, in the order of their steps.
        stopping: Returns whether the run is stopping and must not wait for a program.
        is_quiet: Whether to log nothing.

    Attributes:
        is_closed: Whether the run has ended.
    """

    def __init__(
        self, jobs: Sequence[CompileJob], stopping: Callable[[], bool] = lambda: False, *, is_quiet: bool = False
    ) -> None:
        self._jobs, self._stopping, self._is_quiet = deque(jobs), stopping, is_quiet
        self._begun: deque[tuple[CompileJob, Future[None]]] = deque()
        self._state: Any = None
        self.is_closed = False

    def before(
        self, step: int, waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    ) -> None:
        """Wait for the programs that are due at this step, in the context `waiting()`.

        Raises:
            StopWaiting: The run is stopping.
        """
        while self._begun and step >= self._begun[0][0].first:
            with waiting():
                if not is_done(self._begun[0][1], self._stopping):
                    raise StopWaiting
            self._begun.popleft()
        while self._jobs and step >= self._jobs[0].first:
            self._jobs.popleft()  # not begun: the step compiles it

    def after(self, state: Any, args: tuple[Any, ...]) -> None:
        """Begin the next compilation, after a step with these arguments that returned this state."""
        if not self._jobs or len(self._begun) == _MOST_AHEAD or (self._begun and not self._begun[-1][1].done()):
            return
        if self._state is None:
            self._state = shapes_of(state)
        self.begin(self._state, shapes_of(args))

    def begin(self, state: Any, args: tuple[Any, ...] = ()) -> None:
        """Begin the next compilation at once, with the shapes of a state and of a batch."""
        job = self._jobs.popleft()
        task = functools.partial(self.compile_job, job, state, args)
        self._begun.append((job, in_background(task, name="jstep-compile")))

    def compile_job(self, job: CompileJob, state: Any, args: tuple[Any, ...]) -> None:
        """Compile a program; all that a thread does."""
        then = time.perf_counter()
        try:
            is_made = job.make(state, args)
        except Exception as error:
            if not self._is_quiet:
                _logger.warning(
                    "%s, which step %d needs, could not be compiled ahead: %s: %s",
                    job.name,
                    job.first,
                    type(error).__name__,
                    error,
                )
        else:
            if is_made and not self._is_quiet:
                _logger.info(
                    "compiled %s ahead of step %d, in the background, in %.1f s",
                    job.name,
                    job.first,
                    time.perf_counter() - then,
                )

    def close(self) -> None:
        """Begin no further compilations; log a line if the process has to wait for one."""
        self._jobs.clear()
        self.is_closed = True
        if not all(future.done() for _, future in self._begun):
            _logger.info("a compilation in the background cannot be stopped: the process ends when it has finished")


def is_done(future: "Future[Any]", is_over: Callable[[], bool]) -> bool:
    """Wait for something in the background, but not past the end of the run; return whether it is done.

    It waits again and again: a signal that arrives just before a wait without a time-out is handled only after it.
    """
    while not wait([future], timeout=_POLL_SECS).done:
        if is_over():
            return False
    return True


def shapes_of(tree: Any) -> Any:
    """The shapes of arrays, for which JAX finds the same program as for the arrays."""
    return jax.tree.map(_shape, tree)


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        # Uncommitted arrays are compiled for like NumPy arrays, without a sharding.
        sharding = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False)
        )
    if isinstance(leaf, np.ndarray | np.generic):
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    return leaf


def stacked_shapes(tree: Any, steps: int) -> Any:
    """The shapes of a batch stacked over several steps."""

    def leaf(one: Any) -> Any:
        if not isinstance(one, jax.ShapeDtypeStruct):
            return _shape(np.stack([one] * steps))
        sharding = one.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *dims_of(sharding.spec)))
        return jax.ShapeDtypeStruct((steps, *one.shape), one.dtype, sharding=sharding)

    return jax.tree.map(leaf, tree)
