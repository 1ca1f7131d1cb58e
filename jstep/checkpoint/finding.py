"""Finding checkpoints: the newest one, or the one of a step, is opened on all processes."""

import contextlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jstep.array_store.best_record import BestRecord
from jstep.array_store.listing import format_name, misnaming_text
from jstep.array_store.manifest import (
    CheckpointError,
    CorruptedCheckpointError,
    Manifest,
    UnsupportedFormatError,
    decode,
    encode,
)
from jstep.array_store.store import MAX_MANIFESTS, Store
from jstep.checkpoint.reading import GoneError, OpenCheckpoint, gone
from jstep.checkpoint.verdicts import IS_UNREADABLE, unusable
from jstep.core import processes
from jstep.core.secret_text import describe_error
from jstep.core.tables import printable
from jstep.stores.urls import is_url

_T = TypeVar("_T")

_MAX_READS = 10
"""The maximum number of reads until one is complete. A writer evicts one checkpoint per save, and a
read takes no longer than a few saves."""
_KINDS_OF_ERRORS = (
    GoneError,
    CorruptedCheckpointError,
    UnsupportedFormatError,
    CheckpointError,
    FileNotFoundError,
    PermissionError,
    OSError,
)
"""The errors of the first process that the other processes raise, too; the last one stands for any
other error."""


class CheckpointFinder:
    """Finds the checkpoints of one prefix, and opens them."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._warned_of = set[str]()

    def open(self, step: int | None) -> OpenCheckpoint:
        """Open the checkpoint of a step, or the newest one, which the first process finds for all.

        Raises:
            GoneError: The newest checkpoint was deleted after it was listed, so that there may be
                another one.
            FileNotFoundError: There is no checkpoint, or not the requested one.
        """
        if processes.is_single_process():
            return self.open_here(step)

        def as_text() -> str:
            found = self.open_here(step)
            return json.dumps([found.path, encode(found.manifest).decode()])

        path, text = json.loads(processes.text_from_first(as_text, _KINDS_OF_ERRORS))
        manifest = decode(text.encode())
        return OpenCheckpoint(self._store, self._prefix, path, manifest, self._warned_of)

    def open_here(self, step: int | None) -> OpenCheckpoint:
        """Open a checkpoint as `open` does, on this process alone."""
        if step is None:
            newest, path = self._newest()
            return self._open(path, newest)
        found = self._store.path_to_read(self._prefix, step)
        if found is not None:
            with contextlib.suppress(GoneError):
                return self._open(found, step)
        raise self._missing(step)

    def read(self, step: int | None, read: Callable[[OpenCheckpoint], _T]) -> _T:
        """Open and read a checkpoint; if it is evicted meanwhile, choose again which to read."""
        for _ in range(_MAX_READS - 1):
            with contextlib.suppress(GoneError):
                return read(self.open(step))
        return read(self.open(step))

    def best_records(self, steps: Sequence[int]) -> dict[int, BestRecord | None]:
        """Return the record of each step, without those of checkpoints that were deleted meanwhile.

        The first process reads the manifests, several at a time, and sends the records to all.
        """

        def record(step: int) -> tuple[int, BestRecord | None] | None:
            path = self._store.path_to_read(self._prefix, step)
            if path is None:
                return None
            try:
                return step, self._manifest(path, step).best
            except GoneError:
                return None

        def as_text() -> str:
            with ThreadPoolExecutor(MAX_MANIFESTS, "jstep-manifests") as pool:
                return json.dumps([found for found in pool.map(record, steps) if found is not None])

        records = json.loads(processes.text_from_first(as_text, _KINDS_OF_ERRORS))
        return {step: None if fields is None else BestRecord(*fields) for step, fields in records}

    def _open(self, path: str, step: int) -> OpenCheckpoint:
        manifest = self._manifest(path, step)
        return OpenCheckpoint(self._store, self._prefix, path, manifest, self._warned_of)

    def _missing(self, step: int) -> FileNotFoundError:
        name = format_name(self._prefix, step)
        lacks = dict(self._store.find_broken(self._prefix, step - 1)).get(self._store.path(name))
        steps = sorted(step for step, _ in self._store.newest_first(self._prefix))
        content = f"steps {steps}" if steps else "no checkpoints"
        if lacks:
            clause = f"since {lacks}; the directory has {content}"
        else:
            clause = f"which has {content}"
        return FileNotFoundError(
            f"step={step}: there is no complete checkpoint {name} in "
            f"{self._store.directory}, {clause}"
        )

    def _manifest(self, path: str, step: int) -> Manifest:
        try:
            manifest = self._store.manifest(path)
        except FileNotFoundError:
            raise gone(path) from None
        except UnsupportedFormatError as error:
            # No advice about older checkpoints: this one is intact, and a run that went back would
            # lose steps.
            raise UnsupportedFormatError(f"{path} {IS_UNREADABLE}: {error}.") from error
        except CheckpointError as error:
            raise self._unusable(path, str(error), is_corrupted=True) from error
        except OSError as error:
            if is_url(path):
                raise  # the store is out of reach
            problem = f"{describe_error(error)}; make it readable for this user"
            raise self._unusable(path, problem, is_corrupted=False) from error
        if manifest.step != step:
            raise self._unusable(
                path, misnaming_text(self._prefix, step, manifest.step), is_corrupted=False
            )
        return manifest

    def _newest(self) -> tuple[int, str]:
        """Return the highest step and its path.

        If its checkpoint is incomplete, this is an error: an older one is never restored silently.
        """
        step, path = next(self._store.newest_first(self._prefix), (-1, ""))
        broken = self._store.find_broken(self._prefix, step)
        if broken:
            broken_path, lacks = broken[0]
            raise self._unusable(broken_path, lacks, is_corrupted=True)
        if step < 0:
            other = next((found for _, found in self._store.newest_first(None)), None)
            hint = ""
            if other:
                hint = f"; it has {printable(other)}: give its prefix, Saver(directory, prefix=…)"
            raise FileNotFoundError(
                f"there is no checkpoint {self._prefix}-* in {self._store.directory}{hint}"
            )
        return step, path

    def _unusable(self, path: str, problem: str, *, is_corrupted: bool) -> CheckpointError:
        return unusable(self._store, self._prefix, path, [problem], is_corrupted=is_corrupted)
