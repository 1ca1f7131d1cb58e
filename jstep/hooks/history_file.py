"""The file of a `History`: rows as lines of JSON, of one run."""

import contextlib
import io
import itertools
import json
import logging
import os
import re
import stat
from collections.abc import Iterable
from typing import Any, NamedTuple

from jstep.checkpoint.claims import FileClaim
from jstep.checkpoint.manifest import CheckpointError
from jstep.core.checks import describe_type, format_list, format_value
from jstep.core.plain import number as json_float
from jstep.hooks.run_hook import RunInfo
from jstep.stores import files
from jstep.stores.growing_files import sync_growing
from jstep.stores.urls import is_url, location

_logger = logging.getLogger("jstep")

Row = dict[str, float]
"""Name → value."""
Rows = dict[int, Row]
"""Step → its row, in the order of steps."""


def check_path(path: Any) -> str:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path={format_value(path)}: must be the path of a file, got {describe_type(path)}")
    name = os.fspath(path)
    if is_url(name):
        raise ValueError(f"path={name!r}: must be a local file, which grows by lines; objects of a store cannot")
    name = location(name, "path") if name else name  # as a directory of a run: with `~`, and without `file://`
    if os.path.isdir(name) or not os.path.basename(name):
        raise ValueError(f"path={name!r}: must be a file, got a folder; give a file in it, such as 'history.jsonl'")
    if os.path.exists(name) and not stat.S_ISREG(os.stat(name).st_mode):
        raise ValueError(f"path={name!r}: must be a regular file, got a device, a pipe or a socket; give another path")
    return os.path.abspath(name)


_BEGINNING = b'{"step": '
_MAX_LINE = 2**24
"""The maximum number of bytes of a line that is parsed."""


class _Found(NamedTuple):
    """The rows in a file.

    Attributes:
        data: The bytes of the file.
        rows: Its rows.
        bad: The number of a line, from 1 → what is left out of it, without null characters.
        foreign: The first line that is JSON, although not of a History; None if there is none.
        torn: The last line if it is incomplete.
    """

    data: bytes
    rows: Rows
    bad: dict[int, bytes]
    foreign: int | None
    torn: int | None


_MAX_BYTES = 2**31
"""The maximum size of a file of rows, which is read as a whole."""


def read_rows(path: str) -> _Found:
    data = files.read_small(path, _MAX_BYTES)
    rows: Rows = {}
    bad: dict[int, bytes] = {}
    foreign, before = None, -1
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(map(bytes.strip, lines), 1):
        try:
            found = [_parse(line)] if line else []
        except ValueError:
            found, bad[number] = _parse_pieces(line)
        for row in found:
            if row is None:
                bad[number] = line
            else:
                rows[row[0]] = row[1]
            if foreign is None and (row is None or row[0] <= before or _line(*row).rstrip() not in line):
                foreign = number
            before = before if row is None else row[0]
    last = bad.get(len(lines), b"")
    torn = len(lines) if last and (last.startswith(_BEGINNING) or _BEGINNING.startswith(last)) else None
    return _Found(data, dict(sorted(rows.items())), bad, foreign, torn)


_BREAKS = re.compile(rb'\0+|(?=\{"step": )')
"""Where one row may end and another one begin in a line that is damaged, also at its end."""


def _parse_pieces(line: bytes) -> tuple[list[tuple[int, Row] | None], bytes]:
    """Return the rows in a line that is not JSON, and what is left."""
    rows, left = list[tuple[int, Row] | None](), list[bytes]()
    for piece in _BREAKS.split(line):
        try:
            row = _parse(piece)
        except ValueError:
            row = None
        if row is None:
            left.append(piece)
        else:
            rows.append(row)
    return rows, b"".join(left)


def _parse(line: bytes) -> tuple[int, Row] | None:
    """Return the step and the row of a line; None if it is JSON, but not a row.

    Raises:
        ValueError: It is not JSON.
    """
    try:
        found = None if len(line) > _MAX_LINE else json.loads(line.decode())
    except RecursionError:
        return None
    if not isinstance(found, dict):
        return None
    step = found.pop("step", None)
    if type(step) is not int or not 0 <= step < 2**63:
        return None
    if not all(type(value) in (int, float) or value in _NONFINITE for value in found.values()):
        return None
    try:
        return step, {name: float(value) for name, value in found.items()}
    except OverflowError:
        return None


_NONFINITE = ("nan", "inf", "-inf")


def _line(step: int, row: Row) -> bytes:
    return json.dumps({"step": step} | {name: json_float(value) for name, value in row.items()}).encode() + b"\n"


def describe_left_out(numbers: Iterable[int]) -> str:
    return f"what is not a row of a History is left out: {format_list([f'line {n}' for n in numbers], 5)}"


