"""The code of a run: the commit of its repository, and a hash of uncommitted edits.

The repository may be somebody else's: git runs no program that it names, and no network.
"""

import atexit
import contextlib
import hashlib
import logging
import os
import pathlib
import re
import selectors
import signal
import stat
import subprocess
import sys
import threading
import time
from typing import Any

from jstep.core.checks import truncate

UNKNOWN = "unknown"
"""The edits of a repository of which git could not tell, or may not be asked."""
GIT_TIMEOUT_SECS = 2.0
"""The time limit for git, in seconds."""
_MAX_BYTES = 2**26
"""The maximum size of an output of git."""
_SOURCES = tuple(f".{end}".encode() for end in "py pyx sh c cc cpp cu cuh h hpp".split())  # noqa: SIM905
_OTHERS = "DIR WORK_TREE INDEX_FILE COMMON_DIR OBJECT_DIRECTORY ALTERNATE_OBJECT_DIRECTORIES PREFIX CONFIG".split()  # noqa: SIM905
"""Suffixes of the variables that point git at another repository, as in its hooks."""
_ENVIRONMENT = {
    "GIT_OPTIONAL_LOCKS": "0",  # git must not refresh the index
    "GIT_NO_LAZY_FETCH": "1",  # of the objects that a partial clone lacks
    "GIT_ALLOW_PROTOCOL": "none",  # for versions of git that do not know GIT_NO_LAZY_FETCH
    "LC_ALL": "C",
}
_SETTINGS = ("core.fsmonitor=false", f"core.hooksPath={os.devnull}", "fetch.bundleURI=")
_STATUS = ("status", "--porcelain=v2", "-z", "--no-renames", "--untracked-files=all", "--ignore-submodules=dirty")
_NUM_FIELDS = {b"1 ": 8, b"u ": 10, b"? ": 1}
"""The number of fields before the path, by kind of entry."""
_HEAD = ("rev-parse", "--verify", "--quiet", "HEAD")
_COMMIT = re.compile(rb"[0-9a-f]{40,64}\s*")
_FILTER = re.compile(rb"filter\.(.*)\.(?:clean|process)|(lfs)\.extension\..*")
"""A setting that names a program for a filter; git-lfs runs those of `lfs.extension`."""
_logger = logging.getLogger("jstep")


def code_version() -> dict[str, Any] | None:
    """Return the commit of the program's repository, and a hash of uncommitted edits; None if unknown.

    The repository is that of the main file, or else of the current directory.
    """
    deadline = time.monotonic() + GIT_TIMEOUT_SECS
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    with contextlib.suppress(OSError):
        places = [*([pathlib.Path(main).absolute().parent] if main else []), pathlib.Path.cwd()]
        for place in map(pathlib.Path.resolve, places):
            for root in (place, *place.parents):
                if (root / ".git").exists():
                    return _code_in(os.fspath(root), deadline)
    return None


def _code_in(root: str, deadline: float) -> dict[str, Any] | None:
    try:
        commit = _git(root, deadline, *_HEAD)
        if not _COMMIT.fullmatch(commit):
            raise ValueError(f"git rev-parse returned {truncate(repr(commit), 100)}")
    except FileNotFoundError:  # no git
        return None
    except Exception as error:
        if str(error) and "not a git repository" not in str(error):  # it is empty if there is no commit
            _logger.info("the commit of this run is not known: %s", truncate(str(error), 300))
        return None
    try:
        edits = _edits(root, deadline)
    except Exception:
        edits = UNKNOWN
    return {"commit": commit.decode().strip(), "edits": edits}


_starting = threading.Lock()
"""Held from the start of a git until `_running` contains it."""
_running: dict["subprocess.Popen[bytes]", int] = {}
"""A git that runs → the process that has started it, which may have forked since."""


def _git(where: str, deadline: float, *words: str, settings: tuple[str, ...] = ()) -> bytes:
    """Run git without writing anything; kill it and its children at the deadline, or when it is done."""
    others = {f"GIT_{end}" for end in _OTHERS}
    environment = {name: value for name, value in os.environ.items() if name not in others}
    options = [word for setting in (*_SETTINGS, *settings) for word in ("-c", setting)]
    with _starting:
        process = subprocess.Popen(
            ["git", *options, "-C", where, *words],
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment | _ENVIRONMENT,
            start_new_session=True,  # its children end with it, and Ctrl-C is not for it
        )
        _running[process] = os.getpid()
    with process.stdout or contextlib.nullcontext(), process.stderr or contextlib.nullcontext():
        try:
            output, problem = _outputs(process, deadline)
        except (TimeoutError, subprocess.TimeoutExpired):
            raise TimeoutError(f"git {words[0]} took longer than {GIT_TIMEOUT_SECS:g} s") from None
        finally:
            _end(process)
            del _running[process]
    if process.returncode:
        raise OSError(problem.decode(errors="replace").strip().split("\n")[0])
    return output


