"""macOS, simulated for the modules of jstep alone: what a system lacks is missing.

`install()` must be called before jstep is imported. The modules of jstep then see an `os`, a `time`
and a `sys` without the names that the documentation of Python gives to other systems.
"""

import builtins
import os
import sys
import time
import types


class Proxy(types.ModuleType):
    def __init__(self, real, lacks, **own):
        super().__init__(real.__name__)
        vars(self).update(own, _real=real, _lacks=lacks.split())

    def __getattr__(self, name):
        if name in self._lacks:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._real, name)


def plain_open(path, *args, **kwargs):
    if str(path).startswith("/proc/"):
        raise FileNotFoundError(path)
    return open_before(path, *args, **kwargs)


open_before = builtins.open


def install():
    """Let the modules of jstep see macOS; those that are imported later, such as the one that calls
    this."""
    proxies = {
        "os": Proxy(os, "fdatasync"),
        "time": Proxy(time, "CLOCK_BOOTTIME"),
        "sys": Proxy(sys, "", platform="darwin"),
    }
    before = builtins.__import__

    def imported(name, globals=None, locals=None, fromlist=(), level=0):
        if not level and globals and str(globals.get("__name__")).split(".")[0] == "jstep":
            globals.setdefault("open", plain_open)
            if name in proxies:
                return proxies[name]
        return before(name, globals, locals, fromlist, level)

    builtins.__import__ = imported
