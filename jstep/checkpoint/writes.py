"""Writes of checkpoints in the background, which the interpreter finishes before it exits."""

import atexit
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable
from concurrent import futures

from jstep.checkpoint.listing import TEMPORARY

_logger = logging.getLogger("jstep")

IN_FLIGHT: "dict[str, BackgroundWrite]" = {}
"""Path of a temporary directory, or name of an attempt → its write."""


class BackgroundWrite:
    """The write of a checkpoint in the background, which the interpreter finishes before it exits.

    `run` writes it, or waits until it is written; its error is the error of the write.
    """

    def __init__(self, name: str, run: Callable[[], None], thread: str) -> None:
        from jstep.core.threads import in_background

        def write() -> None:
            run()
            self.detach()

        self._name, self._pid = name, os.getpid()
        IN_FLIGHT[name] = self
        _finish_at_exit()
        self._done = in_background(write, name=thread, daemon=True)

    def detach(self) -> None:
        """Let the interpreter exit without waiting for the write."""
        IN_FLIGHT.pop(self._name, None)

    def join(self) -> None:
        """Wait for the write to end, whether it fails or not; do nothing in a fork, whose parent writes."""
        if self._pid == os.getpid():
            futures.wait([self._done])

    def wait(self) -> None:
        """Wait like `join`, and raise the error of a failed write."""
        self.join()  # after Ctrl-C, the interpreter waits for the write, and logs its error
        if self._pid == os.getpid():
            self.detach()
            self._done.result()


@functools.cache
def _finish_at_exit() -> None:
    """Register the saves in progress to be finished at exit, which ends their threads."""
    # Executors refuse work once threading shuts down, which happens before atexit functions run.
    with contextlib.suppress(RuntimeError):  # it is shutting down already
        getattr(threading, "_register_atexit", atexit.register)(_finish)


def _finish() -> None:
    for name, write in list(IN_FLIGHT.items()):
        try:
            write.wait()
        except Exception:
            _logger.exception("%s was not saved", name.partition(TEMPORARY)[0])
