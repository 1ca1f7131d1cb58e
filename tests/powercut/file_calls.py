"""The calls of a program that change files, in their order: recorded by a preloaded library, and
made to fail.

A recorded program is started with `python`, and calls `recording(folder, log)`; `read(log)` returns
the calls of all its threads, also those of libraries in C++, below that folder. `mark` adds a text
to the record, such as "acknowledged 3". Flushes by Python are marked with their place in jstep.
`failing` makes one of the calls fail.
"""

import contextlib
import ctypes
import enum
import functools
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from typing import NamedTuple

import jstep

HERE = pathlib.Path(__file__).parent
_PACKAGE = os.path.dirname(os.path.abspath(jstep.__file__))
_HEAD = struct.Struct("=IIIIQqQ")


class Kind(enum.IntEnum):
    """What a call does; as in file_calls.c. OPEN is of a file that is only read, CLOSE of one that
    was written."""

    CREATE = 1
    TRUNCATE = 2
    WRITE = 3
    SYNC = 4
    MKDIR = 5
    RMDIR = 6
    UNLINK = 7
    RENAME = 8
    LINK = 9
    MARK = 10
    OPEN = 11
    CLOSE = 12


class Call(NamedTuple):
    """A call that succeeded; the path of a mark is its text, RENAME and LINK have another one."""

    kind: Kind
    path: str
    other: str = ""
    inode: int = 0
    at: int = 0
    data: bytes = b""
    thread: int = 0


@functools.cache
def library():
    """Compile the library, once; return its path, or "" and why there is none."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if sys.platform != "linux":
        return "", f"file calls are recorded on Linux only, this is {sys.platform}"
    if compiler is None:
        return "", "there is no C compiler for the library that records file calls"
    path = os.path.join(tempfile.mkdtemp(prefix="jstep-file-calls-"), "file_calls.so")
    command = [
        compiler, "-O1", "-w", "-shared", "-fPIC", "-o", path, HERE / "file_calls.c", "-ldl",
        "-lpthread",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return (
        (path, "")
        if done.returncode == 0
        else ("", f"{compiler} cannot compile file_calls.c: {done.stderr[-500:]}")
    )


def python(code, *args, timeout=300):
    """Run a program whose calls can be recorded, with its signals reset, and return what it
    printed."""
    path, reason = library()
    assert path, reason
    env = {**os.environ, "LD_PRELOAD": path, "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), os.path.dirname(_PACKAGE)])
    command = [
        sys.executable,
        "-P",
        "-c",
        "import file_calls; file_calls.reset_signals()\n" + code,
        *map(str, args),
    ]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, err[-4000:]
    return out


def reset_signals():
    """Undo that the parent ignored signals, as under nohup."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@functools.cache
def _loaded():
    found = ctypes.CDLL(None)
    found.calls_failed.restype = ctypes.c_char_p
    return found


def mark(text):
    """Add a text to the record; nothing without a recording."""
    with contextlib.suppress(AttributeError):  # the library is not loaded
        _loaded().calls_mark(text.encode())


@contextlib.contextmanager
def recording(folder, log=None):
    """Record all calls below a folder, in which all is durable; without a log, they may only
    fail."""
    folder = os.path.realpath(folder)
    fd = -1 if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if fd >= 0:
        for call in _existing(folder):
            _append(fd, call)
    _loaded().calls_record(folder.encode(), fd)
    try:
        yield
    finally:
        _loaded().calls_record(b"", -1)
        if fd >= 0:
            os.close(fd)


def _existing(folder):
    """Yield calls that create all that is in a folder, durably."""
    yield Call(Kind.MKDIR, folder, inode=os.stat(folder).st_ino)
    for top, folders, files in os.walk(folder):
        for name in folders:
            yield Call(
                Kind.MKDIR, os.path.join(top, name), inode=os.stat(os.path.join(top, name)).st_ino
            )
        for name in files:
            path = os.path.join(top, name)
            inode = os.stat(path).st_ino
            yield Call(Kind.CREATE, path, inode=inode)
            yield Call(Kind.WRITE, path, inode=inode, data=pathlib.Path(path).read_bytes())
            yield Call(Kind.SYNC, path, inode=inode)
        yield Call(Kind.SYNC, top, inode=os.stat(top).st_ino)


def _append(fd, call):
    a, b = call.path.encode(), call.other.encode()
    head = _HEAD.pack(call.kind, call.thread, len(a), len(b), call.inode, call.at, len(call.data))
    os.write(fd, head + a + b + call.data)


def read(log):
    """Read a record."""
    data, at, calls = pathlib.Path(log).read_bytes(), 0, []
    while at < len(data):
        kind, thread, first, second, inode, position, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        parts = []
        for length in (first, second, size):
            parts.append(data[at : at + length])
            at += length
        calls.append(
            Call(
                Kind(kind), parts[0].decode(), parts[1].decode(), inode, position, parts[2], thread
            )
        )
    return calls


CHANGES = frozenset(Kind) - {Kind.MARK, Kind.OPEN}
"""The calls that change a file, its folder, or what is on the disk."""


class Failure:
    """The first call that failed: its kind and path; "" while none did."""

    call = ""


@contextlib.contextmanager
def failing(at, number, *, kinds=CHANGES, lasts=False):
    """Let the n-th recorded call of some kinds fail, and with `lasts` all later ones; the failure
    says which."""
    failure = Failure()
    _loaded().calls_fail(
        ctypes.c_long(at), sum(1 << kind for kind in kinds), b"", number, int(lasts)
    )
    try:
        yield failure
    finally:
        kind, _, path = _loaded().calls_failed().decode().partition(" ")
        failure.call = f"{Kind(int(kind)).name} {path}" if kind else ""
        _loaded().calls_fail(ctypes.c_long(0), 0, b"", 0, 0)
