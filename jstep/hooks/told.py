"""Notifications of the user's hooks beyond steps: saved checkpoints, failures, and the end of a run."""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax

from jstep.core.exceptions import note
from jstep.core.threads import Thread
from jstep.hooks.hook import defines, hook_name
from jstep.state.train_state import TrainState

_logger = logging.getLogger("jstep")


class HookNotifier:
    """Notifies the user's hooks. A thread reports checkpoints, one at a time."""

    def __init__(self, hooks: Sequence[Any]) -> None:
        self._hooks = list(hooks)
        self._listeners = [hook for hook in self._hooks if defines(hook, "saved")]
        self._pending: deque[tuple[int, str]] = deque()  # the first is being reported
        self._changed = threading.Condition()
        self._errors: dict[int, BaseException] = {}

    def saved(self, step: int, path: str) -> None:
        """Report a checkpoint that is acknowledged and kept; from any thread, without waiting."""
        with self._changed:
            if not self._listeners or jax.process_index() != 0:
                return
            self._pending.append((step, path))
            if len(self._pending) == 1:
                Thread(target=self._notify, name="jstep-saved", daemon=True).start()

    def _notify(self) -> None:
        while True:
            step, path = self._pending[0]
            for hook in list(self._listeners):
                self._errors.pop(id(hook), None)
                try:
                    hook.saved(step, path)
                except BaseException as error:  # reported only in the log and at the end of the run
                    self._errors[id(hook)] = error
                    _logger.warning(
                        "%s.saved(%d, %r): %s: %s", hook_name(hook), step, path, type(error).__name__, error
                    )
            with self._changed:
                self._pending.popleft()
                self._changed.notify_all()
                if not self._pending:
                    return

    def wait(self, path: str | None = None) -> None:
        """Wait until the hooks have been notified of this checkpoint, or of all."""
        with self._changed:
            self._changed.wait_for(lambda: not any(path in (None, waiting) for _, waiting in self._pending))

    def end(self, step: int, error: BaseException | None, state: TrainState | None) -> None:
        """Report the error, if any, and the end of the run; without an error, raise the first one of the hooks."""
        problems, self._listeners = list(self._errors.values()), []
        calls: list[tuple[Any, str, tuple[Any, ...]]] = []
        if error is not None:
            calls = [(hook, "failed", (step, error)) for hook in self._hooks]
        calls += [(hook, method, ()) for hook in reversed(self._hooks) for method in ("closed", "close")]
        for hook, method, args in calls:
            is_closed = method == "close" and hasattr(hook, "use_run")  # a built-in hook, before the logs that it uses
            if defines(hook, method) and not is_closed:
                try:
                    getattr(hook, method)(*args)
                except Exception as problem:
                    problems.append(problem)
        first = problems.pop(0) if problems and error is None else None
        for other in problems:
            if (noted := error or first) is not None and other is not noted:
                note(noted, f"Additionally, {type(other).__name__}: {other}")
        if first is not None:
            first.state = state  # type: ignore[attr-defined]
            try:
                raise first
            finally:
                del first, problems, calls  # its traceback refers to this frame, which would keep it alive
