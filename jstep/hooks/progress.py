"""One line on a terminal: step, rate, loss and the time left."""

import os
import sys
import time
from typing import Any

from jstep.hooks.hook import Clock, Hook, Metrics
from jstep.hooks.values import is_ready, scalars, start_transfer, text
from jstep.state import TrainState, global_step


class ProgressHook(Hook):
    """A progress bar of tqdm (extra `progress`).

    Args:
        last_step: Where the run ends.
        every_n_secs: How often the line is drawn.
        file: Where to; standard error unless told.
        clock: Seconds; for tests.

    Raises:
        ImportError: tqdm is not installed.
    """

    def __init__(
        self, last_step: int, *, every_n_secs: float = 0.25, file: Any = None, clock: Clock = time.monotonic
    ) -> None:
        try:
            import tqdm
        except ImportError as error:
            raise ImportError("a progress line needs tqdm: pip install 'jstep[progress]'") from error
        self._tqdm, self._last_step, self._file = tqdm.tqdm, last_step, file
        self._secs, self._clock = every_n_secs, clock
        self._then = clock()
        self._bar: Any = None
        self._held: dict[str, Any] = {}
        self._last: Metrics = {}

    def begin(self, state: TrainState) -> None:
        """Draws the line at the step the run begins from."""
        self._then, self._held, self._last = self._clock(), {}, {}
        unknown = _is_of_no_size(self._file or sys.stderr)
        size: dict[str, Any] = {"ncols": 80, "nrows": 24} if unknown else {"dynamic_ncols": True}
        self._bar = self._tqdm(total=self._last_step, initial=global_step(state), unit="step", file=self._file, **size)

    def after_step(self, step: int, state: TrainState, metrics: Metrics) -> None:
        """Draws it again now and then, with the last numbers that the device has finished."""
        self._last = metrics
        now = self._clock()
        if now - self._then < self._secs:
            return
        self._then = now
        if self._held and is_ready(self._held):
            self._bar.set_postfix_str(text(self._held), refresh=False)
        self._held = self._loss()
        start_transfer(self._held)
        self._bar.update(step - self._bar.n)

    def end(self, step: int, state: TrainState) -> None:
        """Draws the last line."""
        self._bar.set_postfix_str(text(self._loss()), refresh=False)
        self._bar.update(step - self._bar.n)
        self._bar.refresh()

    def _loss(self) -> dict[str, Any]:
        return {name: value for name, value in scalars(self._last).items() if name == "loss"}

    def close(self) -> None:
        """Leaves the line as it is and goes to the next."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _is_of_no_size(file: Any) -> bool:
    """Whether a terminal does not say how large it is: tqdm would show an empty line."""
    try:
        return os.get_terminal_size(file.fileno()).columns == 0
    except (OSError, ValueError, AttributeError):
        return False
