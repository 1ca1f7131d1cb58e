"""The files `starts/PREFIX.PROCESS.json` of all processes but the first.

Each has the times of its process, its batches and its signal. A process has one file, which each
start replaces.
"""

import concurrent.futures
import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

from jstep.core.logs import logger
from jstep.record.config import encoded
from jstep.record.schema import ProcessRecord
from jstep.record.starts import FOLDER, OpenDirectory
from jstep.stores.checked_json import checked, valid_fields
from jstep.stores.files import check_is_no_link, read_small, replace_file
from jstep.stores.untrusted import MAX_CLAIM_BYTES, decode_json
from jstep.stores.urls import is_url, join_path

PROCESS_VERSION = 1
_MAX_READ = 4096
"""The maximum number of processes whose files are read."""


class ProcessFile:
    """The file of this process.

    It is thread-safe; a write that fails is logged once, and never ends the run.

    Args:
        where: The directory or bucket of the run, in which the first process has recorded the
            start.

    Attributes:
        period: The seconds between two writes.
        due: Set if it should be written sooner.
    """

    def __init__(self, where: str, prefix: str, index: int, fields: Mapping[str, Any]) -> None:
        self.period = 60.0 if is_url(where) else 10.0
        self.due = threading.Event()
        self.fields: Mapping[str, Any] = {
            "version": PROCESS_VERSION,
            "prefix": prefix,
            "index": index,
            **fields,
        }
        self._path = _path_of(where, prefix, index)
        self._updating = threading.Lock()
        self._has_failed = False
        self._folder = join_path(where, FOLDER)
        self._directory = None if is_url(where) else OpenDirectory(self._folder)

    def update(self, fields: Mapping[str, Any]) -> None:
        """Change what is written next."""
        with self._updating:
            self.fields = {**self.fields, **fields}

    def write(self, fields: Mapping[str, Any]) -> None:
        self.update(fields)
        try:
            if self._directory is not None:
                check_is_no_link(self._folder)
                self._directory.check()
            replace_file(self._path, encoded(valid_fields(self.fields, ProcessRecord)), flush=False)
        except Exception as error:
            if not self._has_failed:
                logger.info("%s cannot be written: %s", self._path, error)
            self._has_failed = True

    def close(self) -> None:
        if self._directory is not None:
            self._directory.close()


def read_process(where: str, prefix: str, index: int) -> ProcessRecord | None:
    """Return what a process has recorded; None if there is no valid file."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        data = read_small(_path_of(where, prefix, index), MAX_CLAIM_BYTES, follow_link=False)
        found = checked(decode_json(data), ProcessRecord)
        if (found["version"], found["prefix"], found["index"]) == (PROCESS_VERSION, prefix, index):
            return cast(ProcessRecord, found)
    return None


def read_processes(where: str, prefix: str, start: int, count: int) -> Sequence[ProcessRecord]:
    """Return the records of a start's processes but the first.

    Files that a later start has replaced are left out.
    """
    indices = range(1, min(count, _MAX_READ))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda index: read_process(where, prefix, index), indices))
    return [record for record in found if record is not None and record["start"] == start]


def _path_of(where: str, prefix: str, index: int) -> str:
    return join_path(where, FOLDER, f"{prefix}.{index}.json")