class HistoryFile:
    """A file of rows, as lines of JSON; a row that changes is written again, with those after it.

    A hidden file beside it, `.NAME.jstep-run`, names the checkpoints of the run that writes it, so that rows of other
    runs are recognized. It also tells whether the run has flushed rows for a checkpoint: one that died before, and
    starts again, is the same run.
    """

    def __init__(self, path: str, run: RunInfo) -> None:
        check_path(path)
        self._path = os.path.realpath(path)
        folder, name = os.path.split(self._path)
        files.make_folders(folder)
        with contextlib.ExitStack() as stack:
            try:
                self._claim = FileClaim(folder, name)
            except CheckpointError:
                raise ValueError(
                    f"path={path!r}: another History writes this file; give each one a file of its own"
                ) from None
            stack.callback(self._claim.release)
            self._owner_path = os.path.join(folder, f".{name}.jstep-run")
            self._owner = {
                "checkpoints": _checkpoints(run, folder),
                "saved": run.restored is not None and not run.is_new_branch,
            }
            before = self._read_owner()
            theirs, mine = before.get("checkpoints"), self._owner["checkpoints"]
            is_again = before.get("saved") is not True or (run.restored is not None and not run.is_new_branch)
            is_own = mine is not None and theirs == mine and is_again
            self.is_of_another_run = not is_own and (run.is_new_branch or theirs not in (None, mine))
            self._keep_rows(path, 0 if self.is_of_another_run else run.step, is_own)
            self._write_owner()
            self._opened = stack.enter_context(open(self._path, "a+b", buffering=0))
            self._is_named = False
            self._closing = stack.pop_all()

    def _keep_rows(self, path: str, last: int, is_own: bool) -> None:
        """Keep the rows up to a step; the file is renamed if anything else in it would be lost."""
        found = read_rows(self._path) if os.path.exists(self._path) else _Found(b"", {}, {}, None, None)
        text = [number for number, left in found.bad.items() if left and number != found.torn]
        if found.foreign is not None or (text and not found.rows):
            number = text[0] if found.foreign is None else found.foreign
            raise ValueError(
                f"path={path!r}: must be a new file or one that a History wrote, got line {number}, which is not a row "
                "of a History; move the file away, or give another path"
            )
        self.rows = {step: row for step, row in found.rows.items() if step <= last} if last else {}
        lines = {step: _line(step, row) for step, row in self.rows.items()}
        ends = list(itertools.accumulate(map(len, lines.values()), initial=0))
        self._starts, self._size = list(zip(lines, ends, strict=False)), ends[-1]
        is_moved = bool(text) or (not is_own and len(self.rows) < len(found.rows))
        problems = [describe_left_out(found.bad)] if found.bad else []
        if is_moved:
            moved = next(new for i in itertools.count(1) if not os.path.lexists(new := f"{self._path}.{i}"))
            os.rename(self._path, moved)
            whose = "" if problems else "has rows of another run, or of an earlier start; "
            problems.append(f"{whose}the file as it was is now {moved}")
        if problems:
            _logger.warning("%s: %s", path, "; ".join(problems))
        whole = b"".join(lines.values())
        if is_moved or not found.data.startswith(whole):
            files.write_named(self._path, whole)
        elif len(whole) < len(found.data):
            os.truncate(self._path, len(whole))

    def _open_owner(self) -> io.FileIO:
        return files.open_own(self._owner_path, b'{"checkpoints": ', append=False)

    def _read_owner(self) -> dict[str, Any]:
        if not os.path.lexists(self._owner_path):
            return {}
        with self._open_owner() as file:
            file.seek(0)
            data = file.read(2**16) or b""
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            if b"}" not in data:
                return {}  # torn
            raise files.foreign_file(self._owner_path, f"is {data[:50]!r}") from None
        if not isinstance(found, dict) or not found.keys() <= {"checkpoints", "saved"}:
            raise files.foreign_file(self._owner_path, f"is {data[:50]!r}")
        return found

    def _write_owner(self) -> None:
        with contextlib.suppress(OSError), self._open_owner() as file:  # a full disk: the rows are more important
            file.truncate(0)
            file.seek(0)
            file.write(json.dumps(self._owner).encode())

    def put(self, rows: Rows, since: float) -> None:
        """Write the rows from a step on, in place of those in the file."""
        while self._starts and self._starts[-1][0] >= since:
            self._size = self._starts.pop()[1]
        new = [*itertools.takewhile(lambda step: step >= since, reversed(rows))][::-1]
        lines = [_line(step, rows[step]) for step in new]
        try:
            self._opened.truncate(self._size)
            left = memoryview(b"".join(lines))
            while left:
                left = left[self._opened.write(left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._opened.truncate(self._size)
            raise OSError(error.errno, f"rows of a History cannot be written: {error.strerror}", self._path) from error
        for step, line in zip(new, lines, strict=True):
            self._starts.append((step, self._size))
            self._size += len(line)

    def sync(self) -> None:
        sync_growing(self._opened.fileno(), self._path, is_named=self._is_named)
        self._is_named = True
        if not self._owner["saved"]:
            self._owner["saved"] = True
            self._write_owner()

    def close(self) -> None:
        self._closing.close()


def _checkpoints(run: RunInfo, folder: str) -> str | None:
    """Name the checkpoints of a run, relative to a folder, so that both can be moved together."""
    if run.saver is None:
        return None
    where = run.saver.directory
    if not is_url(where):
        with contextlib.suppress(ValueError):  # another drive of Windows
            where = os.path.relpath(os.path.realpath(where), folder)
    return f"{where}/{run.saver.prefix}"
