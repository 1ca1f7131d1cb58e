"""Writing of a timeline: lines that are appended, and the small file with the newest times, which is replaced."""

import contextlib
import json
import logging
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

from jstep.stores.files import open_own, read_small, replace_file
from jstep.stores.growing_files import MAX_LINE, PERIOD, open_lines
from jstep.stores.objects import Objects
from jstep.stores.run_record import BEGINNING, Record, read_records, record_path, stamp_of
from jstep.stores.timeline import OBJECTS, TIMELINE_FILE, TIMES, is_line, timeline_files
from jstep.stores.urls import is_url, join_path, split_path

_logger = logging.getLogger("jstep")
_BYTES_PER_SECOND = 2**16
"""The rate at which the small file is written at most: the records of many starts are replaced less often."""


class Timeline:
    """The timeline of a start of a run. It is thread-safe, and a failed write never ends the run.

    In a directory, every start appends to one file; a torn last line of a killed process is removed. Below a URL, each
    start has an object, uploaded every ten seconds and before each checkpoint.

    Attributes:
        record: The record of the run, with this start.
    """

    def __init__(self, where: str, prefix: str) -> None:
        self.where, self.prefix, self.start = where, prefix, secrets.token_hex(4)
        self._lock = threading.Lock()
        self._failing = False
        self.record, earlier = Record(prefix), list[str]()
        self._size: int | None = None
        """The size of the file, if no other process has appended to it since it was read."""
        try:
            earlier = timeline_files(where)
            size = None if is_url(where) else os.path.getsize(join_path(where, TIMELINE_FILE))
            records = read_records(where)
            self.record, self._size = records.get(prefix, self.record), size
            self.record.prefixes |= records.keys()
        except FileNotFoundError:
            self._size = 0
        except Exception as error:  # it cannot be read, which must not end a run
            _logger.info("%s: the starts so far cannot be read: %s", where, error)
        self._name = f"{OBJECTS}{_stamp(earlier)}-{self.start}.jsonl" if is_url(where) else TIMELINE_FILE
        self._newest = record_path(where, prefix)
        self._lines = open_lines(join_path(where, self._name), b'{"kind": "', is_line, resume=False)
        if not is_url(where):
            try:
                open_own(self._newest, BEGINNING, append=False).close()
            except BaseException:
                self._lines.close()
                raise
        self.period = PERIOD if is_url(where) else 1.0
        """The seconds between two calls of `publish`."""

    def write(self, kind: str, **fields: object) -> None:
        """Append a line, of this start unless `start` is among the fields."""
        line = {"kind": kind, "start": self.start, "prefix": self.prefix, **fields}
        raw = (json.dumps(line) + "\n").encode()
        with self._lock, self._logging_errors():
            self.record.add(json.loads(raw))
            self._lines.write(raw)
            self.record.read = self._read_after(len(raw))
            self._lines.sync(to_disk=False)
            self._failing = False

    def _read_after(self, written: int) -> tuple[str, int, int]:
        """Return what the record includes after a line; nothing for sure if other processes append lines, too."""
        if is_url(self.where):
            return self._name, 0, 0
        found = stamp_of(self._lines.path)
        self._size = found[1] if self._size is not None and found[1] == self._size + written else None
        return ("", 0, 0) if self._size is None else found

    def update(self, **fields: object) -> None:
        """Record the newest times, without a line."""
        with self._lock:
            self.record.add({"kind": TIMES, "start": self.start, **fields})

    def publish(self) -> None:
        """Replace the small file."""
        with self._lock:
            self._take_others()
            data = self.record.to_json()
        self.period = max(self.period, len(data) / _BYTES_PER_SECOND)
        with self._logging_errors():
            if not is_url(self.where):
                replace_file(self._newest, data, flush=False)
                return
            above, name = split_path(self._newest)
            objects = Objects(above)
            with objects.within(5):
                objects.write(name, data)

    def _take_others(self) -> None:
        """Take what is newer in the small file: without a claim, other starts of the run may replace it, too."""
        own = next((start for start in self.record.starts if start["start"] == self.start), {})
        if own.get("claims", True) or is_url(self.where):
            return
        with contextlib.suppress(OSError, ValueError):
            other = Record.from_json(read_small(self._newest, MAX_LINE), self.prefix)
            if other is not None:
                self.record.take_newer(other)
                self.record.take_later(other)

    def flush(self) -> None:
        with self._lock, self._logging_errors():
            self._lines.sync(to_disk=True)

    @contextlib.contextmanager
    def _logging_errors(self) -> Iterator[None]:
        """Log the first of several errors."""
        try:
            yield
        except OSError as error:
            if not self._failing:
                _logger.warning("%s: the times of this run cannot be kept: %s", self._lines.path, error)
            self._failing = True

    def close(self) -> None:
        with self._lock:
            try:
                self._lines.close()
            except OSError as error:
                _logger.warning("%s: the last times of this run are lost: %s", self._lines.path, error)
                self._failing = True
        self.publish()


_STAMP = "%Y%m%dT%H%M%S.%f"


def _stamp(earlier: Iterable[str]) -> str:
    """Return the time, as the part of a name that sorts after those of earlier starts, whatever the hosts' clocks."""
    now = datetime.now(UTC)
    for place in earlier:
        with contextlib.suppress(ValueError, OverflowError):  # not a name of ours
            text = split_path(place)[1].removeprefix(OBJECTS).partition("-")[0]
            now = max(now, datetime.strptime(text, _STAMP).replace(tzinfo=UTC) + timedelta(microseconds=1))
    return now.strftime(_STAMP)
