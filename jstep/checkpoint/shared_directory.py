"""The check that all processes of a run see one directory.

The first process writes a file of a new name and announces it; the others look for it below their
own path. Comparing paths would not do: hosts mount one file system at different paths, and have
local disks of the same path.
"""

import contextlib
import json
import os
import time
from typing import NamedTuple

from jstep.core import processes
from jstep.stores.files import make_directories, new_file, remove_file
from jstep.stores.objects import START_TIMEOUT_SECS, Objects
from jstep.stores.owners import new_token, remove_temporary, space, temporary_path
from jstep.stores.urls import absolute, is_url, join_path, location

OTHER_HOST_SECS = 60.0
"""How long to look for a file of another host. A network disk may remember for this long that the
directory was missing."""
SAME_HOST_SECS = 2.0
"""How long to look for a file of this host, whose processes see each other's files immediately."""
_POLL_SECS = 0.2
_FILE = "shared"
_OBJECTS = "~directory/"
"""The beginning of the key in a bucket; it sorts before the mark, which must be the last of all
keys."""


class _Announced(NamedTuple):
    """What the first process announces.

    Attributes:
        path: Its path of the directory.
        name: The name of the file below it; empty if a PermissionError says that it may not write
            there.
        space: Its host and container.
    """

    path: str
    name: str
    space: str


def check_shared(directory: str | os.PathLike[str], argument: str) -> None:
    """Check that `directory` is the same one on all processes, which all must call this.

    If the first process may not write there (a PermissionError), nothing is checked: a run that has
    something to save fails by itself.

    Args:
        directory: The path or URL of this process.
        argument: The argument that names it, for the error.

    Raises:
        ValueError: A process does not find the file of the first one; names both paths. It is
            raised on all processes.
        OSError: The first process cannot write there, for another reason. It is raised on all
            processes.
    """
    if processes.is_single_process():
        return
    path = absolute(location(directory, argument))
    announced = _Announced(
        *json.loads(processes.text_from_first(lambda: _announce(path), (OSError,)))
    )
    problem = f"{argument}: must be one directory of all processes"
    try:
        processes.share_errors(lambda: _look_for(announced, path, argument), problem, ValueError)
    finally:
        if processes.is_process_0() and announced.name:
            _remove(path, announced.name)
    if is_url(announced.path):
        # All wait until the object is removed. A process that listed a bucket without a mark
        # meanwhile could take the list, which changes while it is read, for a truncated one.
        processes.any_process(False)


def _announce(path: str) -> str:
    name = ""
    with contextlib.suppress(PermissionError):
        name = _write_object(path) if is_url(path) else _write_file(path)
    return json.dumps(_Announced(path, name, space()))


def _write_object(url: str) -> str:
    name = f"{_OBJECTS}{new_token()}"
    objects = Objects(url)
    with objects.time_limit(START_TIMEOUT_SECS):
        objects.write(name, b"")
    return name


def _write_file(path: str) -> str:
    make_directories(path)
    remove_temporary(path, lambda name: name == _FILE)  # of a start that was killed
    file = temporary_path(os.path.join(path, _FILE), new_token())
    with new_file(file, flush=False):
        pass
    return os.path.basename(file)


def _look_for(announced: _Announced, path: str, argument: str) -> None:
    if processes.is_process_0() or not announced.name:
        return
    deadline = time.monotonic() + _secs_to_look(announced, path)
    while not _exists(path, announced.name):
        if time.monotonic() >= deadline:
            raise ValueError(
                f"{argument}={path!r}: must be the directory of process 0, got one without the "
                "file that process 0 has just written, "
                f"{join_path(announced.path, announced.name)!r}; give all processes one directory, "
                "on a file system that they share or in a bucket"
            )
        time.sleep(_POLL_SECS)


def _secs_to_look(announced: _Announced, path: str) -> float:
    if is_url(announced.path) or is_url(path):
        # An object is there for all as soon as it is written, and at another URL it never is.
        return 0.0
    return SAME_HOST_SECS if announced.space == space() else OTHER_HOST_SECS


def _exists(path: str, name: str) -> bool:
    if is_url(path):
        return Objects(path).read(name).data is not None
    return os.path.lexists(os.path.join(path, name))


def _remove(path: str, name: str) -> None:
    with contextlib.suppress(OSError):  # a file is removed by the next start
        remove_file(join_path(path, name))
