"""Calls of the user's hooks in the background: `flush` before a checkpoint, `saved` after it."""

import threading
from collections.abc import Sequence
from typing import Any

from jstep.core import processes
from jstep.core.checks import hook_name
from jstep.core.logs import logger
from jstep.core.threads import SerialTasks, Task
from jstep.hooks.hook import call_named, defines


class BackgroundHooks:
    """Calls `flush` and `saved` of hooks in other threads, `saved` for one checkpoint at a time."""

    def __init__(self, hooks: Sequence[Any]) -> None:
        self._flush_hooks = [hook for hook in hooks if defines(hook, "flush")]
        self._saved_hooks = [hook for hook in hooks if defines(hook, "saved")]
        self._lock = threading.Lock()
        self._tasks = SerialTasks("jstep-saved", daemon=True)
        self._calls: dict[str, Task[None]] = {}  # those in progress, by path
        self._errors: dict[int, Any] = {}  # id of a hook → the error of its latest `saved`
        self._thread: int | None = None  # the one that is calling `saved`

    def flush(self) -> None:
        """Let hooks flush what must not be older than a checkpoint; an error fails the save."""
        for hook in self._flush_hooks:
            call_named(hook, "flush")

    def saved(self, step: int, path: str) -> None:
        """Queue the calls of `saved` for a complete checkpoint; only on process 0."""
        with self._lock:
            if self._saved_hooks and processes.is_process_0():
                self._calls = {path: call for path, call in self._calls.items() if not call.done()}
                self._calls[path] = self._tasks.add(lambda: self._call_saved(step, path))

    def _call_saved(self, step: int, path: str) -> None:
        self._thread = threading.get_ident()
        for hook in self._saved_hooks:
            self._errors.pop(id(hook), None)
            try:
                call_named(hook, "saved", step, path)
            except BaseException as error:  # reported only in the log and at the end of the run
                self._errors[id(hook)] = error
                logger.warning(
                    "%s.saved(%d, %r): %s: %s",
                    hook_name(hook),
                    step,
                    path,
                    type(error).__name__,
                    error,
                )
        self._thread = None

    def wait(self, path: str | None = None) -> None:
        """Wait for the calls of `saved` for the checkpoint at `path`; by default, for all."""
        if path is None:
            self._tasks.wait()
            return
        with self._lock:  # `saved` reads the calls in another thread
            call = self._calls.pop(path, None)
        if call is not None:
            call.result()

    def is_calling(self) -> bool:
        """Whether this thread is in a call of `saved`, which must not wait for itself."""
        return self._thread == threading.get_ident()

    def end(self) -> list[Any]:
        """Call `saved` no more; return the errors of the hooks whose last call failed."""
        self._saved_hooks = []
        return list(self._errors.values())
