"""Propagation of JAX contexts to threads, and exemption of internal transfers from `transfer_guard`.

JAX's context managers set thread-local values, not context variables: a new thread has JAX's defaults. A thread of
jstep therefore copies from the thread that starts it the context variables, and all JAX settings that have a context
manager in the installed version of JAX.

Not propagated, because JAX has no public way to read them: `with mesh:` (use `jax.set_mesh(mesh)`), contexts of
`jax.make_user_context`, and `jax.thread_guard`, which by design belongs to one thread.
"""

import contextlib
import contextvars
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

import jax

from jstep.core.exceptions import scoped

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NOT_CARRIED = {"thread_guard", "transfer_guard"}
"""The first belongs to one thread; the second is an alias of three settings, which are propagated."""

_SETTINGS = tuple(
    name
    for name in (entry.removeprefix("jax_") for entry in jax.config.values if entry.startswith("jax_"))
    if name not in _NOT_CARRIED and callable(getattr(jax, name, None))
)
"""Settings: `jax.config.jax_<name>` is the value in this thread, `jax.<name>(value)` is its context manager."""

_GUARDS = tuple(name for name in _SETTINGS if name.startswith("transfer_guard_"))
_NO_GUARD: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Contexts:
    """A snapshot of a thread's contexts, in which any number of functions can run, in any thread."""

    variables: contextvars.Context
    settings: tuple[tuple[str, Any], ...]
    mesh: jax.sharding.Mesh | None
    abstract_mesh: jax.sharding.AbstractMesh

    def run(self, fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call `fn(*args, **kwargs)` in a copy of these contexts, on this thread."""
        return self.variables.copy().run(self._run, functools.partial(fn, *args, **kwargs))

    def _run(self, fn: Callable[[], _R]) -> _R:
        with self._entered():
            return fn()

    @scoped
    def _entered(self) -> Iterator[None]:
        # Equal settings are not set again, so that they still follow `jax.config.update`.
        with contextlib.ExitStack() as stack:
            for name, value in self.settings:
                if _read(name) != value:
                    stack.enter_context(getattr(jax, name)(value))
            if self.mesh is not None and jax.sharding.get_mesh() != self.mesh:
                stack.enter_context(jax.set_mesh(self.mesh))
            if self.mesh is not None and jax.sharding.get_abstract_mesh() != self.abstract_mesh:
                stack.enter_context(jax.sharding.use_abstract_mesh(self.abstract_mesh))
            yield


def capture() -> Contexts:
    """Capture the contexts of this thread: context variables, JAX's settings, the mesh."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # get_mesh raises inside a function that JAX is tracing
        mesh = None
    settings = tuple((name, _read(name)) for name in _SETTINGS)
    return Contexts(contextvars.copy_context(), settings, mesh, jax.sharding.get_abstract_mesh())


def carried(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Bind `fn` to the current contexts of this thread, for executors: any thread may call the result."""
    return functools.partial(capture().run, fn)


class Thread(threading.Thread):
    """A thread that runs in a copy of the contexts of the caller of `start`."""

    _carried: Contexts | None = None

    def start(self) -> None:
        """Start the thread in a copy of the caller's contexts."""
        self._carried = capture()
        super().start()

    def run(self) -> None:
        """Run the target in the captured contexts."""
        contexts, self._carried = self._carried, None  # release them when the thread ends
        if contexts is None:
            super().run()
        else:
            contexts.run(super().run)


def in_background(fn: Callable[[], _R], *, name: str, daemon: bool = False) -> "Future[_R]":
    """Call a function in a thread of its own, in a copy of the caller's contexts.

    Args:
        fn: The function.
        name: The name of the thread.
        daemon: Whether the process may end while it runs; a compiler must not be abandoned, it aborts the process.

    Returns:
        Its result, or its exception.
    """
    future: Future[_R] = Future()

    def run() -> None:
        try:
            future.set_result(fn())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name=name, daemon=daemon).start()
    return future


def internal_transfers() -> contextlib.AbstractContextManager[object]:
    """Context manager that exempts internal transfers (host, devices) from the caller's transfer guards.

    Use it only around transfers: a user's function called inside would not see its guard. It costs almost nothing when
    no guard is set.

    Example:
        >>> import jax, numpy as np
        >>> from jstep.core.contexts import internal_transfers
        >>> with jax.transfer_guard("disallow"):
        ...     with internal_transfers():
        ...         x = jax.numpy.add(np.float32(1), np.float32(2))
        >>> float(x)
        3.0
    """
    config = jax.config  # inlined reads: this runs for every logged scalar
    if not (
        config.jax_transfer_guard_host_to_device  # type: ignore[attr-defined]
        or config.jax_transfer_guard_device_to_host  # type: ignore[attr-defined]
        or config.jax_transfer_guard_device_to_device  # type: ignore[attr-defined]
    ):
        return _NO_GUARD
    return _allowed([name for name in _GUARDS if str(_read(name)).startswith("disallow")])


@scoped
def _allowed(guards: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in guards:
            stack.enter_context(getattr(jax, name)("allow"))
        yield


def _read(name: str) -> Any:
    return getattr(jax.config, f"jax_{name}")
