"""Finding event files, locally and in object stores."""

import os
import stat

from jstep.stores import is_directory, is_url, join, names_in, opened, walked


def is_event_file(name: str) -> bool:
    """Whether TensorBoard reads files of this name."""
    return "tfevents" in os.path.basename(name)


def event_files(path: str) -> list[str]:
    """Return the event files of a directory (or URL) in the order they were written, or a single file itself.

    Directories and pipes with the name of an event file are left out: reading them would fail or wait forever.
    """
    if not is_directory(path):
        return [path]
    return [file for name in filter(is_event_file, names_in(path)) if _is_file(file := join(path, name))]


def find_runs(logdir: str) -> list[str]:
    """Return the directories at and below `logdir` that hold event files, sorted."""
    return [
        path
        for path, names in walked(logdir)
        if any(_is_file(join(path, name)) for name in filter(is_event_file, names))
    ]


def check_file(path: str) -> None:
    """Check that events can be read from a path.

    Raises:
        FileNotFoundError: The file does not exist.
        IsADirectoryError: The path is a directory; the message lists the event files in it.
        OSError: The path is not a regular file, or cannot be read.
    """
    if is_directory(path):
        files = list(filter(is_event_file, names_in(path)))
        found = f"; it holds {', '.join(files[:5])}" if files else "; it holds no event files"
        raise IsADirectoryError(f"summary_iterator reads one event file, and {path!r} is a directory{found}")
    if not is_url(path) and os.path.exists(path) and not _is_file(path):
        raise OSError(f"{path!r} is not a file (a pipe, a socket or a device), and events are read from files")
    with opened(path):
        pass  # a missing file is an error here, not at the first event


def _is_file(path: str) -> bool:
    if is_url(path):
        return True
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:  # such as a broken link
        return False
