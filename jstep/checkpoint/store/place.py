"""Putting a checkpoint into its place in a directory, or away.

A checkpoint is written under a temporary name, its manifest last, and renamed. One that is deleted is renamed first.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable

from jstep.checkpoint.store.listing import DELETED, REPLACED, TEMPORARY, is_remains, is_whole, listed

_logger = logging.getLogger("jstep")


def publish(temporary: str, final: str, files: Iterable[str] = ()) -> None:
    """Gives a finished checkpoint its name. One of the same name goes only once the new one is there.

    Args:
        temporary: Its folder.
        final: The path it gets.
        files: What has to be there under the new name.

    Raises:
        FileNotFoundError: Somebody has removed one of them meanwhile.
    """
    replaced = final + REPLACED
    if os.path.lexists(final):
        if is_remains(final):
            remove(replaced)
            os.rename(final, replaced)
        else:
            _set_aside(final)
    sync(temporary)
    os.rename(temporary, final)
    lacks = next((file for file in files if not os.path.isfile(os.path.join(final, file))), None)
    if lacks is not None:
        # Somebody is removing the folder, and went on after it was renamed.
        evict(final)
        if os.path.lexists(replaced):
            os.rename(replaced, final)
        raise FileNotFoundError(errno.ENOENT, f"{lacks} was removed while the checkpoint was written", temporary)
    sync(os.path.dirname(final))
    remove(replaced)


def _set_aside(path: str) -> None:
    number = 0
    while os.path.lexists(aside := f"{path}.set-aside-{number}"):
        number += 1
    os.rename(path, aside)
    _logger.warning("%s is no checkpoint, and a checkpoint is to have its name: moved to %s", path, aside)


def evict(path: str) -> None:
    """Deletes a checkpoint; at no moment is half of one there under its name."""
    deleted = path + DELETED
    try:
        remove(deleted)
        os.rename(path, deleted)
    except FileNotFoundError:
        return
    except OSError as error:
        _logger.warning("%s could not be deleted: %s", path, error)
        return
    remove(deleted)


def remove(path: str) -> None:
    """Deletes a folder of ours, as far as that is possible; of a link the link alone."""
    if os.path.islink(path):
        with contextlib.suppress(OSError):
            os.unlink(path)
    else:
        shutil.rmtree(path, ignore_errors=True)


def sweep(directory: str, prefix: str, in_use: Callable[[str], bool]) -> None:
    """Clears away what saves and deletions of this prefix left behind when they were cut short.

    Only the one who has the claim of the prefix may: else somebody may be writing what is cleared away.

    Args:
        directory: Of the checkpoints.
        prefix: Of the names; others' are not touched.
        in_use: Whether a temporary folder is being written right now.
    """
    step = rf"({re.escape(prefix)}-(?:0|[1-9][0-9]*))"
    pattern = re.compile(
        rf"{step}({re.escape(TEMPORARY)}(?:-[0-9]+)?|{re.escape(REPLACED)}|{re.escape(DELETED)})", re.DOTALL
    )
    for entry in listed(directory):
        if match := pattern.fullmatch(entry):
            path, final = os.path.join(directory, entry), os.path.join(directory, match[1])
            if match[2] == REPLACED and is_whole(path) and not is_whole(final):
                _put_back(path, final)
            elif not in_use(path):
                remove(path)


def _put_back(replaced: str, final: str) -> None:
    if os.path.lexists(final):
        if is_remains(final):
            evict(final)
        else:
            _set_aside(final)
    os.rename(replaced, final)


def sync(folder: str) -> None:
    """Puts the entries of a folder onto the disk, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
