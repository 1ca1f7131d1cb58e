"""Faults, delays and side effects at file operations, for tests of code that uses files.

Python reports a file operation before it runs, whichever module and thread runs it: it raises an
audit event (https://docs.python.org/3/library/audit_events.html). A test names the event and the
path, and not the function of the package that performs the operation:

    with before("open", "*/manifest.json", disk_is_full, mode="w"):
        saver.save(state)

Only Python's operations are reported: a library in C++, such as tensorstore, raises no events.
"""

import contextlib
import errno
import fnmatch
import functools
import itertools
import math
import os
import sys
import threading
from collections.abc import Callable

Action = Callable[[str], None]
"""A function of the path of an operation; the operation fails with the exception that it raises."""

REMOVALS = ("os.rename", "os.remove", "os.rmdir")
"""The operations that remove a name: renaming (also `os.replace`) and deletion."""

_CREATIONS = ("open", "os.mkdir", "os.link", "os.symlink", "os.truncate")
_FOLDER_ARGUMENTS = {"os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 2}
"""Event → the position of the descriptor of the folder that its path is relative to, or of -1."""
_WAIT = 60.0
"""Seconds after which a held operation fails."""

_active = ()
_changing = threading.Lock()
_thread = threading.local()


class Interception:
    """An action before the operations of some events whose path matches a pattern.

    Attributes:
        paths: The paths of the operations so far.
    """

    def __init__(self, events, pattern, action, mode, times):
        self._events, self._pattern, self._action, self._mode, self._times = (
            events,
            pattern,
            action,
            mode,
            times,
        )
        self._one_at_a_time = threading.Lock()
        self.paths = []

    def see(self, event, args):
        """Run the action if the event matches."""
        if event not in self._events or getattr(_thread, "is_acting", False):
            return
        path = _path(event, args)
        if not fnmatch.fnmatchcase(path, self._pattern):
            return
        if event == "open" and self._mode not in (None, _mode(args)):
            return
        with self._one_at_a_time:
            if self in _active and len(self.paths) < self._times:
                self.paths.append(path)
                self._act(path)

    def _act(self, path):
        _thread.is_acting = True
        try:
            self._action(path)
        finally:
            _thread.is_acting = False


def _path(event, args):
    """Return the path of an operation; for a rename, the old one."""
    path = _path_of_descriptor(args[0]) if isinstance(args[0], int) else os.fsdecode(args[0] or ".")
    position = _FOLDER_ARGUMENTS.get(event)
    if position is None or args[position] == -1:
        return path
    return os.path.join(_path_of_descriptor(args[position]), path)


def _path_of_descriptor(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # not on Linux
        return ""


def _mode(args):
    """Return "w" for a file that is opened to write, or to read and write; "r" for one that is only
    read."""
    return "w" if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) else "r"


def _hook(event, args):
    for one in _active:
        one.see(event, args)


@functools.cache
def _install():
    """Install the hook, once: Python cannot remove it. It does nothing while no interception is
    active."""
    sys.addaudithook(_hook)


@contextlib.contextmanager
def before(events, pattern, action, *, mode=None, times=math.inf):
    """Within the block, run an action before file operations, in the thread that performs them.

    Threads with a matching operation wait while the action runs in another one. The operations of
    the action itself, in its thread, are not intercepted.

    Args:
        events: Names of audit events, such as "open", "os.rename" or "fcntl.flock".
        pattern: A pattern of `fnmatch` for the whole path, in which `*` also matches slashes.
        action: The action; the operation fails with the exception that it raises.
        mode: "w" for files that are opened to write, "r" for those opened only to read; None for
            both.
        times: Only before the first so many operations.
    """
    global _active
    _install()
    made = Interception(
        (events,) if isinstance(events, str) else tuple(events), pattern, action, mode, times
    )
    with _changing:
        _active = (*_active, made)
    try:
        yield made
    finally:
        with _changing:
            _active = tuple(one for one in _active if one is not made)


@contextlib.contextmanager
def held(events, pattern, *, mode=None):
    """Hold file operations until the event is set, or the block ends."""
    released = threading.Event()
    with before(events, pattern, until(released), mode=mode):
        try:
            yield released
        finally:
            released.set()


@contextlib.contextmanager
def killed_at(number, folder):
    """Leave a folder as if the process was killed before its n-th rename or deletion (from 0) below
    the folder.

    This operation fails, and so does every later one that would change the folder. The event is set
    when it does.
    """
    killed, numbers = threading.Event(), itertools.count()

    def remove(path):
        if next(numbers) >= number:
            killed.set()
        change(path)

    def change(path):
        if killed.is_set():
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    with (
        before(REMOVALS, f"{folder}/*", remove),
        before(_CREATIONS, f"{folder}/*", change, mode="w"),
    ):
        yield killed


def until(event):
    """Return an action that waits for an event."""

    def wait(path):
        if not event.wait(_WAIT):
            raise TimeoutError(f"{path} was held for {_WAIT} s")

    return wait


def failing(number):
    """Return an action that raises the OSError of an error number."""

    def fail(path):
        raise OSError(number, os.strerror(number), path)

    return fail


disk_is_full = failing(errno.ENOSPC)
