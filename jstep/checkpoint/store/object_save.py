"""One save to an object store in a background thread: data, parts, manifest, and removal of superseded objects.

    1. Every process writes its packs below data.<attempt>, and then its part: the index of its packs.
    2. The first process waits for all parts, checks that its claim still holds, and writes the manifest, on the
       condition that the previous manifest is unchanged. From here on the checkpoint exists.
    3. The first process removes old objects, which never fails the save, and reports the outcome to the others. If its
       network is down, they see that it no longer renews its claim.

A crash before 2 leaves unreferenced objects, which the next save removes.
"""

import atexit
import json
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from jstep.checkpoint.format.manifest import CheckpointError
from jstep.checkpoint.store import packs
from jstep.checkpoint.store.object_claim import BEAT, claimant, key_of
from jstep.checkpoint.store.packs import Block
from jstep.core.meshes import Thread
from jstep.stores.objects import Directory

OUTCOME = "outcome.json"
"""The object in which the first process reports the outcome of a save to the others."""
_OUTCOME_TIMEOUT = 1800.0
"""Seconds that the others wait for the outcome while the first process is alive: it may have much more to write."""
_SILENT = 60.0
"""Seconds without a heartbeat of the first process after which the others give up."""
_OTHERS = 120.0
"""Seconds that processes wait for each other without heartbeats, plus ten times the time of their own part."""

_logger = logging.getLogger("jstep")
_under_way: "set[ObjectSave]" = set()


class ObjectSave:
    """A save in progress.

    Args:
        objects: The directory of objects.
        name: The name of the checkpoint.
        attempt: The name of the attempt below it.
        blocks: The blocks that this process writes.
        compress: Whether to compress them.
        process: The index of this process, and the number of processes.
        ends: `(look, commit)`: the first process calls `look()` before anything is written, and `commit(files, seen)`
            when everything is, with the records of all objects and the result of `look`.
    """

    def __init__(
        self,
        objects: Directory,
        name: str,
        attempt: str,
        blocks: Sequence[Block],
        compress: bool,
        process: tuple[int, int],
        ends: tuple[Callable[[], bytes], Callable[[dict[str, dict[str, Any]], bytes], None]],
    ) -> None:
        self._objects, self.folder, self.attempt = objects, f"{name}/{attempt}", attempt
        self._blocks: Sequence[Block] = blocks
        self._compress, self._process, self._ends = compress, process, ends
        self._error: BaseException | None = None
        _under_way.add(self)  # the interpreter waits at exit until the save is done
        self.thread = Thread(target=self._run, name=f"jstep-save-{name}", daemon=True)
        self.thread.start()

    def detach(self) -> None:
        """Let the interpreter exit without waiting for the save."""
        _under_way.discard(self)

    def wait(self) -> None:
        """Wait for the save to end, and raise its error if it failed."""
        self.thread.join()
        _under_way.discard(self)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        index, count = self._process
        try:
            try:
                look, commit = self._ends
                seen = look() if index == 0 else b""
                began = time.monotonic()
                part = self._write()
                if index == 0:
                    commit(self._parts(part, count, time.monotonic() - began), seen)
            except BaseException as error:
                self._report(f"{type(error).__name__}: {error}"[:300], count)
                raise
            if index == 0:
                self._report("", count)
            else:
                self._await_outcome(time.monotonic() - began)
        except BaseException as error:
            self._error = error
        else:
            _under_way.discard(self)

    def _write(self) -> bytes:
        index = self._process[0]
        blocks, self._blocks = self._blocks, ()
        part = packs.write(self._objects, self.folder, index, blocks, self._compress)
        self._objects.write(f"{self.folder}/part.{index}.json", part)
        return part

    def _parts(self, own: bytes, count: int, took: float) -> dict[str, dict[str, Any]]:
        """Return the records of all objects of this attempt, for the manifest."""
        files: dict[str, dict[str, Any]] = {}
        until = time.monotonic() + _OTHERS + 10 * took

        def is_late() -> bool:
            return time.monotonic() > until

        for index in range(count):
            key = f"part.{index}.json"
            missing = f"process {index} has not written"
            data = own if index == 0 else self._polled(f"{self.folder}/{key}", is_late, missing)
            if data.startswith(b'{"failed"'):
                raise CheckpointError(f"process {index}: {json.loads(data)['failed']}")
            files |= packs.read_index(data)[0]
            files[key] = {"bytes": len(data), "crc32": [f"{zlib.crc32(data):08x}"]}
        return dict(sorted(files.items()))

    def _polled(self, key: str, is_late: Callable[[], bool], missing: str) -> bytes:
        pause = 0.02
        while (data := self._objects.read(key).data) is None:
            if is_late():
                raise CheckpointError(f"{self._objects.at(key)}: {missing}")
            time.sleep(pause)
            pause = min(1.0, 1.5 * pause)
        return data

    def _report(self, failed: str, count: int) -> None:
        """Report the outcome on this process to the processes that wait for it."""
        index = self._process[0]
        if count > 1 and (failed or index == 0):
            key = OUTCOME if index == 0 else f"part.{index}.json"
            try:
                self._objects.write(f"{self.folder}/{key}", json.dumps({"failed": failed}).encode())
            except OSError as error:
                _logger.warning(
                    "the outcome of %s could not be reported to the other processes: %s", self.folder, error
                )

    def _await_outcome(self, took: float) -> None:
        heartbeats = _Heartbeats(self._objects, self.folder.partition("/")[0].rpartition("-")[0], _OTHERS + 10 * took)
        missing = "the first process has not reported the outcome"
        data = self._polled(f"{self.folder}/{OUTCOME}", heartbeats.are_missing, missing)
        if failed := json.loads(data)["failed"]:
            raise CheckpointError(f"on the first process: {failed}")


class _Heartbeats:
    """Heartbeats of the first process: it renews its claim, if it has the right to replace objects."""

    def __init__(self, objects: Directory, prefix: str, patience: float) -> None:
        self._objects, self._key = objects, key_of(prefix)
        began = time.monotonic()
        self._until, self._latest, self._next = began + patience, began + _OUTCOME_TIMEOUT, began + BEAT
        self._stamp, self._changed, self._renews = b"", began, False

    def are_missing(self) -> bool:
        """Return whether the first process has been silent for too long."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + BEAT
            found = self._objects.read(self._key)
            if found.stamp != self._stamp:
                self._renews = bool(self._stamp) or found.data is None or claimant(found.data).get("beat", 0) != 0
                self._stamp, self._changed = found.stamp, now
        return now > (min(self._latest, self._changed + _SILENT) if self._renews else self._until)


@atexit.register
def _finish() -> None:
    for save in list(_under_way):
        try:
            save.wait()
        except Exception:
            _logger.exception("%s was not saved", save.folder)
