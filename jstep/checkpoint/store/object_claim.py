"""One writer of a prefix at a time, where there are no locks: an object that says who, and that its writer renews.

Of a process on this host one can tell whether it lives. One on another host counts as gone when its claim was not
renewed while a newcomer looked on, which compares no clocks. Should it live after all, it finds its claim taken
before it commits anything, and gives up.
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
from jstep.checkpoint.store import owner
from jstep.core.contexts import Thread
from jstep.stores import ABSENT, Directory

BEAT = 10.0
"""Seconds between renewals."""
SILENT = 25.0
"""Seconds without one after which a writer on another host is gone."""

_logger = logging.getLogger("jstep")
_held: "weakref.WeakValueDictionary[str, ObjectClaim]" = weakref.WeakValueDictionary()


def key_of(prefix: str) -> str:
    """The object that says who writes a prefix."""
    return f"~claims/{prefix}"


class ObjectClaim:
    """The right to write a prefix in a directory of objects, from when it is made until `release`.

    Raises:
        CheckpointError: Somebody else has it; names host and process.
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
            elif owner.is_alive(who) is not None or seen.stamp != stamp:  # it lives
                raise CheckpointError(owner.refusal(self._objects.url, self._prefix, who))
            elif until is None:
                _logger.info(
                    "%s: process %s on %s wrote %s-* last; waiting for %g s to see whether it still does",
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
        """Whether whoever had it is gone for certain."""
        if who.get("pid") == os.getpid() and owner.is_alive(who):
            number = str(who.get("id"))
            if (held := _held.get(number)) is not None:
                # It may be of a Saver that nobody holds any more, but for the thread that saves.
                if held.saving is not None:
                    held.saving.join(max(0.0, self._objects.deadline() - time.monotonic() - 5))
                del held
                gc.collect()
            return number not in _held
        return not who or owner.is_alive(who) is False

    def _text(self) -> bytes:
        return json.dumps(owner.this_process() | {"id": self.id, "beat": self._beats}).encode()

    def is_held(self) -> bool:
        """Whether nobody has been seen to take it. `check` asks the store."""
        return not self._lost and not self._ended.is_set() and self._pid == os.getpid()

    def check(self) -> None:
        """Makes sure that nobody has taken it: asked before every commit.

        Raises:
            CheckpointError: Another process has; names it.
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
        """Shows that its writer lives."""
        with self._lock:
            if not self.is_held():
                return
            self._beats += 1
            stamp = self._objects.write_if(key_of(self._prefix), self._text(), self._stamp)
            if stamp is not None:
                self._stamp = stamp

    def release(self, seconds: float = 5) -> None:
        """Gives it up, for which it asks the store no longer than that; what stays is taken over by the next."""
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
        with contextlib.suppress(OSError):  # the commit will say so, if it lasts
            held.renew()
        del held


def claimant(data: bytes | None) -> dict[str, Any]:
    """Who a claim says has it; empty where it says nothing."""
    try:
        who = json.loads(data or b"{}")
    except ValueError:
        return {}
    return who if isinstance(who, dict) else {}