def _outputs(process: "subprocess.Popen[bytes]", deadline: float) -> list[bytes]:
    """Return stdout and stderr of a process when it has ended, even if a child of it keeps them open."""
    outputs = {pipe: bytearray() for pipe in (process.stdout, process.stderr) if pipe is not None}
    with selectors.DefaultSelector() as selector:
        for pipe in outputs:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            has_ended = process.poll() is not None
            ready = selector.select(0 if has_ended else 0.02)
            if has_ended and not ready:
                break
            if time.monotonic() > deadline:
                raise TimeoutError
            for key, _ in ready:
                part = os.read(key.fd, 2**16)
                outputs[key.fileobj] += part  # type: ignore[index]  # a pipe
                if not part:
                    selector.unregister(key.fileobj)
            if max(map(len, outputs.values())) > _MAX_BYTES:
                raise ValueError(f"git returned more than {_MAX_BYTES:,} bytes")
    process.wait(max(0.01, deadline - time.monotonic()))
    return [bytes(output) for output in outputs.values()]


def _end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk
        process.wait(0.2)


@atexit.register
def _end_all() -> None:
    """End what a daemon thread has started. The lock is kept, so that it starts nothing else."""
    _starting.acquire(timeout=GIT_TIMEOUT_SECS)
    for process, parent in list(_running.items()):
        if parent == os.getpid():
            _end(process)


def _edits(root: str, deadline: float) -> str | None:
    """Return a hash of uncommitted edits, or None; equal edits hash alike in every clone."""
    found = os.fsdecode(_git(root, deadline, "rev-parse", "--show-toplevel").rstrip(b"\r\n"))
    if not os.path.samefile(root, found):
        raise ValueError("git has found another working tree")  # by core.worktree, or as `.git` is not a repository
    off = _without_filters(root, deadline)
    entries = _git(root, deadline, "ls-files", "--stage", "-z").split(b"\0")
    submodules = {entry.partition(b"\t")[2] for entry in entries if entry.startswith(b"160000 ")}
    edited: dict[bytes, bytes] = {}
    for entry in _git(root, deadline, *_STATUS, settings=off).split(b"\0"):
        if not entry or entry.startswith(b"# "):
            continue
        *fields, path = entry.split(b" ", _NUM_FIELDS[entry[:2]])
        if len(fields) < _NUM_FIELDS[entry[:2]]:
            raise ValueError(f"git status returned {entry!r}")
        if fields[0] == b"?" and not path.endswith(_SOURCES):
            continue
        if len(fields) > 2 and fields[2].startswith(b"S"):
            edited[path] = b"gone"
            submodules.add(path)
            continue
        edited[path] = _content(os.path.join(root, os.fsdecode(path)), deadline)
    for path in submodules:  # git would run their filters, too
        at = os.path.join(root, os.fsdecode(path))
        if os.path.lexists(os.path.join(at, ".git")):
            if os.path.realpath(at) != os.path.join(os.path.realpath(root), os.fsdecode(path)):
                raise ValueError("a submodule is behind a link")
            inner = _edits(at, deadline)
            if inner is not None or path in edited:
                edited[path] = _git(at, deadline, *_HEAD) + (inner or "").encode()
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(edited):
        digest.update(b"%d %s %d " % (len(path), path, len(edited[path])) + edited[path])
    return digest.hexdigest() if edited else None


def _without_filters(root: str, deadline: float) -> tuple[str, ...]:
    """Return settings that turn off the filters whose programs the repository chooses.

    The user's own ones, like git-lfs, may run. Versions of git before 2.26 do not tell whose a filter is.

    Raises:
        ValueError: The edits are unknown without them, as git would read a file that has one.
    """
    command = ("config", "--list", "-z", "--name-only")
    try:
        words = _git(root, deadline, *command, "--show-scope").split(b"\0")
        users = (b"system", b"global", b"command")
        settings = [name for scope, name in zip(words[::2], words[1::2], strict=False) if scope not in users]
    except OSError:
        settings = _git(root, deadline, *command).split(b"\0")
    names = {os.fsdecode(match[1] or match[2] or b"") for match in map(_FILTER.fullmatch, settings) if match}
    if not all(map(re.compile(r"[A-Za-z0-9_-]+").fullmatch, names)):
        raise ValueError("a filter whose name is not possible in a pathspec or with `-c`")
    off = tuple(f"filter.{name}.{key}" for name in names for key in ("clean=", "process=", "required=false"))
    files = {
        path
        for name in names
        for path in _git(root, deadline, "ls-files", "-z", "--", f":(attr:filter={name})").split(b"\0")[:-1]
    }
    if files:
        unclean = ("diff-files", "-z", "--name-only", "--ignore-submodules=all")  # by their stat
        index = _git(root, deadline, "rev-parse", "--git-path", "index").rstrip(b"\r\n")
        written = int(os.stat(os.path.join(os.fsencode(root), index)).st_mtime)
        edited = files.intersection(_git(root, deadline, *unclean, settings=off).split(b"\0"))
        if edited or any(os.lstat(os.path.join(os.fsencode(root), path)).st_mtime >= written for path in files):
            raise ValueError("a file has a filter and may have changed since the index was written")
    return off


def _content(path: str, deadline: float) -> bytes:
    if os.path.islink(path):
        return b"link " + os.fsencode(os.readlink(path))
    digest = hashlib.blake2b(digest_size=16)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a FIFO would block
            return b"gone"
        with open(path, "rb") as file:
            while part := file.read(2**20):
                digest.update(part)
                if time.monotonic() > deadline:
                    raise TimeoutError
    except (FileNotFoundError, NotADirectoryError):
        return b"gone"
    return digest.digest()
