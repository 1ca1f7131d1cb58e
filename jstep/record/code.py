"""The code of a run: the commit of its repository, and a hash of uncommitted edits."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

from jstep.core.checks import truncate
from jstep.core.logs import logger

UNKNOWN = "unknown"
"""The edits of a repository if git did not find them in time, or cannot without its filters."""
GIT_TIMEOUT_SECS = 2.0
"""The time limit for git, in seconds."""
_SOURCES = tuple(f".{end}" for end in "py pyx sh c cc cpp cu cuh h hpp".split())  # noqa: SIM905
_DIFF = (
    "diff",
    "HEAD",
    "--binary",
    "--full-index",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-renames",
    "--ignore-submodules=all",  # each of them has a config of its own
)
_NO_PROGRAMS = ("core.fsmonitor=false", f"core.hooksPath={os.devnull}", "core.untrackedCache=false")
"""Settings that keep git from running what a config names, besides filters."""
_CONFIG = ("config", "--list", "--name-only", "-z")
_FILTER = re.compile(r"filter\.(.*)\.[^.]+", re.DOTALL)
"""A setting of a filter, in the output of `_CONFIG`."""
_UNTRACKED = ("ls-files", "--others", "--exclude-standard", "-z")
_REPOSITORY_VARIABLES = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
)
"""Variables that name another repository: git sets them for its hooks, which may start a run."""


def code_version() -> dict[str, Any] | None:
    """Return the program's `commit`, and `edits`, a hash of its uncommitted edits; or None."""
    deadline = time.monotonic() + GIT_TIMEOUT_SECS
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        directory = os.getcwd() if main is None else os.path.dirname(os.path.realpath(main))
        output = _git(directory, deadline, "rev-parse", "--verify", "--quiet", "HEAD")
        commit = output.decode().strip()
    except FileNotFoundError:  # no git, or the directory is gone
        return None
    except Exception as error:
        if str(error) and "not a git repository" not in str(error):
            # The error's text is empty if there is no commit.
            logger.info("the commit of this run is not known: %s", truncate(str(error), 300))
        return None
    try:
        edits = _edits(directory, deadline)
    except Exception:
        # Perhaps the repository is too large for the time limit: its commit is known.
        edits = UNKNOWN
    return {"commit": commit, "edits": edits}


def _git(directory: str, deadline: float, *words: str) -> bytes:
    # Not from the current directory, which may be somebody else's: an empty entry of PATH names it.
    path = filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep))
    git = shutil.which("git", path=os.pathsep.join(path))
    if git is None:
        raise FileNotFoundError("git")
    environment = dict(os.environ)
    for name in _REPOSITORY_VARIABLES:
        environment.pop(name, None)
    # git must not refresh the index.
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    # Nor may it fetch objects that a partial clone lacks, by a program that the repository's config
    # names.
    environment |= {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
    settings = [word for setting in _NO_PROGRAMS for word in ("-c", setting)]
    # There are no pipes: a loader may fork workers meanwhile, which would keep them open, and
    # `subprocess` would wait for the workers' end. So the output is in files. And with a path and
    # without `close_fds`, the program is spawned, not forked.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        done = subprocess.run(
            [git, "-C", directory, *settings, *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            close_fds=False,
            timeout=max(0.01, deadline - time.monotonic()),
            env=environment,
        )
        out.seek(0)
        errors.seek(0)
        if done.returncode:
            raise OSError(errors.read().decode(errors="replace").strip().split("\n")[0])
        return out.read()


def _edits(directory: str, deadline: float) -> str | None:
    """Return a hash of uncommitted edits and of new source files; None if there are none."""
    settings = os.fsdecode(_git(directory, deadline, *_CONFIG)).split("\0")
    matches = map(_FILTER.fullmatch, settings)
    filters = {match[1] for match in matches if match is not None}
    # A filter is a program through which git passes each changed file. All are turned off: one from
    # the user's own config is as unsafe as one from the repository's, because it runs at the root
    # of the repository, where `python -m` imports the modules that are there.
    off: list[str] = []
    for name in filters:
        if "=" in name:
            # git would take the part before it for the whole name of the setting.
            return UNKNOWN
        for setting in ("clean=", "process=", "required=false"):
            off += ["-c", f"filter.{name}.{setting}"]
    root = os.fsdecode(_git(directory, deadline, "rev-parse", "--show-toplevel").rstrip(b"\r\n"))
    diff = _git(root, deadline, *off, *_DIFF)
    if diff and filters:
        paths = _git(root, deadline, *off, *_DIFF, "--name-only", "-z").split(b"\0")[:-1]
        attributes = _git(
            root, deadline, "check-attr", "-z", "filter", "--", *map(os.fsdecode, paths)
        )
        # The output is path, attribute and value of each file. Without its filter, a file may look
        # edited and not be.
        if filters & {os.fsdecode(value) for value in attributes.split(b"\0")[2::3]}:
            return UNKNOWN
    untracked = map(os.fsdecode, sorted(_git(root, deadline, *_UNTRACKED).split(b"\0")))
    new = [
        path
        for path in untracked
        if path.endswith(_SOURCES) and os.path.isfile(os.path.join(root, path))
    ]
    if not diff and not new:
        return None
    digest = hashlib.blake2b(diff, digest_size=8)
    if new:
        digest.update(os.fsencode("\0".join(new)))
        digest.update(_git(root, deadline, "hash-object", "--no-filters", "--", *new))
    return digest.hexdigest()
