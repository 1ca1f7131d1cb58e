"""The file of a `History`: rows as lines of JSON."""

import contextlib
import json
import os
import stat
from typing import Any, NamedTuple

from jstep.array_store.claims import claim_file
from jstep.core.checks import describe_type, format_value
from jstep.core.logs import logger
from jstep.stores import files
from jstep.stores.growing_files import BEGINNING, LineFile, split_lines
from jstep.stores.untrusted import is_step
from jstep.stores.urls import is_url, location

Row = dict[str, float]
Rows = dict[int, Row]
"""Step → its row, in the order of steps."""

_MAX_BYTES = 2**31
"""The maximum size of a file of rows, which is read as a whole."""


def as_path(path: Any) -> str:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"path={format_value(path)}: must be the path of a file, got {describe_type(path)}"
        )
    name = os.fspath(path)
    if is_url(name):
        raise ValueError(
            f"path={name!r}: must be a local file, which grows by lines; objects of a store cannot"
        )
    if name:
        name = location(name, "path")  # resolves `~`, as for a directory of a run
    is_regular = not os.path.lexists(name) or stat.S_ISREG(os.lstat(name).st_mode)
    if not os.path.basename(name) or not is_regular:  # nothing is written through a link
        raise ValueError(
            f"path={name!r}: must be a regular file, got a directory, link or device; "
            "give another path"
        )
    return os.path.abspath(name)


def read_rows(path: str) -> Rows:
    """Return the rows of a file, without a torn last line.

    Raises:
        ValueError: A line is not a row of a History, or its step is not later than the step of the
            line before.
    """
    rows: Rows = {}
    lines, last = split_lines(files.read_small(path, _MAX_BYTES))
    is_torn = last.startswith(BEGINNING) or BEGINNING.startswith(last)
    if not is_torn:  # the end of a file of another kind, which is rejected below
        lines = [*lines, last]
    for number, line in enumerate(lines, 1):
        version = _version(line)
        if version is not None:
            raise ValueError(
                f"path={path!r}: must have rows of version 1, got version {version:.20} in line "
                f"{number}, which a later jstep wrote; install that one, or give another path"
            )
        parsed = _parse(line)
        if parsed is None or parsed.step <= next(reversed(rows), -1):
            raise ValueError(
                f"path={path!r}: must be a new file or one that a History "
                f"wrote, got line {number}, which is not a row of a History; "
                "move the file away, or give another path"
            )
        rows[parsed.step] = parsed.row
    return rows


def _version(line: bytes) -> str | None:
    """Return the version of a row that a later jstep wrote.

    It is None for rows of this one, which have no version. It is text, and not a number, because a
    metric may have the name `version`.
    """
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
        version = row.get("version") if isinstance(row, dict) else None
        if isinstance(version, str) and version.isdecimal():
            return version
    return None


class _ParsedRow(NamedTuple):
    step: int
    row: Row


def _parse(line: bytes) -> _ParsedRow | None:
    """Return the row of a line; None if it is not exactly what `_line` writes."""
    try:
        found = json.loads(line)
        step = found.pop("step")
        row = {name: float(value) for name, value in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    if not is_step(step) or _line(step, row) != line + b"\n":
        return None
    return _ParsedRow(step, row)


def _line(step: int, row: Row) -> bytes:
    numbers = {name: files.json_number(value) for name, value in row.items()}
    return json.dumps({"step": step} | numbers).encode() + b"\n"


class HistoryFile:
    """A file of rows that grows; no other History writes to it while it is open.

    Args:
        step: The step at which the run begins: later rows are dropped.
        resumes: Whether rows in the file are this run's; otherwise the file is set aside.

    Attributes:
        rows: The rows that were found in it.
    """

    def __init__(self, path: str, step: int, *, resumes: bool) -> None:
        self._path = as_path(path)
        self._claim = claim_file(path)
        try:
            self._open(path, step, resumes)
        except BaseException:
            self._claim.release()
            raise

    def _open(self, path: str, step: int, resumes: bool) -> None:
        found = read_rows(path) if os.path.exists(path) else {}
        self._lines = LineFile(path)
        if found and not resumes:
            moved = self._lines.set_aside()
            logger.warning(
                "%s: has rows of another run, or of an earlier start; it is now %s", path, moved
            )
            found = {}
        self.rows: Rows = {}
        # Step → the size of the file after its row, in the order of steps, to truncate the file
        # before a row.
        self._sizes: dict[int, int] = {}
        for row_step, row in found.items():
            if row_step <= step:
                self.rows[row_step] = row
                self._sizes[row_step] = self._size + len(_line(row_step, row))
        self._lines.truncate(self._size)

    @property
    def _size(self) -> int:
        return next(reversed(self._sizes.values()), 0)

    def put(self, rows: Rows, first: float) -> None:
        """Replace the rows in the file from step `first` on by those of `rows`."""
        while self._sizes and next(reversed(self._sizes)) >= first:
            self._sizes.popitem()
        # From the end, as usually only the last one is new.
        new_steps: list[int] = []
        for step in reversed(rows):
            if step < first:
                break
            new_steps.append(step)
        new_steps.reverse()
        lines = [_line(step, rows[step]) for step in new_steps]
        try:
            self._lines.truncate(self._size)
            self._lines.write(b"".join(lines))
        except OSError as error:
            raise OSError(
                error.errno, f"rows of a History cannot be written: {error.strerror}", self._path
            ) from error
        for step, line in zip(new_steps, lines, strict=True):
            self._sizes[step] = self._size + len(line)

    def sync(self) -> None:
        self._lines.sync()

    def close(self) -> None:
        try:
            self._lines.close()
        finally:
            self._claim.release()
