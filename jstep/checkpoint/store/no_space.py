"""Detection of a full disk in the errors of a failed write."""

import errno
import os
import re
import shutil

from jstep.core.text import size

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


def full(directory: str, needed: int) -> OSError:
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
