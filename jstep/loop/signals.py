"""Early stops: signals, a time limit, and processes that stop together.

| received | one process | several processes |
|---|---|---|
| SIGTERM | a handler records it; the run saves, exit code 143 | it also forwards it to JAX's service, which stops all |
| SIGUSR1, SIGHUP | the same, 138 and 129; left alone if ignored or handled | forwarded to that service, too |
| SIGINT | the same, KeyboardInterrupt; a second one leaves immediately | forwarded to that service, too |
| `stop_secs` | a timer acts like SIGTERM | all use the clock of process 0 |

In the main thread, the first signal also interrupts the start of a run, the wait for a batch, and the tracing of a
program. If it arrives where Python drops exceptions, such as in a finalizer, it takes effect at the end of that wait.
"""

import contextlib
import ctypes
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import FrameType
from typing import Any

from jstep.core import processes
from jstep.core.agreed_clock import AgreedClock
from jstep.core.checks import format_list
from jstep.core.logs import logger
from jstep.core.threads import Task, wait_until_done

_OTHERS = signal.SIGUSR1, signal.SIGHUP
"""Signals that schedulers and terminals send; obeyed only if they have their default action."""


class Preempted(SystemExit):
    """Raised by `train` after SIGTERM, SIGUSR1, SIGHUP or `stop_secs`, when the step in flight is finished.

    A SystemExit with code 128 + signal: 143, 138, 129, and 143 after `stop_secs`. Its message says whether the state is
    saved.

    Attributes:
        state: The state after that step.
    """

    def __init__(self, message: str, code: int = 128 + signal.SIGTERM) -> None:
        super().__init__(code)
        self.message = message
        self.state: Any = None

    def __reduce__(self) -> Any:
        return type(self), (self.message, self.code), {**vars(self), "state": None}

    def __str__(self) -> str:
        return self.message


class StopWaiting(BaseException):
    """Raised when the run stops while it waits for a batch or a program; never propagates out of `train`."""


Interrupts = Callable[[], BaseException | None]


def _nothing() -> None:
    return None


