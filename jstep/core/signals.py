"""Early stops: signals, a time limit, and processes that stop together.

| received | one process | several processes |
|---|---|---|
| SIGTERM | the run saves, exit code 143 | also forwarded to JAX's service, which stops all |
| SIGUSR1, SIGHUP | the same, 138 and 129; left alone if ignored or handled | forwarded, too |
| SIGINT | the same, KeyboardInterrupt; a second one leaves immediately | forwarded, too |
| `stop_secs` | a timer acts like SIGTERM | all use the clock of process 0 |

In the main thread, the first signal also interrupts the start of a run, the wait for a batch, and
the tracing of a program. If it arrives where Python drops exceptions, such as in a finalizer, it
takes effect at the end of that wait.
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
from typing import Any, NamedTuple

from jstep.core import processes
from jstep.core.agreed_clock import AgreedClock
from jstep.core.checks import format_list
from jstep.core.logs import logger
from jstep.core.threads import Task, wait_until_done

_OPTIONAL_SIGNALS = signal.SIGUSR1, signal.SIGHUP
"""Signals that schedulers and terminals send; obeyed only if they have their default action."""


class Preempted(SystemExit):
    """Raised by `train` on SIGTERM, SIGUSR1, SIGHUP or `stop_secs`, after the step in flight.

    A SystemExit with code 128 + signal: 143, 138, 129, and 143 after `stop_secs`. Its message says
    whether the state is saved.

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
    """Raised if the run stops while it waits for a batch or a program; never leaves `train`."""


MakeInterrupt = Callable[[], BaseException | None]
"""Returns the exception that a signal raises in the main thread; None if it is only recorded."""


def _only_record() -> None:
    return None


class _Receiver(NamedTuple):
    """A process that has received a signal; the first to do so is the smallest, as a tuple."""

    microseconds: int  # since 1970
    number: int
    process: int


