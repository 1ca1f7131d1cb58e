"""Owners of claims, stall files and temporary files; removal of dead processes' temporary files."""

import contextlib
import os
import re
import secrets
import socket
import stat
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from jstep.stores.untrusted import MAX_CLAIM_BYTES, decode_json


def this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "space": space(), "pid": pid, "started": start_time(pid)}


def is_alive(owner: Mapping[str, Any]) -> bool | None:
    """Return whether a process is alive; None on another host or in another container."""
    if owner.get("host") != socket.gethostname() or owner.get("space", space()) != space():
        return None
    pid = owner.get("pid", -1)
    if type(pid) is not int or not 0 < pid < 2**31:
        return False
    started = start_time(pid)
    return started is not None and owner.get("started") == started


def start_time(pid: int) -> str | None:
    """Return the start time in system ticks; with the PID it identifies a process of this host."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        if fields[0] in "ZX":  # killed, but not yet reaped by its parent
            return None
        return fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "unknown"


def space() -> str:
    """Return the PID namespace.

    The boot ID separates hosts of the same name, the namespace separates containers.
    """
    parts = []
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def owner_in(data: bytes | None) -> dict[str, Any]:
    if data is None or len(data) > MAX_CLAIM_BYTES:
        return {}
    who = decode_json(data)
    return who if isinstance(who, dict) else {}


# Temporary files, which are renamed when they are complete. Their names identify the process that
# writes them.

_TEMPORARY = re.compile(
    r"\.(?P<name>.+)\.(?P<host>[0-9a-f]{8})-(?P<pid>[0-9]{1,9})-(?P<started>[0-9a-z]+)-[0-9a-f]{8}\.tmp",
    re.DOTALL,
)
_ABANDONED_SECS = 86400.0
"""The age in seconds at which a temporary file of an unreachable process counts as abandoned."""


def new_token() -> str:
    """Return a new token for names of temporary files, which also identifies this process."""
    process = this_process()
    return f"{_host_hash(process)}-{process['pid']}-{process['started']}-{secrets.token_hex(4)}"


def temporary_path(path: str, token: str) -> str:
    """Return the path of a file until it is complete; readers of a suffix do not find it."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{token}.tmp")


def remove_temporary(directory: str, is_own: Callable[[str], bool] = lambda name: True) -> None:
    """Remove the temporary files of dead processes, for files whose names are `is_own`."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory or "."):
            match = _TEMPORARY.fullmatch(name)
            if match is None or not is_own(match["name"]):
                continue
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):  # it was removed meanwhile
                if _is_abandoned(path, directory or ".", match):
                    os.unlink(path)


def _is_abandoned(path: str, directory: str, match: re.Match[str]) -> bool:
    """Return whether the process of a temporary file is dead, as far as that is known."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        return False
    process = this_process()
    if match["host"] == _host_hash(process):
        return not is_alive({**process, "pid": int(match["pid"]), "started": match["started"]})
    # The process is on another host or in another container, or this host was restarted. Both times
    # are of the file system's clock.
    return os.stat(directory).st_mtime - found.st_mtime > _ABANDONED_SECS


def _host_hash(process: Mapping[str, Any]) -> str:
    """Identify the boot of a process's host, and its container."""
    text = f"{process['host']} {process['space']}"
    return f"{zlib.crc32(text.encode()):08x}"
