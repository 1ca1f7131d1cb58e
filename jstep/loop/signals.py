"""Graceful shutdown on SIGTERM and SIGINT."""

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from jstep.distributed import processes

_logger = logging.getLogger("jstep")


class Preempted(SystemExit):
    """Raised by `train` after SIGTERM, when the step in flight is finished and saved. A SystemExit with code 143.

    Attributes:
        state: The state after that step.
    """

    def __init__(self, message: str) -> None:
        super().__init__(143)
        self.message = message
        self.state: Any = None

    def __str__(self) -> str:
        return self.message


class StopWaiting(BaseException):
    """Interruption of the wait for a batch when the run stops; never propagates out of `train`."""


class StopSignals:
    """A context manager that handles SIGTERM and SIGINT; a second SIGINT raises KeyboardInterrupt at once.

    Signal handlers can be set in the main thread only; in another thread it does nothing. A SIGINT that is ignored, as
    under `nohup` or in a background job of a script, stays ignored.

    On several processes, SIGTERM is left to JAX's preemption service, which makes all of them stop after the same
    call, and SIGINT is forwarded to it.

    Attributes:
        on_first: Called by the handler at the first signal.
        is_shared: Whether there are several processes, so that `to_stop` must be called after each call.
        received: The first signal; None until one is received.
        at_once: Whether a second SIGINT was received.
        interrupts: Whether to stop waiting for batches: a signal was received, and this is the only process.
    """

    def __init__(self) -> None:
        self.on_first: Callable[[], None] = lambda: None
        self._alone = processes.is_single_process()
        self.is_shared = not self._alone
        self._before: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None
        self.at_once = self.interrupts = self._agreed = False

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT) if self._alone else (signal.SIGINT,):
                if number == signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # None: the handler was not set from Python, so Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                self.at_once = True
                raise KeyboardInterrupt
            return
        self.received = signal.Signals(number)
        if self._alone:
            self.interrupts = True
            self.on_first()
        else:
            processes.request_stop()

    def to_stop(self) -> bool:
        """Whether the run stops after this call; called after each call and between the batches of an evaluation."""
        if self._alone:
            return self.received is not None
        self._agreed = self._agreed or processes.reached_stop()
        if not self._agreed:
            return False
        self.received = self.received or signal.SIGTERM
        return True

    def stopped(self, when: str) -> BaseException:
        """Log the signal and return the exception for `train` to raise."""
        received = self.received or signal.SIGTERM
        message = f"{received.name} stopped the run {when}"
        _logger.info(message)
        return Preempted(message) if received == signal.SIGTERM else KeyboardInterrupt(message)
