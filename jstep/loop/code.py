"""The code of a run: the commit of its repository, and a hash of uncommitted edits."""

import contextlib
import hashlib
import logging
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

from jstep.core.checks import truncate
from jstep.hooks.card_differences import UNKNOWN

GIT_TIMEOUT_SECS = 2.0
"""The time limit for git, in seconds."""
_SOURCES = tuple(f".{end}".encode() for end in "py pyx sh c cc cpp cu cuh h hpp".split())  # noqa: SIM905
_OTHERS = ("DIR", "WORK_TREE", "INDEX_FILE", "COMMON_DIR", "OBJECT_DIRECTORY", "ALTERNATE_OBJECT_DIRECTORIES", "PREFIX")
"""Suffixes of the variables that point git at another repository, as in its hooks."""
_STATUS = ("status", "--porcelain=v2", "-z", "--no-renames", "--untracked-files=all", "--ignore-submodules=none")
_logger = logging.getLogger("jstep")


def code_version() -> dict[str, Any] | None:
    """Return the commit of the program's repository, and a hash of uncommitted edits; None if unknown.

    The repository is that of the main file, or else of the current directory.
    """
    deadline = time.monotonic() + GIT_TIMEOUT_SECS
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    with contextlib.suppress(OSError):
        places = [*([pathlib.Path(main).absolute().parent] if main else []), pathlib.Path.cwd()]
        where = next((place for place in places if any((up / ".git").exists() for up in (place, *place.parents))), None)
        return None if where is None else _code_in(os.fspath(where), deadline)
    return None


def _code_in(where: str, deadline: float) -> dict[str, Any] | None:
    try:
        root = os.fsdecode(_git(where, deadline, "rev-parse", "--show-toplevel").rstrip(b"\r\n"))
    except FileNotFoundError:  # no git
        return None
    except Exception as error:
        if "not a git repository" not in str(error):
            _logger.info("the commit of this run is not known: %s", truncate(str(error), 300))
        return None
    try:
        commit = _git(root, deadline, "rev-parse", "--verify", "--quiet", "HEAD").decode().strip()
    except Exception:  # no commit
        return None
    try:
        return {"commit": commit, "edits": _edits(root, deadline)}
    except Exception:
        return {"commit": commit, "edits": UNKNOWN}


def _git(where: str, deadline: float, *words: str) -> bytes:
    """Run git without writing anything; kill it and its children at the deadline."""
    others = {f"GIT_{end}" for end in _OTHERS}
    environment = {name: value for name, value in os.environ.items() if name not in others}
    process = subprocess.Popen(
        ["git", "-c", "core.fsmonitor=false", "-C", where, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},  # git must not refresh the index
        start_new_session=True,  # its children end with it, and Ctrl-C is not for it
    )
    try:
        output, problem = process.communicate(timeout=max(0.01, deadline - time.monotonic()))
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"git {words[0]} took longer than {GIT_TIMEOUT_SECS:g} s") from None
        raise
    if process.returncode:
        raise OSError(problem.decode(errors="replace").strip().split("\n")[0])
    return output


def _edits(root: str, deadline: float) -> str | None:
    """Return a hash of uncommitted edits, or None; equal edits hash alike in every clone."""
    edited: dict[bytes, bytes] = {}
    for entry in filter(None, _git(root, deadline, *_STATUS).split(b"\0")):
        *fields, path = entry.split(b" ", {b"1": 8, b"u": 10}.get(entry[:1], 1))
        if fields[0] == b"?" and not path.endswith(_SOURCES):
            continue
        at = os.path.join(root, os.fsdecode(path))
        if len(fields) > 2 and fields[2].startswith(b"S"):  # a submodule: its commit, and its edits
            head = _git(at, deadline, "rev-parse", "--verify", "--quiet", "HEAD") if os.path.isdir(at) else b"gone"
            inner = _edits(at, deadline) if os.path.isdir(at) else None
            if fields[2][1:2] != b"C" and inner is None and head != b"gone":
                continue
            edited[path] = head + (inner or "").encode()
        else:
            edited[path] = _content(at, deadline)
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(edited):
        digest.update(b"%d %s %d " % (len(path), path, len(edited[path])) + edited[path])
    return digest.hexdigest() if edited else None


def _content(path: str, deadline: float) -> bytes:
    if os.path.islink(path):
        return b"link " + os.fsencode(os.readlink(path))
    digest = hashlib.blake2b(digest_size=16)
    try:
        with open(path, "rb") as file:
            while part := file.read(2**20):
                digest.update(part)
                if time.monotonic() > deadline:
                    raise TimeoutError
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return b"gone"
    return digest.digest()
