"""Windows or macOS, simulated for the modules of jstep alone: what a system lacks is missing, what it refuses fails.

`install("win32")` must be called before jstep is imported. The modules of jstep then see an `os`, a `signal`, a `time`
and a `sys` without the names that the documentation of Python gives to other systems, and no `fcntl` on Windows, whose
`msvcrt` locks by `flock`. There, a file that is open cannot be removed or replaced, no folder can be opened, `fsync`
wants a descriptor that may write, a rename replaces nothing, and `os.kill` ends the process.
"""

import builtins
import errno
import fcntl
import os
import signal
import sys
import time
import types

LACKS = {
    "win32": {
        "os": "fork pread pwrite sysconf fdatasync register_at_fork getuid statvfs setsid killpg O_CLOEXEC O_DIRECTORY",
        "signal": "SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGALRM pthread_kill pthread_sigmask",
        "time": "clock_gettime CLOCK_BOOTTIME CLOCK_MONOTONIC",
        "modules": "fcntl resource pwd termios",
    },
    "darwin": {"os": "fdatasync", "signal": "", "time": "CLOCK_BOOTTIME", "modules": ""},
}


class Proxy(types.ModuleType):
    def __init__(self, real, lacks, **own):
        super().__init__(real.__name__)
        vars(self).update(own, _real=real, _lacks=lacks.split())

    def __getattr__(self, name):
        if name in self._lacks:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._real, name)


def refused(path, number):
    raise OSError(number, os.strerror(number), path)


def refuse_open(path):
    """Refuse what Windows does to no open file, nor to a folder with one."""
    path = os.path.realpath(path)
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target == path or target.startswith(path + os.sep):
            refused(path, errno.EACCES)


def without(name):
    def removed(path, *args, **kwargs):
        refuse_open(path)
        return getattr(os, name)(path, *args, **kwargs)

    return removed


def moved(name):
    def move(source, target):
        if set('<>:"|?*') & set(os.path.basename(os.fsdecode(target))):
            refused(target, errno.EINVAL)
        refuse_open(source)
        if os.path.lexists(target):
            refuse_open(target)
            if name == "rename" or os.path.isdir(target):
                refused(target, errno.EEXIST)
        return getattr(os, name)(source, target)

    return move


def opened(path, flags, mode=0o777):
    if os.path.isdir(path) or str(path).startswith("/proc"):
        refused(path, errno.EACCES)
    return os.open(path, flags, mode)


def flushed(handle):
    if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        refused(str(handle), errno.EBADF)
    os.fsync(handle)


def plain_open(path, mode="r", *args, **kwargs):
    if str(path).startswith("/proc/"):
        refused(path, errno.ENOENT)
    if "b" not in mode and SYSTEM[0] == "win32" and not args:
        kwargs.setdefault("encoding", "cp1252")
    return open_before(path, mode, *args, **kwargs)


open_before, SYSTEM = builtins.open, []


def locking(handle, mode, number):
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def install(system):
    """Let the modules of jstep see that system; those that are imported later, such as the one that calls this."""
    SYSTEM[:] = [system]
    lacks, own = LACKS[system], {}
    if system == "win32":
        own = {name: without(name) for name in ("unlink", "remove", "rmdir")}
        own |= {name: moved(name) for name in ("rename", "replace")}
        own |= {"name": "nt", "open": opened, "fsync": flushed, "kill": lambda pid, number: os._exit(99)}
        own |= {"supports_fd": os.supports_fd - {os.utime}, "readlink": lambda path: refused(path, errno.ENOENT)}
    proxies = {
        "os": Proxy(os, lacks["os"], **own),
        "signal": Proxy(signal, lacks["signal"]),
        "time": Proxy(time, lacks["time"]),
        "sys": Proxy(sys, "", platform=system),
    }
    if system == "win32":
        proxies["msvcrt"] = Proxy(types.ModuleType("msvcrt"), "", locking=locking, LK_NBLCK=2)
    before = builtins.__import__

    def imported(name, globals=None, locals=None, fromlist=(), level=0):
        if not level and globals and str(globals.get("__name__")).split(".")[0] == "jstep":
            globals.setdefault("open", plain_open)
            if name in lacks["modules"].split():
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in proxies:
                return proxies[name]
        return before(name, globals, locals, fromlist, level)

    builtins.__import__ = imported
