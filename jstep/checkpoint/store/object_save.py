"""One save into an object store, in a thread of its own: data, parts, manifest, and what it supersedes.

    1. every process writes its packs below data.<attempt>, and then its part: the index of them
    2. the first waits for all parts, asks whether its claim still holds, and writes the manifest on the condition that
       the one it has seen before is still there: from here on the checkpoint exists
    3. the first tidies up, which never fails the save, and tells the others what became of it

A crash before 2 leaves objects that nothing names, which the next save clears.
"""

import atexit
import json
import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from jstep.checkpoint.format.manifest import CheckpointError
from jstep.checkpoint.store import packs
from jstep.checkpoint.store.blocks import Block
from jstep.stores import Directory

OUTCOME = "outcome.json"
"""Where the first process says how a save has ended, to others if there are any."""
_LEARN = 1800.0
"""Seconds that the others wait to hear: the first may have much more to write."""
_OTHERS = 120.0
"""Seconds that the first process waits for the others' parts, beside ten times what its own took."""

_logger = logging.getLogger("jstep")
_under_way: "set[ObjectSave]" = set()


class ObjectSave:
    """A save under way.

    Args:
        objects: Where.
        name: Of the checkpoint.
        attempt: Below it.
        blocks: What this process writes.
        compress: Whether compressed.
        process: Which this is, and of how many.
        ends: On the first process `look()` is called before anything is written, and `commit(files, seen)` when all is,
            with the records of all objects and what `look` returned.
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
        _under_way.add(self)  # the interpreter ends when what was saved is there
        self.thread = threading.Thread(target=self._run, name=f"jstep-save-{name}", daemon=True)
        self.thread.start()

    def let_go(self) -> None:
        """Lets the interpreter end without it."""
        _under_way.discard(self)

    def wait(self) -> None:
        """Waits for its end, and raises what went wrong."""
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
                self._tell(f"{type(error).__name__}: {error}"[:300], count)
                raise
            if index == 0:
                self._tell("", count)
            else:
                self._learn()
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
        """The records of all objects of this attempt, for the manifest."""
        files: dict[str, dict[str, Any]] = {}
        until = time.monotonic() + _OTHERS + 10 * took
        for index in range(count):
            key = f"part.{index}.json"
            data = (
                own if index == 0 else self._polled(f"{self.folder}/{key}", until, f"process {index} has not written")
            )
            if data.startswith(b'{"failed"'):
                raise CheckpointError(f"process {index}: {json.loads(data)['failed']}")
            files |= packs.read_index(data)[0]
            files[key] = {"bytes": len(data), "crc32": [f"{zlib.crc32(data):08x}"]}
        return dict(sorted(files.items()))

    def _polled(self, key: str, until: float, missing: str) -> bytes:
        pause = 0.02
        while (data := self._objects.read(key).data) is None:
            if time.monotonic() > until:
                raise CheckpointError(f"{self._objects.at(key)}: {missing}")
            time.sleep(pause)
            pause = min(1.0, 1.5 * pause)
        return data

    def _tell(self, failed: str, count: int) -> None:
        """What became of it on this process, for those who wait to hear."""
        index = self._process[0]
        if count > 1 and (failed or index == 0):
            key = OUTCOME if index == 0 else f"part.{index}.json"
            try:
                self._objects.write(f"{self.folder}/{key}", json.dumps({"failed": failed}).encode())
            except OSError as error:
                _logger.warning("the other processes do not hear what became of %s: %s", self.folder, error)

    def _learn(self) -> None:
        until = time.monotonic() + _LEARN
        data = self._polled(f"{self.folder}/{OUTCOME}", until, "the first process has not said how it ended")
        if failed := json.loads(data)["failed"]:
            raise CheckpointError(f"on the first process: {failed}")


@atexit.register
def _finish() -> None:
    for save in list(_under_way):
        try:
            save.wait()
        except Exception:
            _logger.exception("%s was not saved", save.folder)
