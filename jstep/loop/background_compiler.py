"""Compile the later programs of a run in a background thread, before they are due."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jstep.core.contexts import Thread
from jstep.core.meshes import dims_of
from jstep.loop.signals import StopWaiting

_logger = logging.getLogger("jstep")

_POLL_SECS = 0.2
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
    """Compiler of programs in a thread, in order; it blocks the loop if a program is due but not ready.

    Errors are logged only; the step that needs the program raises them. A compilation cannot be cancelled: if the run
    returns while one is in progress, the process waits for it before it exits.

    Args:
        jobs: The programs to compile, in the order of their steps.
        stopping: Returns whether the run is stopping and must not wait for a program.
        is_quiet: Whether to log nothing.
        closed: An event that is set when the compiler is closed.
    """

    def __init__(
        self,
        jobs: Sequence[CompileJob],
        stopping: Callable[[], bool] = lambda: False,
        *,
        is_quiet: bool = False,
        closed: threading.Event | None = None,
    ) -> None:
        self._jobs, self._stopping, self._is_quiet = list(jobs), stopping, is_quiet
        self._done = [threading.Event() for _ in self._jobs]
        self._passed = self._begun = 0
        self._lock = threading.Lock()  # protects _begun
        self._closed = threading.Event() if closed is None else closed
        self._state: Any = None
        self._args: tuple[Any, ...] = ()
        self._thread: Thread | None = None

    def before(
        self, step: int, waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    ) -> None:
        """Wait for the programs that are due at this step, in the context `waiting()`.

        Raises:
            StopWaiting: The run is stopping.
        """
        while self._passed < len(self._jobs) and step >= self._jobs[self._passed].first:
            with self._lock:
                if self._begun == self._passed:  # not started: the step compiles it
                    self._begun += 1
                    self._done[self._passed].set()
            with waiting():
                while not self._done[self._passed].wait(_POLL_SECS):
                    if self._stopping():
                        raise StopWaiting
            self._passed += 1

    def after(self, state: Any, args: tuple[Any, ...]) -> None:
        """Start the next compilations, after a step with these arguments that returned this state."""
        if self._begun == len(self._jobs) or self._begun >= self._passed + _MOST_AHEAD:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        if self._state is None:
            self._state = shapes_of(state)
        self._args = shapes_of(args)
        self._start()

    def begin(self, state: Any) -> None:
        """Start at once, with the shapes of a state."""
        self._state = state
        self._start()

    def _start(self) -> None:
        # Not a daemon: a compiler that returns to a finalized interpreter aborts the process.
        # The first job is chosen here, because the step that needs it may run before the thread does.
        self._thread = Thread(target=self._work, args=(self._next(),), name="jstep-compile")
        self._thread.start()

    def _work(self, number: int | None) -> None:
        while number is not None:
            job = self._jobs[number]
            then = time.perf_counter()
            try:
                if job.make(self._state, self._args) and not self._is_quiet:
                    _logger.info(
                        "compiled %s ahead of step %d, in the background, in %.1f s",
                        job.name,
                        job.first,
                        time.perf_counter() - then,
                    )
            except Exception as error:
                if not self._is_quiet:
                    _logger.warning(
                        "%s, which step %d needs, could not be compiled ahead: %s: %s",
                        job.name,
                        job.first,
                        type(error).__name__,
                        error,
                    )
            finally:
                self._done[number].set()
            number = self._next()

    def close(self) -> None:
        """Start no further programs; log a line if the process has to wait for one."""
        with self._lock:
            is_compiling = not all(done.is_set() for done in self._done[: self._begun])
            self._begun = len(self._jobs)
        self._closed.set()
        # The thread may be alive without a program to compile, about to end.
        if is_compiling and self._thread is not None and self._thread.is_alive():
            _logger.info("a compilation in the background cannot be stopped: the process ends when it has finished")

    def _next(self) -> int | None:
        """The index of the job to start now, or None."""
        with self._lock:
            number = self._begun
            if number >= min(len(self._jobs), self._passed + _MOST_AHEAD):
                return None
            self._begun += 1
            return number


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
