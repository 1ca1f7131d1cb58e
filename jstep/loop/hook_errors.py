"""The errors of hooks: one that fails does not keep the others from being called."""

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from jstep.core.exceptions import note_other
from jstep.hooks.run_hook import HookCall
from jstep.loop.course import Activity, Course


class HookErrors(contextlib.AbstractContextManager["HookErrors"]):
    """A context that collects the errors of hooks: enter it for each call, and `end` it after the last one."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._activity: HookCall | Activity | None = None  # what raised the first error
        self.collected: list[Exception] = []

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        # An exit or an interrupt is not the error of a hook: no other hook is called after it.
        if not isinstance(error, Exception):
            return False
        self.add(error, self._course.activity)
        return True

    def add(self, error: Exception, activity: HookCall | Activity | None) -> None:
        self._activity = self._activity or activity
        self.collected.append(error)

    def add_failures(self, failures: deque[tuple[Exception, HookCall]]) -> None:
        while failures:
            self.add(*failures.popleft())

    def end(self, failed: Callable[[Exception], None] | None = None) -> None:
        """Raise the first error, the others as its notes.

        If the run has an error of its own, nothing is raised: `failed` is called with each of these, and notes it.
        """
        if self._activity is not None:
            self._course.activity = self._activity  # which the note of the first error names
        if failed is not None:
            for error in self.collected:
                failed(error)
            return
        if not self.collected:
            return
        first, *others = self.collected
        for other in others:
            note_other(first, other)
        self.collected.clear()
        try:
            raise first
        finally:
            del first  # breaks the reference cycle with this frame, which its traceback holds
