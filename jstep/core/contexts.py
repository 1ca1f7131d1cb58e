"""Run threads as the one who starts them would, and exempt internal transfers from `transfer_guard`.

JAX keeps what its context managers set in each thread, and in no context variable: a new thread has JAX's defaults.
So a thread of jstep takes two copies from whoever starts it: of the context variables, and of all settings of JAX that
have a context manager, whatever this version of JAX has.

Left behind, because JAX has no public way to read them: `with mesh:` (take `jax.set_mesh(mesh)`), contexts of
`jax.make_user_context`, and `jax.thread_guard`, which belongs to the thread that set it by its meaning.
"""

import contextlib
import contextvars
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NOT_CARRIED = {"thread_guard", "transfer_guard"}
"""One belongs to the thread that set it, the other is three settings that go along."""

_SETTINGS = tuple(
    name
    for name in (entry.removeprefix("jax_") for entry in jax.config.values if entry.startswith("jax_"))
    if name not in _NOT_CARRIED and callable(getattr(jax, name, None))
)
"""`jax.config.jax_<name>` reads the value of this thread, `jax.<name>(value)` is the context manager that sets it."""

_GUARDS = tuple(name for name in _SETTINGS if name.startswith("transfer_guard_"))
_NO_GUARD: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Contexts:
    """The contexts of a thread at one moment, to run functions in: any number of them, in any threads."""

    variables: contextvars.Context
    settings: tuple[tuple[str, Any], ...]
    mesh: jax.sharding.Mesh | None
    abstract_mesh: jax.sharding.AbstractMesh

    def run(self, fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Calls `fn(*args, **kwargs)` in a copy of these contexts, on this thread."""
        return self.variables.copy().run(self._run, functools.partial(fn, *args, **kwargs))

    def _run(self, fn: Callable[[], _R]) -> _R:
        with self._entered():
            return fn()

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        # What the thread has anyhow is not set again: it goes on following `jax.config.update`.
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
    """The contexts of this thread as they are now: context variables, JAX's settings, the mesh."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # inside a function that JAX is tracing there is none to see
        mesh = None
    settings = tuple((name, _read(name)) for name in _SETTINGS)
    return Contexts(contextvars.copy_context(), settings, mesh, jax.sharding.get_abstract_mesh())


def carried(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function `fn` in the contexts of this thread as they are now, whichever thread calls it: for executors."""
    return functools.partial(capture().run, fn)


class Thread(threading.Thread):
    """A thread that runs in a copy of the contexts of the one who calls its `start`."""

    _carried: Contexts | None = None

    def start(self) -> None:
        """Starts it, in a copy of the caller's contexts."""
        self._carried = capture()
        super().start()

    def run(self) -> None:
        """What the thread does."""
        contexts, self._carried = self._carried, None  # what they hold is free when the thread has ended
        if contexts is None:
            super().run()
        else:
            contexts.run(super().run)


def internal_transfers() -> contextlib.AbstractContextManager[object]:
    """The context for transfers of jstep's own, between host and devices or devices: no guard of the caller stops them.

    For transfers alone: a user's function that is called inside would not see its guard. It costs almost nothing when
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
    config = jax.config  # read in line: it lies on the way of every scalar that is logged
    if not (
        config.jax_transfer_guard_host_to_device  # type: ignore[attr-defined]
        or config.jax_transfer_guard_device_to_host  # type: ignore[attr-defined]
        or config.jax_transfer_guard_device_to_device  # type: ignore[attr-defined]
    ):
        return _NO_GUARD
    return _allowed([name for name in _GUARDS if str(_read(name)).startswith("disallow")])


@contextlib.contextmanager
def _allowed(guards: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in guards:
            stack.enter_context(getattr(jax, name)("allow"))
        yield


def _read(name: str) -> Any:
    return getattr(jax.config, f"jax_{name}")
