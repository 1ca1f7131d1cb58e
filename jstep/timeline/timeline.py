"""Writing the timeline of a run, one line per write."""

import json
import logging
import secrets
import threading
from datetime import UTC, datetime
from typing import Any

from jstep.stores.files import LocalLines, ObjectLines
from jstep.stores.objects import is_url, join
from jstep.timeline.lines import NAME, OBJECTS, TIMES

_logger = logging.getLogger("jstep")


class Timeline:
    """Writer for the timeline of a run. It is thread-safe, and a failed write never ends the run.

    In a directory, the timeline is one file that every start appends to; a torn last line of a killed process is
    removed. Below a URL, each start has an object, in which the newest times replace the previous ones. It is uploaded
    every ten seconds and before each checkpoint.

    Args:
        where: The directory or URL, as returned by `jstep.stores.objects.location`.
        prefix: The prefix of the run's checkpoints.

    Raises:
        OSError: The timeline cannot be created or written.
    """

    def __init__(self, where: str, prefix: str) -> None:
        self._start, self._prefix = secrets.token_hex(4), prefix
        self._lock = threading.Lock()
        self._failing = False
        self._replaceable = 0
        self._is_object = is_url(where)
        if self._is_object:
            now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")  # names sort in the order of the starts
            path = join(where, f"{OBJECTS}{now}-{self._start}.jsonl")
            self._lines: LocalLines | ObjectLines = ObjectLines(path, resume=False)
        else:
            self._lines = LocalLines(join(where, NAME))

    def write(self, kind: str, *, to_disk: bool = False, **fields: Any) -> None:
        """Write a line.

        Args:
            kind: The kind of the line.
            to_disk: Whether to upload it at once, below a URL.
            **fields: Other fields, with JSON values.
        """
        line = {"kind": kind, "start": self._start, "prefix": self._prefix, **fields}
        text = (json.dumps(line, allow_nan=False) + "\n").encode()
        with self._lock:
            try:
                replaced, self._replaceable = self._replaceable, 0
                self._lines.write(text, instead_of=replaced)
                self._replaceable = len(text) if kind == TIMES and not to_disk else 0
                if self._is_object:
                    self._lines.sync(to_disk=to_disk)
            except OSError as error:
                self._warn(error)
            else:
                self._failing = False

    def flush(self) -> None:
        """Flush the lines to the disk, if it is a file: `write` uploads objects."""
        if self._is_object:
            return
        with self._lock:
            try:
                self._lines.sync(to_disk=True)
            except OSError as error:
                self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._failing:
            _logger.warning("%s: the times of this run cannot be kept: %s", self._lines.path, error)
        self._failing = True

    def close(self) -> None:
        """Close the timeline."""
        with self._lock:
            try:
                self._lines.close()
            except OSError as error:
                _logger.warning("%s: the last times of this run are lost: %s", self._lines.path, error)
