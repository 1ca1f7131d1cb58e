"""Atomic publication and deletion of checkpoints in a directory, and errors of a full disk.

A checkpoint is written under a temporary name, its manifest last, and then renamed. Deletion renames it first.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable
from typing import Any

from jstep.checkpoint.store.listing import DELETED, REPLACED, TEMPORARY, is_remains, is_whole, listed
from jstep.core.text import size
from jstep.stores import sync_folder

IN_FLIGHT: dict[str, Any] = {}
"""Path of a temporary folder → the checkpointer that writes it."""


_logger = logging.getLogger("jstep")


def publish(temporary: str, final: str, files: Iterable[str] = ()) -> None:
    """Rename a finished checkpoint to its final name. An older one of that name is deleted afterwards.

    Args:
        temporary: The folder of the checkpoint.
        final: Its final path.
        files: The files that must exist under the new name.

    Raises:
        FileNotFoundError: One of them was removed meanwhile.
    """
    replaced = final + REPLACED
    if os.path.lexists(final):
        if is_remains(final):
            remove(replaced)
            os.rename(final, replaced)
        else:
            _set_aside(final)
    sync_folder(temporary)
    os.rename(temporary, final)
    lacks = next((file for file in files if not os.path.isfile(os.path.join(final, file))), None)
    if lacks is not None:
        # Another process is removing the folder, and continued after the rename.
        evict(final)
        if os.path.lexists(replaced):
            os.rename(replaced, final)
        raise FileNotFoundError(errno.ENOENT, f"{lacks} was removed while the checkpoint was written", temporary)
    sync_folder(os.path.dirname(final))
    remove(replaced)


def _set_aside(path: str) -> None:
    number = 0
    while os.path.lexists(aside := f"{path}.set-aside-{number}"):
        number += 1
    os.rename(path, aside)
    _logger.warning("%s is not a checkpoint, but a checkpoint needs its name: moved to %s", path, aside)


def evict(path: str) -> None:
    """Delete a checkpoint atomically; errors are logged."""
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
    """Delete a folder of ours as far as possible; of a link, only the link."""
    if os.path.islink(path):
        with contextlib.suppress(OSError):
            os.unlink(path)
    else:
        shutil.rmtree(path, ignore_errors=True)


def remove_leftovers(directory: str, prefix: str, in_use: Callable[[str], bool]) -> None:
    """Remove what interrupted saves and deletions of this prefix left behind.

    Only the owner of the claim may call it: otherwise the removed folder may be one that is being written.

    Args:
        directory: The directory of the checkpoints.
        prefix: The prefix of the names; others are not touched.
        in_use: Returns whether a temporary folder is being written.
    """
    step = rf"({re.escape(prefix)}-(?:0|[1-9][0-9]*))"
    pattern = re.compile(
        rf"{step}({re.escape(TEMPORARY)}(?:-[0-9]+)?|{re.escape(REPLACED)}|{re.escape(DELETED)})", re.DOTALL
    )
    for entry in listed(directory):
        if match := pattern.fullmatch(entry):
            path, final = os.path.join(directory, entry), os.path.join(directory, match[1])
            if match[2] == REPLACED and is_whole(path) and not is_whole(final):
                _restore_replaced(path, final)
            elif not in_use(path):
                remove(path)


def _restore_replaced(replaced: str, final: str) -> None:
    if os.path.lexists(final):
        if is_remains(final):
            evict(final)
        else:
            _set_aside(final)
    os.rename(replaced, final)


_WORDS = re.compile(r"No space left|ENOSPC|Disk quota exceeded|EDQUOT|RESOURCE_EXHAUSTED")
_CODES = {errno.ENOSPC, errno.EDQUOT}


def is_full(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, reports a full disk or an exceeded quota."""
    seen = 0
    while error is not None and seen < 20:
        if (isinstance(error, OSError) and error.errno in _CODES) or _WORDS.search(str(error)):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def full_disk(directory: str, needed: int) -> OSError:
    """Return the error to raise, with the bytes needed and the bytes free."""
    try:
        free = f"{size(shutil.disk_usage(directory).free)} free"
    except OSError:
        free = "free space unknown"
    return OSError(
        errno.ENOSPC,
        f"the disk is full ({size(needed)} needed, {free}: {os.strerror(errno.ENOSPC)}); make room, or keep "
        "fewer checkpoints by max_to_keep",
    )
