"""Identity of the process that writes a prefix, and whether it is alive."""

import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Any


def this_process() -> dict[str, Any]:
    """Return a JSON dict that identifies this process among all hosts."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "space": _space(), "pid": pid, "started": started(pid)}


def is_alive(owner: Mapping[str, Any]) -> bool | None:
    """Return whether a process is alive; None if it is on another host or in another container."""
    if owner.get("host") != socket.gethostname() or owner.get("space", _space()) != _space():
        return None
    pid = owner.get("pid", -1)
    return isinstance(pid, int) and pid > 0 and owner.get("started") == started(pid) is not None


def started(pid: int) -> str | None:
    """Return the start time of a process of this host in system ticks, which identifies it together with its PID."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]  # killed, but not yet reaped by its parent
    if os.name != "posix":
        return "unknown"  # os.kill would end the process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "unknown"


def _space() -> str:
    """Return the namespace of PIDs: the boot ID separates hosts of the same name, the PID namespace containers."""
    found = []
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        found.append(file.read().strip())
    with contextlib.suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)


def refusal(directory: str, prefix: str, owner: Mapping[str, Any]) -> str:
    """Return the error message for a second writer."""
    host, pid = owner.get("host", "an unknown host"), owner.get("pid", "unknown")
    mine = pid == os.getpid() and host == socket.gethostname() and owner.get("space", _space()) == _space()
    who = f"process {pid} on {host}" + (", which is this one" if mine else "")
    way_out = (
        "close the other Saver first (`with Saver(…) as saver:` does)" if mine else "wait for that process or end it"
    )
    return (
        f"{prefix}-* in {directory} is being written by {who}: one writer at a time, or one run would destroy the "
        f"other's checkpoints. Give this run its own directory or prefix, or {way_out}."
    )
