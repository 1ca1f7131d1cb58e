"""The observer that shows a progress bar: step, rate, loss and the remaining time."""

import functools
import importlib.util
import operator
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from jstep.core.checks import as_int, as_number
from jstep.hooks import metric_sums_program as sums
from jstep.hooks.base import Cadence, RunHook
from jstep.hooks.hook import Clock, Metrics, step_of
from jstep.hooks.stock import shown_share
from jstep.loop.run_record import Run
from jstep.optimizers.hyperparameters import held_values
from jstep.state.train_state import TrainState


def shown(run: Run) -> AbstractContextManager[object]:
    """Show a progress bar on a terminal, or if `train(progress=True)` asks for it, in place of log lines."""
    wanted = run.options.progress
    is_terminal = sys.stderr is not None and sys.stderr.isatty() and importlib.util.find_spec("tqdm")
    if wanted is not False and jax.process_index() == 0 and (wanted or is_terminal):
        run.reporter = lambda: ProgressHook(last_step=run.options.end)
    return nullcontext()


class ProgressHook(RunHook):
    """A tqdm progress bar (extra `progress`): the loss, held hyperparameters, results of evaluations, examples/s.

    If the peak of the device is known, it also shows the utilization (see `StepCounterHook`).

    Args:
        last_step: The step at which the run ends, or None.
        every_n_secs: Interval between updates of the line, in seconds.
        file: The file to write to; standard error by default.
        clock: Returns seconds; replaced in tests.

    Raises:
        ImportError: tqdm is not installed.
    """

    def __init__(
        self, *, last_step: int | None, every_n_secs: float = 0.25, file: Any = None, clock: Clock = time.monotonic
    ) -> None:
        try:
            import tqdm
        except ImportError as error:
            raise ImportError("a progress line needs tqdm: pip install 'jstep[progress]'") from error
        self._tqdm, self._file = tqdm.tqdm, file
        self._last_step = None if last_step is None else as_int(last_step, "last_step", 0)
        self.cadence = Cadence(
            secs=as_number(every_n_secs, "every_n_secs", low=0), clock=clock, at_last=True, again_at_last=True
        )
        self._bar: Any = None

    def begin(self, state: TrainState) -> None:
        """Draw the line at the first step of the run."""
        super().begin(state)
        self._held: dict[str, Any] = {}
        self._names = frozenset({"loss", *held_values(state.slots)})
        unknown = _is_of_no_size(self._file or sys.stderr)
        size: dict[str, Any] = {"ncols": 80, "nrows": 24} if unknown else {"dynamic_ncols": True}
        self._bar = self._tqdm(total=self._last_step, initial=step_of(state), unit="step", file=self._file, **size)

        self.run.pending.append((self, self._restart_clock))

    def _restart_clock(self, *, wait: bool = False) -> bool:
        """Restart the clock after the first call, so that the remaining time does not include compilation."""
        self._bar.unpause()
        return True

    def when_due(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Update the line with the latest numbers that are ready; with those of the step if it is the last one."""
        if self.run.is_over:
            self.end(step, state)
            return
        if self._held and sums.is_ready(self._held):
            self._show(self._held)
        self._held = self._numbers()
        sums.start_transfer(self._held)
        self._bar.update(step - self._bar.n)

    def end(self, step: int, state: TrainState) -> None:
        """Draw the last line."""
        self._show(self._numbers())
        self._bar.update(step - self._bar.n)
        self._bar.refresh()

    def _numbers(self) -> dict[str, Any]:
        return {name: value for name, value in sums.scalars(self.run.metrics or {}).items() if name in self._names}

    def _show(self, numbers: dict[str, Any]) -> None:
        results = [sums.numbers_of(hook.newest[1]) for hook in self.run.evaluations if hook.newest is not None]
        words = sums.text(functools.reduce(operator.or_, results, numbers))
        counter = self.run.counter
        examples = getattr(counter, "examples_per_sec", None)
        rate = [f"{examples:.4g} examples/s"] if examples else []
        share = shown_share(getattr(counter, "utilization", None))
        self._bar.set_postfix_str("  ".join([words, *rate, *share]), refresh=False)

    def close(self) -> None:
        """End the line and close the bar."""
        super().close()
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _is_of_no_size(file: Any) -> bool:
    """Whether a terminal does not report its size, for which tqdm would show an empty line."""
    try:
        return os.get_terminal_size(file.fileno()).columns == 0
    except (OSError, ValueError, AttributeError):
        return False
