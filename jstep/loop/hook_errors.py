"""The errors of hooks: one that fails does not keep the others from being called."""

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from jstep.core.exceptions import note_other
from jstep.hooks.course import Activity, Course, HookCall


class HookErrors(contextlib.AbstractContextManager["HookErrors"]):
    """A context that collects errors of hooks: enter it for each call, and `end` it after the last.

    Args:
        must_leave: Whether an exit or an interrupt in a hook leaves at once, so that no other hook
            is called.
    """

    def __init__(self, course: Course, must_leave: Callable[[], bool] = lambda: True) -> None:
        self._course = course
        self._must_leave = must_leave
        self._activity: HookCall | Activity | None = None  # what raised the first error
        self.collected: list[BaseException] = []

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            return False
        if not isinstance(error, Exception) and self._must_leave():
            return False
        self.add(error, self._course.activity)
        return True

    def add(self, error: BaseException, activity: HookCall | Activity | None) -> None:
        self._activity = self._activity or activity
        self.collected.append(error)

    def add_failures(self, failures: deque[tuple[Exception, HookCall]]) -> None:
        while failures:
            self.add(*failures.popleft())

    def end(self, failed: Callable[[BaseException], None] | None = None) -> None:
        """Raise the first error, with the others as its notes.

        An exit or an interrupt is raised only if there is no other error. If the run has failed
        already, pass `failed`: it is called with each error, and nothing is raised.
        """
        if self._activity is not None:
            self._course.activity = self._activity  # which the note of the first error names
        if failed is not None:
            for error in self.collected:
                failed(error)
            return
        if not self.collected:
            return
        first = next(
            (error for error in self.collected if isinstance(error, Exception)), self.collected[0]
        )
        for other in self.collected:
            note_other(first, other)
        self.collected.clear()
        try:
            raise first
        finally:
            # Breaks the reference cycle with this frame, which the traceback of `first` holds. If
            # that is the only error, it is `other` as well.
            del first, other