class StopSignals:
    """The signals that stop a run, and its time limit, from `begin` to `end`.

    An ignored SIGINT or SIGHUP stays ignored. A process forked during the run gets the previous
    handlers.

    Args:
        seconds_left: Returns the seconds from now until `stop_secs` are over; None without a limit.

    Attributes:
        make_interrupt: Returns what the first signal raises; the loop sets it for each wait that a
            signal may end.
        received: The signal that stops the run: this process's own, from its arrival on, or the one
            agreed upon.
        received_at: When this process received one, in seconds since 1970; None if it did not.
        is_obeyed: Whether an error has ended the run since it came. If not, the run exits by it
            once it has closed.
    """

    def __init__(self, seconds_left: Callable[[], float] | None = None) -> None:
        self.is_single_process = processes.is_single_process()
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self.make_interrupt: MakeInterrupt = _only_record
        self.received: signal.Signals | None = None
        self.received_at: float | None = None
        self.received_twice = False  # SIGINT, after any signal
        self.is_obeyed = False
        # Not the error itself, whose traceback holds the frames of the run, and so the last state.
        self._raised_id: int | None = None
        self._handler_of_jax: Any = None
        self._cause = ""  # the signal, and the processes that received it, unless all did
        self._is_limit = False
        self._has_agreed = False  # whether several processes have agreed to stop
        self._has_asked = False  # whether this one has requested it from JAX's service
        self._seconds_left = seconds_left
        self._timer: threading.Timer | None = None  # the time limit of one process, from `begin` on
        self._limit: AgreedClock | None = None  # the time limit of several processes
        self._polls = 0
        # Held while the timer sends its signal: `end` waits for it, so that none arrives with the
        # handlers of others.
        self._ending = threading.Lock()
        if seconds_left is not None and not self.is_single_process:
            self._limit = AgreedClock(seconds_left(), time.monotonic)

    def begin(self) -> None:
        """Handle signals and start the time limit.

        `end` must follow, even if a signal interrupts this call.
        """
        self.make_interrupt = lambda: self.stop_error("before its first step")
        if threading.current_thread() is threading.main_thread():  # Python sets handlers only there
            self._set_handlers()
        if self._seconds_left is not None and self.is_single_process:
            # Computed here, because the limit counts from when the run was made, which may be long
            # before it is entered. threading rejects waits above TIMEOUT_MAX, 292 years.
            seconds = min(self._seconds_left(), threading.TIMEOUT_MAX)
            self._timer = threading.Timer(seconds, self._expire)
            self._timer.daemon = True
            self._timer.start()

    def _set_handlers(self) -> None:
        _restore_ended_runs()
        if not self.is_single_process:
            self._handler_of_jax = _action_outside_python(signal.SIGTERM)
        handled: list[signal.Signals] = []
        if self.is_single_process or self._handler_of_jax is not None:
            handled.append(signal.SIGTERM)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            handled.append(signal.SIGINT)
        for number in itertools.chain(handled, filter(_has_default_action, _OPTIONAL_SIGNALS)):
            # Recorded before a signal can interrupt this.
            self._previous_handlers[number] = signal.getsignal(number)
            signal.signal(number, self._handle)
        _active.append(self)

    def end(self) -> None:
        """Restore the previous handlers; outside the main thread, at the next signal or run."""
        with self._ending:  # the timer has sent its signal, or never will
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
        if self in _active:
            _active.remove(self)
        if threading.current_thread() is threading.main_thread():
            self.restore()
        elif self._previous_handlers:
            # A generator that holds the run was closed, or collected, in another thread, where
            # Python sets no handlers.
            _ended_elsewhere.append(self)

    def restore(self) -> None:
        """Set the previous handlers again."""
        for number, handler in self._previous_handlers.items():
            later = next(
                (run for run in _active if run._previous_handlers.get(number) == self._handle), None
            )
            if later is not None:
                # A run that began later continues, and restores the handler when it ends.
                later._previous_handlers[number] = handler
                continue
            # None: the handler was not set from Python, so Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous_handlers = {}
        self._restore_handler_of_jax()

    def _restore_handler_of_jax(self) -> None:
        if self._handler_of_jax is not None:
            ctypes.CDLL(None).sigaction(int(signal.SIGTERM), self._handler_of_jax, None)

    def _expire(self) -> None:
        """Called by the timer, in its thread: act like SIGTERM."""
        with self._ending:
            if self._timer is None or self.received is not None:
                return
            self._is_limit = True
            if not self._send_to_itself(signal.SIGTERM):
                self.received = signal.SIGTERM

    def _send_to_itself(self, number: signal.Signals) -> bool:
        """Signal the main thread, which ends a wait there; return whether this run handles it."""
        main = threading.main_thread().ident
        # The run may be in another thread, or a hook may have set a handler.
        if (
            main is None
            or number not in self._previous_handlers
            or signal.getsignal(number) != self._handle
        ):
            return False
        signal.pthread_kill(main, number)
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Record a signal. What this raises, it raises wherever the main thread is."""
        if self in _ended_elsewhere:
            _restore_ended_runs()
            signal.raise_signal(number)  # for the handler before this one
            return
        if self.received is not None:
            if number == signal.SIGINT:
                self.received_twice = True
                raise KeyboardInterrupt
            return
        self.received = signal.Signals(number)
        self.received_at = time.time()
        if self.is_single_process:
            error = self.make_interrupt()
            if error is not None:
                raise error
            return
        # Several processes stop after the same call, so here nothing is interrupted.
        if not self.stop_all():
            # The other processes cannot be stopped, so this one ends by a SIGTERM, which a run does
            # not handle without the service. Otherwise the signal would be ignored.
            processes.request_stop()

    # Waits that a signal interrupts. `make_interrupt` decides what it raises when it arrives: an
    # exit during the start, `StopWaiting` during the wait for a batch
    # (`BatchFeeder.signal_exception`) and within `allow_interrupts`, nothing after
    # `disable_interrupts`. A wait for another thread does not need that: `wait_for` polls `check`,
    # which raises for a signal that was only recorded. `can_interrupt`, of a source or a chunk,
    # says whether no batch is lost by it.

    def disable_interrupts(self) -> None:
        """From now on, the first signal raises nothing."""
        self.make_interrupt = _only_record

    @contextlib.contextmanager
    def allow_interrupts(self) -> Iterator[None]:
        """A context that the first signal, even an earlier one, leaves by `StopWaiting`."""
        outer = self.make_interrupt
        self.make_interrupt = StopWaiting
        try:
            self.check()
            yield
        finally:
            self.make_interrupt = outer

    def check(self) -> None:
        """Raise `StopWaiting` if a signal has arrived; several processes stop together instead."""
        if self.is_single_process and self.received is not None:
            raise StopWaiting

    def wait_for(self, task: Task[Any], *, can_interrupt: bool = True) -> None:
        wait_until_done(task, self.check if can_interrupt else None)

    def poll_stop_signal(self) -> bool:
        """Whether the run stops; called after each call and between evaluation batches."""
        if self.is_single_process:
            return self.received is not None
        if self._has_agreed:
            return True
        self._polls += 1
        # Both are called in any case, as all processes must call them equally often.
        is_over = self._limit is not None and self._limit.due(self._polls)
        is_preempted = processes.should_stop()
        if not is_over and not is_preempted:
            return False
        self._has_agreed = True
        self._is_limit = is_over
        self._agree_on_signal()
        return True

    def stop_all(self) -> bool:
        """Request from JAX's service that all processes stop after the same call, as for a signal.

        The service polls for requests once a second. Return False if there is none.
        """
        if self._handler_of_jax is None:
            return False
        if not self._has_asked:
            self._has_asked = True
            self._restore_handler_of_jax()  # which receives the signal that is sent now
            processes.request_stop()
        return True

    def agree_at_end(self) -> None:
        """Let all processes exit by a signal that one of them received too late for the others."""
        if not self.is_single_process and processes.any_process(self.received is not None):
            self._agree_on_signal()
            processes.note_late_stop()

    def _agree_on_signal(self) -> None:
        """Agree on the signal that the message names, and on the exit code.

        If this process received SIGINT itself, that decides its exit code.
        """
        own_signal = 0
        if self.received is not None and self.received_at is not None:
            own_signal = int(self.received)
        rows = processes.ints_of_all(own_signal, int(1e6 * (self.received_at or 0.0)))
        receivers: list[_Receiver] = []
        for process, (number, microseconds) in enumerate(rows):
            if number:
                receivers.append(_Receiver(microseconds, number, process))
        if self.received != signal.SIGINT:
            signals = [receiver.number for receiver in receivers]
            agreed = max((number for number in signals if number in _OPTIONAL_SIGNALS), default=0)
            self.received = signal.Signals(agreed or signal.SIGTERM)
        if not receivers or len(receivers) == len(rows):
            return
        first = min(receivers)
        name = signal.Signals(first.number).name
        when = datetime.fromtimestamp(first.microseconds / 1e6, UTC)
        numbers = format_list([str(receiver.process) for receiver in receivers], 8)
        which = f"process {numbers}" if len(receivers) == 1 else f"processes {numbers}"
        self._cause = f"{name} at {which} of {len(rows)} ({when:%Y-%m-%d %H:%M:%S} UTC)"

    @property
    def reason(self) -> str:
        if self._is_limit:
            return "stop_secs"
        return self._cause or (self.received or signal.SIGTERM).name

    def stop_error(self, when: str) -> BaseException:
        """Return the exception that obeys the signal, after a line in the log."""
        received = self.received or signal.SIGTERM
        message = f"{self.reason} stopped the run {when}"
        logger.info(message)
        error: BaseException
        if received == signal.SIGINT:
            error = KeyboardInterrupt(message)
        else:
            error = Preempted(message, 128 + received)
        self._raised_id = id(error)
        return error

    def has_raised(self, error: BaseException) -> bool:
        """Whether this error, being handled, is the one that `stop_error` returned last."""
        return id(error) == self._raised_id


def _has_default_action(number: signal.Signals) -> bool:
    return signal.getsignal(number) == signal.SIG_DFL and _action_outside_python(number) is None


def _action_outside_python(number: signal.Signals) -> Any:
    """Return the action of a handler set in C (faulthandler, JAX), unseen by Python; or None."""
    if signal.getsignal(number) not in (signal.SIG_DFL, None):
        return None
    action = ctypes.create_string_buffer(512)  # a `struct sigaction`, which begins with the handler
    is_found = ctypes.CDLL(None).sigaction(int(number), None, action) == 0
    if not is_found or not any(action.raw[: ctypes.sizeof(ctypes.c_void_p)]):
        return None
    return action


# Processes that are forked during a run.
#
# With the run's handlers, a child would only record the signal that should end it. Its signals are
# blocked until it has the previous handlers.

_active: list[StopSignals] = []
"""The runs whose handlers are set, the innermost last."""
_ended_elsewhere: list[StopSignals] = []
"""The runs that ended in another thread than the main one, and whose handlers are still set."""
_fork = threading.local()
"""`mask`: the mask of signals of the thread that forks, from before it."""


def _restore_ended_runs() -> None:
    """Called in the main thread."""
    while _ended_elsewhere:
        _ended_elsewhere.pop().restore()


def _block_signals() -> None:
    handled: set[signal.Signals] = set()
    for run in (*_active, *_ended_elsewhere):
        handled |= run._previous_handlers.keys()
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, handled)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _restore_in_child() -> None:
    _restore_ended_runs()
    while _active:
        _active.pop().restore()
    _unblock_signals()


os.register_at_fork(
    before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_restore_in_child
)
