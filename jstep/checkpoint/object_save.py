"""Saving to an object store, and the lock of its writer: an object that names the writer, who renews it."""

import atexit
import contextlib
import gc
import json
import logging
import os
import threading
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jstep.checkpoint import packs
from jstep.checkpoint.directory import is_alive, refusal, this_process
from jstep.checkpoint.manifest import CheckpointError
from jstep.checkpoint.packs import Block
from jstep.core.meshes import Thread
from jstep.stores.objects import ABSENT, Directory

# Write lock of a prefix in an object store, which has no locks: an object that names its writer, who renews it.
#
# A process on this host is looked up. One on another host counts as dead if its claim is not renewed while a new writer
# watches, so that no clocks are compared. If it is alive after all, it finds its claim taken before it commits
# anything, and gives up.

BEAT = 10.0
"""Seconds between renewals."""
SILENT = 25.0
"""Seconds without a renewal after which a writer on another host counts as dead."""

_logger = logging.getLogger("jstep")
_held: "weakref.WeakValueDictionary[str, ObjectClaim]" = weakref.WeakValueDictionary()


def key_of(prefix: str) -> str:
    """Return the key of the object that names the writer of a prefix."""
    return f"~claims/{prefix}"


class ObjectClaim:
    """The exclusive right to write a prefix in a directory of objects, until `release`.

    Raises:
        CheckpointError: Another writer has it; names its host and process.
        OSError: The directory cannot be read or written.
    """

    def __init__(self, objects: Directory, prefix: str) -> None:
        self._objects, self._prefix, self.id = objects, prefix, uuid.uuid4().hex
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._beats, self._lost = 0, False
        self.saving: threading.Thread | None = None
        self._stamp = self._take()
        _held[self.id] = self
        self._pid = os.getpid()
        self._thread = Thread(target=_renew, args=(weakref.ref(self), self._ended), daemon=True)
        self._thread.name = f"jstep-claim-{prefix}"
        self._thread.start()
        weakref.finalize(self, self._ended.set)

    def _take(self) -> bytes:
        key = key_of(self._prefix)
        until: float | None = None
        seen = self._objects.read(key)
        stamp = seen.stamp
        while True:
            who = claimant(seen.data)
            if seen.data is None or self._is_free(who):
                if (mine := self._objects.write_if(key, self._text(), seen.stamp)) is not None:
                    return mine
            elif is_alive(who) is not None or seen.stamp != stamp:  # its owner is alive
                raise CheckpointError(refusal(self._objects.url, self._prefix, who))
            elif until is None:
                _logger.info(
                    "%s: process %s on %s wrote %s-* last; waiting for %g s to see whether it is still alive",
                    *(self._objects.url, who.get("pid"), who.get("host"), self._prefix, SILENT),
                )
                until = time.monotonic() + SILENT
            elif time.monotonic() > until:
                if (mine := self._objects.write_if(key, self._text(), stamp)) is not None:
                    return mine
            else:
                self._ended.wait(min(SILENT / 10, max(0.01, until - time.monotonic())))
            seen = self._objects.read(key)

    def _is_free(self, who: Mapping[str, Any]) -> bool:
        """Return whether the previous owner is certainly dead."""
        if who.get("pid") == os.getpid() and is_alive(who):
            number = str(who.get("id"))
            if (held := _held.get(number)) is not None:
                # It may belong to a Saver that only its saving thread still references.
                if held.saving is not None:
                    held.saving.join(max(0.0, self._objects.deadline() - time.monotonic() - 5))
                del held
                gc.collect()
            return number not in _held
        return not who or is_alive(who) is False

    def _text(self) -> bytes:
        return json.dumps(this_process() | {"id": self.id, "beat": self._beats}).encode()

    def is_held(self) -> bool:
        """Return whether the claim is not known to be lost. `check` queries the store."""
        return not self._lost and not self._ended.is_set() and self._pid == os.getpid()

    def check(self) -> None:
        """Check that no other writer has taken the claim; called before every commit.

        Raises:
            CheckpointError: Another process has taken it; names the process.
            OSError: The store cannot be read.
        """
        with self._lock:
            found = self._objects.read(key_of(self._prefix))
            if found.data is None:  # deleted by hand, or by a rule of the bucket
                stamp = self._objects.write_if(key_of(self._prefix), self._text(), ABSENT)
                if stamp is not None:
                    self._stamp = stamp
                    return
                found = self._objects.read(key_of(self._prefix))
            who = claimant(found.data)
            if who.get("id") == self.id:
                self._stamp = found.stamp
                return
            self._lost = True
        raise CheckpointError(refusal(self._objects.url, self._prefix, who))

    def renew(self) -> None:
        """Renew the claim, which shows that its writer is alive."""
        with self._lock:
            if not self.is_held():
                return
            self._beats += 1
            stamp = self._objects.write_if(key_of(self._prefix), self._text(), self._stamp)
            if stamp is not None:
                self._stamp = stamp

    def release(self, seconds: float = 5) -> None:
        """Release the claim within `seconds`; if that fails, the next writer takes it over."""
        self._ended.set()
        _held.pop(self.id, None)
        if self._pid != os.getpid() or self._lost or not self._lock.acquire(timeout=seconds):
            return
        try:
            with contextlib.suppress(OSError), self._objects.within(seconds):
                self._objects.delete(key_of(self._prefix), self._stamp)
        finally:
            self._lock.release()


def _renew(claim: "weakref.ref[ObjectClaim]", ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        if (held := claim()) is None:
            return
        with contextlib.suppress(OSError):  # the commit raises it if it persists
            held.renew()
        del held


def claimant(data: bytes | None) -> dict[str, Any]:
    """Return the owner that a claim names; empty if it names none."""
    try:
        who = json.loads(data or b"{}")
    except ValueError:
        return {}
    return who if isinstance(who, dict) else {}


# One save to an object store in a background thread: data, parts, manifest, and removal of superseded objects.
#
#     1. Every process writes its packs below data.<attempt>, and then its part: the index of its packs.
#     2. The first process waits for all parts, checks that its claim still holds, and writes the manifest, on the
#        condition that the previous manifest is unchanged. From here on the checkpoint exists.
#     3. The first process removes old objects, which never fails the save, and reports the outcome to the others. If
#        its
#        network is down, they see that it no longer renews its claim.
#
# A crash before 2 leaves unreferenced objects, which the next save removes.

OUTCOME = "outcome.json"
"""The object in which the first process reports the outcome of a save to the others."""
_OUTCOME_TIMEOUT = 1800.0
"""Seconds that the others wait for the outcome while the first process is alive: it may have much more to write."""
_SILENT = 60.0
"""Seconds without a heartbeat of the first process after which the others give up."""
_OTHERS = 120.0
"""Seconds that processes wait for each other without heartbeats, plus ten times the time of their own part."""

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
