"""The observers that add log lines: the counter of steps, and the lines themselves.

Lines and bars show the rate of the counter.
"""

from collections.abc import Collection, Sequence
from typing import Any

from jstep.compiling.chunks import Chunk
from jstep.core import processes
from jstep.core.trees import Tree
from jstep.logs.history import check_paths
from jstep.logs.reporting import LoggingHook
from jstep.logs.speed import StepCounterHook
from jstep.loop.observer import Observer
from jstep.loop.run_context import RunContext


class LinesReplaced:
    """The key in `shared` of a run whose progress bar shows what log lines would."""


class Rates(Observer):
    """The observer that adds a counter of steps, unless the user has one.

    It comes before all that show its rate.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run

    def make_hooks(self, hooks: Sequence[Any]) -> Sequence[Any]:
        run = self._run
        check_paths(run.options.hooks)
        for hook in hooks:
            if isinstance(hook, StepCounterHook):
                run.shared[StepCounterHook] = hook
                return ()
        options = run.options
        counter = StepCounterHook(
            every_n_steps=options.log_steps or options.save_summaries_steps or 100
        )
        run.shared[StepCounterHook] = counter
        return (counter,)


class LogLines(Observer):
    """The observer that adds log lines, unless a progress bar replaces them."""

    options = frozenset({"log_steps"})

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._has_lines = False

    def make_hooks(self, hooks: Sequence[Any]) -> Sequence[Any]:
        run = self._run
        options = run.options
        is_wanted = options.log_steps is not None and options.progress is not False
        if not is_wanted or LinesReplaced in run.shared or not processes.is_process_0():
            return ()
        self._has_lines = True

        def leave_out() -> Collection[str]:
            return run.components.constant_metrics().keys()

        return (LoggingHook(every_n_steps=options.log_steps, leave_out=leave_out),)

    def on_first_call(self, chunk: Chunk, state: Tree) -> None:
        if self._has_lines and chunk.first == self._run.course.first:
            self._run.times.log(self._run.watch.seconds_before)
