"""The observer that shows a progress bar, and compilations that the loop waits for."""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jstep.core import processes
from jstep.core.checks import as_int, as_number
from jstep.core.interactive import is_notebook
from jstep.core.logs import logger, slow
from jstep.evaluating.evaluation_hook import newest_results
from jstep.hooks.cadence import Cadence, Clock
from jstep.hooks.run_hook import RunHook
from jstep.hooks.run_info import RunInfo
from jstep.logs.history import History
from jstep.logs.speed import StepCounterHook, format_utilization
from jstep.loop.observer import Observer
from jstep.loop.run_context import RunContext
from jstep.metering.numbers import (
    TransferQueue,
    format_numbers,
    numbers_in,
    sorted_numbers,
    start_transfer,
)
from jstep.optimizers.hyperparameters import held_values
from jstep.state.global_step import state_step
from jstep.state.train_state import TrainState
from jstep.training.metrics import LOSS, Metrics
from jstep.watching.log_lines import LinesReplaced
from jstep.watching.notebook import BarDetails, NotebookBar, ShownLines

_WIDTH = 100
"""The maximum number of characters of metrics beside the bar."""


class Progress(Observer):
    """A progress bar in place of log lines: on a terminal, or with `train(progress=True)`."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        wanted = run.options.progress
        self._hook: ProgressHook | None = None
        self._is_shown = wanted is not False and processes.is_process_0()
        # A program may have replaced `sys.stderr` by a stream that has only `write` and `flush`.
        isatty = getattr(sys.stderr, "isatty", lambda: False)
        is_terminal = isatty() and importlib.util.find_spec("tqdm")
        self._lines: ShownLines | None = None
        if self._is_shown and wanted is None and is_notebook():
            self._lines = ShownLines()
            logger.addHandler(self._lines)
            histories = [hook for hook in run.options.hooks if isinstance(hook, History)]
            self._hook = _NotebookHook(self._lines, histories, last_step=run.options.last_step)
        elif self._is_shown and (wanted or is_terminal):
            self._hook = ProgressHook(last_step=run.options.last_step)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._lines is not None:
            logger.removeHandler(self._lines)
        if isinstance(self._hook, _NotebookHook):
            self._hook.finish()

    def compiling(self, name: str) -> contextlib.AbstractContextManager[None]:
        if not self._is_shown:
            return contextlib.nullcontext()
        is_kept = jax.config.jax_compilation_cache_dir is not None  # type: ignore[attr-defined]
        hint = "" if is_kept else "; train(compile_cache=True) keeps the program for restarts"
        return slow(f"compiling {name}", logger.info, hint)

    def make_hooks(self, hooks: Sequence[Any]) -> Sequence[Any]:
        if self._hook is None:
            return ()
        if self._lines is None:
            self._run.shared[LinesReplaced] = True
        return (self._hook,)


class ProgressHook(RunHook):
    """A tqdm progress bar (extra `progress`).

    It shows the loss, held hyperparameters, results of evaluations and examples/s. It counts the
    steps that the device has finished. If the peak of the device is known, it also shows the
    utilization (see `StepCounterHook`).

    Args:
        last_step: The step at which the run ends, or None.
        every_n_secs: Interval between updates of the line, in seconds.
        file: The file to write to; standard error by default.
        clock: Returns seconds; replaced in tests.

    Raises:
        ImportError: tqdm is not installed.
    """

    _instead = "use tqdm"

    def __init__(
        self,
        *,
        last_step: int | None,
        every_n_secs: float = 0.25,
        file: object = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._file = file
        self._clock = clock
        self._new_bar = self._bar_maker()
        self._last_step = None if last_step is None else as_int(last_step, "last_step", 0)
        secs = as_number(every_n_secs, "every_n_secs", low=0)
        self._cadence = Cadence(secs=secs, clock=clock, at_last_step=True, again_at_last_step=True)
        self._bar: Any = None

    def _bar_maker(self) -> Callable[..., Any]:
        try:
            import tqdm
        except ImportError as error:
            raise ImportError(
                "a progress line needs tqdm: pip install 'jstep[progress]'"
            ) from error
        return tqdm.tqdm

    def begin(self, state: TrainState) -> None:
        super().begin(state)
        self._transfers = TransferQueue()
        self._names = frozenset({LOSS, *held_values(state.slots)})
        first = state_step(state)
        is_over = self._last_step is not None and first >= self._last_step
        postfix = {} if is_over else {"postfix": "compiling"}
        self._bar = self._new_bar(
            total=self._last_step,
            initial=first,
            unit="step",
            file=self._file,
            dynamic_ncols=True,
            **postfix,
        )
        self._run.poll(self, self._restart_clock)

    def _restart_clock(self, *, wait: bool = False) -> None:
        self._bar.set_postfix_str("", refresh=False)
        self._bar.unpause()

    def _when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Update the line with the steps that have finished; at the end, with the last step."""
        if self._run.course.is_over:
            self.end(step, state)
            return
        numbers = self._numbers()
        transfer = start_transfer(numbers.values(), lambda: numbers)
        self._transfers.add(step, transfer, lambda _, ready: self._show(ready), self)
        self._transfers.deliver_ready()
        self._run.in_flight.drop_finished()
        self._move_to(max(self._run.in_flight.finished, self._bar.n))

    def _move_to(self, step: int) -> None:
        self._bar.update(step - self._bar.n)
        self._bar.refresh()  # also if only the numbers have changed

    def end(self, step: int, state: TrainState) -> None:
        self._transfers = TransferQueue()
        self._show(self._numbers())
        self._move_to(step)

    def _numbers(self) -> dict[str, Any]:
        metrics = sorted_numbers(self._run.metrics or {})
        return {name: value for name, value in metrics.items() if name in self._names}

    def _show(self, numbers: dict[str, Any]) -> None:
        shown = dict(numbers)
        for hook in self._run.evaluations:
            shown |= numbers_in(newest_results(hook) or {})
        text = ""
        for name, value in shown.items():
            longer = f"{text}  {format_numbers({name: value})}".lstrip()
            if len(longer) <= _WIDTH:  # as many as fit, a shorter one after a longer one, too
                text = longer
        counter = self._run.shared[StepCounterHook]
        parts = [text]
        if counter.examples_per_sec:
            parts.append(f"{counter.examples_per_sec:.4g} examples/s")
        parts += format_utilization(counter)
        self._bar.set_postfix_str("  ".join(parts), refresh=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        super().close()


class _NotebookHook(ProgressHook):
    """The same bar in the output of a notebook cell."""

    def __init__(
        self, lines: ShownLines, histories: Sequence[History], *, last_step: int | None
    ) -> None:
        self._lines = lines
        self._histories = histories
        super().__init__(last_step=last_step)

    def _bar_maker(self) -> Callable[..., Any]:
        def make_bar(**options: Any) -> NotebookBar:
            details = BarDetails(self._run, self._histories, self._clock, self._lines)
            return NotebookBar(details=details, clock=self._clock, **options)

        return make_bar

    def _use_run(self, run: RunInfo) -> None:
        super()._use_run(run)
        self._ratios = run.sums.follow_ratios()

    def _numbers(self) -> dict[str, Any]:
        self._run.sums.cut()
        return sorted_numbers(
            {**(self._run.metrics or {}), **self._ratios.newest_values()},
            self._run.components.constant_metrics(),
        )

    def close(self) -> None:
        """Leave the run. `finish` closes the bar later, with the lines logged meanwhile."""
        self._given_run = None

    def finish(self) -> None:
        super().close()
