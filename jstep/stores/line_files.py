"""Logs of JSON lines, to which a later run appends: files, or objects that are uploaded before checkpoints."""

import os
from collections.abc import Callable

from jstep.stores.files import decode_json, foreign_file, make_directories, open_own
from jstep.stores.growing_files import GrowingFile, ObjectAppender
from jstep.stores.objects import START_TIMEOUT_SECS, Objects
from jstep.stores.urls import is_url, split_path

_MAX_BYTES = 2**31


def open_lines(path: str, beginning: bytes, is_line: Callable[[bytes], bool]) -> "LocalLines | ObjectAppender":
    """Open a file or object for appending; an incomplete last line is removed first.

    Args:
        path: The file or object.
        beginning: The bytes with which each line begins.
        is_line: Whether a line may be in the file.

    Raises:
        ForeignFileError: The file has other lines, and stays unchanged.
    """
    if not is_url(path):
        return LocalLines(path, beginning, is_line)
    above, name = split_path(path)
    objects = Objects(above)
    with objects.within(START_TIMEOUT_SECS):
        data = objects.read(name).data or b""
        whole = data[: _end_of_lines(path, data, is_line)]
        return ObjectAppender(objects, lambda: name, whole, segmented=False)


def _end_of_lines(path: str, data: bytes, is_line: Callable[[bytes], bool]) -> int:
    first = data.lstrip(b"\0").partition(b"\n")[0]
    if first and not is_line(first) and decode_json(first) is not None:  # otherwise it is torn
        raise foreign_file(path, f"begins with {first[:50]!r}")
    return data.rfind(b"\n") + 1


class LocalLines(GrowingFile):
    """A file of lines."""

    def __init__(self, path: str, beginning: bytes, is_line: Callable[[bytes], bool]) -> None:
        make_directories(os.path.dirname(path))
        super().__init__(path, open_own(path, beginning))
        try:
            if self._file.seek(0, os.SEEK_END) > _MAX_BYTES:
                raise foreign_file(path, f"has more than {_MAX_BYTES} bytes")
            self._file.seek(0)
            self._file.truncate(_end_of_lines(path, self._file.read() or b"", is_line))
        except BaseException:
            self._file.close()
            raise