class StopSignals:
    """The signals that stop a run, and its time limit, from `begin` to `end`.

    An ignored SIGINT or SIGHUP stays ignored. A process forked during the run gets the previous handlers.

    Attributes:
        interrupts: Returns the exception that the first signal raises, or None where it is only recorded.
        received: The signal that stops the run; on several processes, once they have agreed.
        received_at: When this process received one, in seconds since 1970; None if it did not.
        is_obeyed: Whether the exception that ends the run obeys it; if not, the run leaves once it has closed.
    """

    def __init__(self, stop_secs: float | None = None) -> None:
        self.is_single_process = processes.is_single_process()
        self._before: dict[signal.Signals, Any] = {}
        self.interrupts: Interrupts = _nothing
        self.received: signal.Signals | None = None
        self.received_at: float | None = None
        self.received_twice = False
        self.is_obeyed = False
        # Not the error itself, whose traceback holds the frames of the run, and with them the last state.
        self._raised_id: int | None = None
        self._handler_of_jax: Any = None
        self._cause = ""  # the signal, and the processes that received it, unless all did
        self._is_limit = False
        self._has_agreed = False
        self._has_asked = False
        self._timer: threading.Timer | None = None
        self._limit: AgreedClock | None = None
        self._polls = 0
        self._ending = threading.Lock()
        if stop_secs is not None and self.is_single_process:
            # threading rejects longer waits than this one of 292 years.
            self._timer = threading.Timer(min(stop_secs, threading.TIMEOUT_MAX), self._expire)
            self._timer.daemon = True
        elif stop_secs is not None:
            self._limit = AgreedClock(stop_secs, time.monotonic)

    def begin(self) -> None:
        """Handle signals and start the time limit; `end` must follow, even if a signal interrupts this call."""
        self.interrupts = lambda: self.stop_error("before its first step")
        if threading.current_thread() is threading.main_thread():  # Python sets handlers only there
            self._handler_of_jax = None if self.is_single_process else _action_outside_python(signal.SIGTERM)
            handled = [signal.SIGTERM] if self.is_single_process or self._handler_of_jax is not None else []
            handled += [signal.SIGINT] if signal.getsignal(signal.SIGINT) != signal.SIG_IGN else []
            for number in itertools.chain(handled, filter(_is_free, _OTHERS)):
                self._before[number] = signal.getsignal(number)  # recorded before a signal can interrupt this
                signal.signal(number, self._note)
            _active.append(self)
        if self._timer is not None:
            self._timer.start()

    def end(self) -> None:
        with self._ending:  # the timer has sent its signal, or never will
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
        if self in _active:
            _active.remove(self)
        self.restore()

    def restore(self) -> None:
        for number, handler in self._before.items():
            later = next((run for run in _active if run._before.get(number) == self._note), None)
            if later is not None:  # a run that began later goes on, and restores the handler when it ends
                later._before[number] = handler
                continue
            # None: the handler was not set from Python, so Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
        self._restore_handler_of_jax()

    def _restore_handler_of_jax(self) -> None:
        if self._handler_of_jax is not None:
            ctypes.CDLL(None).sigaction(int(signal.SIGTERM), self._handler_of_jax, None)

    def _expire(self) -> None:
        with self._ending:
            if self._timer is None or self.received is not None:
                return
            self._is_limit = True
            if not self._interrupt(signal.SIGTERM):  # the run is in another thread, or a hook has set a handler
                self.received = signal.SIGTERM

    def _interrupt(self, number: signal.Signals) -> bool:
        main = threading.main_thread().ident
        if main is None or number not in self._before or signal.getsignal(number) != self._note:
            return False
        signal.pthread_kill(main, number)
        return True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number != signal.SIGINT:
                return
            self.received_twice = True
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        self.received_at = time.time()
        if not self.is_single_process:
            if not self.stop_all():
                # Nobody can be told: this process ends as without a handler, instead of ignoring the signal.
                processes.request_stop()
        elif (error := self.interrupts()) is not None:
            raise error

    # Waits that a signal interrupts.

    def disable_interrupts(self) -> None:
        """From now on, the first signal raises nothing."""
        self.interrupts = _nothing

    @contextlib.contextmanager
    def allow_interrupts(self) -> Iterator[None]:
        before = self.interrupts
        self.interrupts = StopWaiting
        try:
            self.check()
            yield
        finally:
            self.interrupts = before

    def check(self) -> None:
        if self.is_single_process and self.received is not None:
            raise StopWaiting

    def wait_for(self, future: Task[Any], *, can_interrupt: bool = True) -> None:
        wait_until_done(future, self.check if can_interrupt else None)

    def poll_stop_signal(self) -> bool:
        """Whether the run stops; called after each call and between evaluation batches."""
        if self.is_single_process:
            return self.received is not None
        if not self._has_agreed:
            self._polls += 1
            is_over = self._limit is not None and self._limit.due(self._polls)
            is_preempted = processes.should_stop()
            self._has_agreed = is_over or is_preempted
            if self._has_agreed:
                self._is_limit = is_over
                self._agree_on_signal()
        return self._has_agreed

    def stop_all(self) -> bool:
        """Ask JAX's service to stop all processes after the same call, as for a signal; return whether it can be asked.

        It looks for requests once a second.
        """
        if self._handler_of_jax is None:
            return False
        if not self._has_asked:
            self._has_asked = True
            self._restore_handler_of_jax()
            processes.request_stop()
        return True

    def agree_at_end(self) -> None:
        """Let all processes leave, if one received a signal too late for the others."""
        if not self.is_single_process and processes.any_process(self.received is not None):
            self._agree_on_signal()

    def _agree_on_signal(self) -> None:
        """Agree on one exit code, except on processes that received SIGINT."""
        own_signal = 0 if self.received is None or self.received_at is None else int(self.received)
        rows = processes.ints_of_all(own_signal, int(1e6 * (self.received_at or 0.0)))
        number = max(row[0] if row[0] in _OTHERS else 0 for row in rows)
        if self.received != signal.SIGINT:
            self.received = signal.Signals(number or signal.SIGTERM)
        receivers = [(at, number, str(index)) for index, (number, at) in enumerate(rows) if number]
        if 0 < len(receivers) < len(rows):
            at, first, _ = min(receivers)
            name = signal.Signals(first).name
            when = datetime.fromtimestamp(at / 1e6, UTC)
            which = f"process{'es' if len(receivers) > 1 else ''} {format_list([row[2] for row in receivers], 8)}"
            self._cause = f"{name} at {which} of {len(rows)} ({when:%Y-%m-%d %H:%M:%S} UTC)"

    @property
    def reason(self) -> str:
        return "stop_secs" if self._is_limit else self._cause or (self.received or signal.SIGTERM).name

    def stop_error(self, when: str) -> BaseException:
        received = self.received or signal.SIGTERM
        message = f"{self.reason} stopped the run {when}"
        logger.info(message)
        is_interrupt = received == signal.SIGINT
        error = KeyboardInterrupt(message) if is_interrupt else Preempted(message, 128 + received)
        self._raised_id = id(error)
        return error

    def has_raised(self, error: BaseException) -> bool:
        """Whether this error, which is being handled, is the one that `stop_error` returned last."""
        return id(error) == self._raised_id


def _is_free(number: signal.Signals) -> bool:
    """Whether a signal has its default action."""
    return signal.getsignal(number) == signal.SIG_DFL and _action_outside_python(number) is None


def _action_outside_python(number: signal.Signals) -> Any:
    """Return the action of a handler set in C (faulthandler, JAX), which Python does not see; or None."""
    if signal.getsignal(number) not in (signal.SIG_DFL, None):
        return None
    action = ctypes.create_string_buffer(512)  # a `struct sigaction`, which begins with the handler
    is_found = ctypes.CDLL(None).sigaction(int(number), None, action) == 0
    return action if is_found and any(action.raw[: ctypes.sizeof(ctypes.c_void_p)]) else None


# Processes that are forked during a run.
#
# With the run's handlers, a child would only record the signal that should end it. Its signals are blocked until it has
# the previous handlers.

_active: list[StopSignals] = []
"""The runs whose handlers are set, the innermost last."""
_masked = threading.local()


def _before_fork() -> None:
    _masked.before = signal.pthread_sigmask(signal.SIG_BLOCK, {n for run in _active for n in run._before})


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masked.before)


def _in_child() -> None:
    while _active:
        _active.pop().restore()
    _in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
