"""Write lock of a prefix in an object store, which has no locks: an object that names its writer, who renews it.

A process on this host is looked up. One on another host counts as dead if its claim is not renewed while a new writer
watches, so that no clocks are compared. If it is alive after all, it finds its claim taken before it commits
anything, and gives up.
"""

import contextlib
import gc
import json
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from typing import Any

from jstep.checkpoint.format.manifest import CheckpointError
from jstep.checkpoint.store import claim as owner
from jstep.core.meshes import Thread
from jstep.stores.objects import ABSENT, Directory

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
            elif owner.is_alive(who) is not None or seen.stamp != stamp:  # its owner is alive
                raise CheckpointError(owner.refusal(self._objects.url, self._prefix, who))
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
        if who.get("pid") == os.getpid() and owner.is_alive(who):
            number = str(who.get("id"))
            if (held := _held.get(number)) is not None:
                # It may belong to a Saver that only its saving thread still references.
                if held.saving is not None:
                    held.saving.join(max(0.0, self._objects.deadline() - time.monotonic() - 5))
                del held
                gc.collect()
            return number not in _held
        return not who or owner.is_alive(who) is False

    def _text(self) -> bytes:
        return json.dumps(owner.this_process() | {"id": self.id, "beat": self._beats}).encode()

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
        raise CheckpointError(owner.refusal(self._objects.url, self._prefix, who))

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
