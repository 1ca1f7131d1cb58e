"""The objects below a URL: read, write, write on a condition, delete, list. Over tensorstore's key-value stores.

Every verb gives up within half a minute (more for large objects, by their size), with an OSError that says what and
where. A list is what the store says, which for gs:// may be a lie: `Directory` knows when to believe one.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

from jstep.stores import aws, errors, outages, urls

ABSENT = b"\x02"
"""The stamp of what is not there."""
RETRIES = {"max_retries": 10, "initial_delay": "100ms", "max_delay": "4s"}
"""22 seconds in all. tensorstore's own 32 retries take a quarter of an hour to say that a host has no such name."""
RATE = 1e6
"""Bytes a second: large objects have more time than `outages.SECONDS`."""
_ERRORS = (ValueError, RuntimeError, OverflowError, NotImplementedError)
"""What tensorstore raises."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What a read has found: no data where there is no such object.

    Attributes:
        data: The bytes that were asked for.
        stamp: Of the version read: what a condition of a write or a delete compares.
    """

    data: bytes | None
    stamp: bytes


class Pending:
    """A verb under way: `result` waits for it."""

    def __init__(self, objects: "Objects", future: Any, verb: str, key: str, nbytes: int = 0) -> None:
        self._objects, self._future, self._verb, self.url = objects, future, verb, objects.at(key)
        self._bucket = "://".join(urls.bucket(objects.url)[:2])
        self._until = time.monotonic() + outages.seconds(self._bucket) + nbytes / RATE

    def result(self) -> Any:
        """What tensorstore returned.

        Raises:
            OSError: It went wrong, or took too long.
        """
        left = min(self._until, self._objects.deadline()) - time.monotonic()
        # Raised outside of `except`: tensorstore's own error, which may hold anything, is not even its context.
        try:
            found = self._future.result(timeout=max(0.01, left))
        except TimeoutError:
            self._future.cancel()
            known = outages.reason(self._bucket)
            problem = errors.no_answer(self.url, self._verb, max(1.0, left), known)
        except _ERRORS as error:
            problem = errors.translated(error, self._verb, self.url)
        else:
            outages.ends(self._bucket)
            return found
        if isinstance(problem, errors.BusyError | ConnectionError):
            outages.begins(self._bucket, str(problem).partition(f"cannot {self._verb}: ")[2])
        raise problem

    def stamp(self) -> bytes:
        """The stamp of what was written.

        Raises:
            OSError: It was not written.
        """
        generation = bytes(self.result().generation)
        if not generation:
            raise errors.StoreError(f"{self.url}: cannot write: the store speaks of a condition, and there was none")
        return generation

    def give_up(self) -> None:
        """Waits no longer for it, and is not told what becomes of it."""
        self._future.cancel()


class Objects:
    """The objects below a URL, opened when the first is asked for. Threads may share it.

    Args:
        url: As `location` returns it.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._opened: Any = None
        self._deadline = threading.local()

    def at(self, key: str) -> str:
        """The URL of an object."""
        return f"{self.url}/{key}" if key else self.url

    # Verbs.

    def read(self, key: str) -> Found:
        """An object, whole."""
        return self.found(self.start_read(key))

    def start_read(self, key: str, start: int = 0, stop: int | None = None) -> Pending:
        """Begins to read an object, or some bytes of it; `found` says what came of it."""
        whole = start == 0 and stop is None
        options: dict[str, Any] = {} if whole else {"byte_range": slice(start, stop)}
        nbytes = 0 if stop is None else stop - start
        return self._begin("read", key, lambda kv: kv.read(key, **options), nbytes)

    def found(self, pending: Pending) -> Found:
        """What a read has found."""
        got = pending.result()
        if got.state == "value":
            return Found(bytes(got.value), bytes(got.stamp.generation))
        if got.state != "missing":
            raise errors.StoreError(f"{pending.url}: cannot read: an answer that fits no question")
        return Found(None, ABSENT)

    def write(self, key: str, data: bytes) -> bytes:
        """Writes an object, whatever was there; its stamp."""
        return self.start_write(key, data).stamp()

    def start_write(self, key: str, data: Any) -> Pending:
        """Begins to write an object."""
        return self._begin("write", key, lambda kv: kv.write(key, data), len(data))

    def write_if(self, key: str, data: bytes, stamp: bytes) -> bytes | None:
        """Writes an object where the version there has that stamp (`ABSENT`: where there is none).

        The data has to be unlike that of every other writer: an answer that was lost on the way looks like a
        condition that was not met, and only the bytes tell whose write it was.

        Returns:
            The new stamp; None where the condition was not met.
        """
        for _ in range(2):
            wrote = self._begin("write", key, lambda kv: kv.write(key, data, if_equal=stamp), len(data)).result()
            if wrote.generation:
                return bytes(wrote.generation)
            there = self.read(key)
            if there.data == data:
                return there.stamp
            if there.data is not None or stamp != ABSENT:
                return None
        # Not there, and yet not absent: so says S3 where there is no bucket.
        raise errors.no_bucket(self.at(key), "write")

    def delete(self, key: str, stamp: bytes | None = None) -> bool:
        """Deletes an object, where there is one, and where it has that stamp; whether it is gone."""
        return bool(self.start_delete(key, stamp).result().generation)

    def start_delete(self, key: str, stamp: bytes | None = None) -> Pending:
        """Begins to delete an object."""
        options = {} if stamp is None else {"if_equal": stamp}
        return self._begin("delete", key, lambda kv: kv.write(key, None, **options))

    def list(self, start: str = "", stop: str | None = None) -> list[str]:
        """The keys from one on, up to another, sorted: as the store says, see `Directory.listing`."""
        import tensorstore as ts

        keys = ts.KvStore.KeyRange(start.encode(), b"" if stop is None else stop.encode())
        found = self._begin("list", "", lambda kv: kv.list(keys)).result()
        return sorted(key.decode(errors="surrogateescape") for key in found)

    # Time.

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Gives all that this thread asks for inside no more than some seconds together."""
        before = self.deadline()
        self._deadline.at = min(before, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._deadline.at = before

    def deadline(self) -> float:
        """When this thread's verbs have to have ended, by the monotonic clock."""
        return float(getattr(self._deadline, "at", float("inf")))

    def _begin(self, verb: str, key: str, ask: Any, nbytes: int = 0) -> Pending:
        kv = self._store()
        try:
            return Pending(self, ask(kv), verb, key, nbytes)
        except _ERRORS as error:
            problem = errors.translated(error, verb, self.at(key))
        raise problem

    def _store(self) -> Any:
        with self._lock:
            if self._opened is None:
                import tensorstore as ts  # not at the top: `import jstep` is quick

                future = ts.KvStore.open(spec(self.url))
                self._opened = Pending(self, future, "open", "").result()
            return self._opened


def spec(url: str) -> dict[str, Any]:
    """The tensorstore JSON for the objects below a URL. It names files of credentials and holds none."""
    scheme, bucket, key = urls.bucket(url)
    path = f"{key}/" if key else ""
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "path": path, "gcs_request_retries": RETRIES}
    return {"driver": "s3", "bucket": bucket, "path": path, "s3_request_retries": RETRIES, **aws.s3_fields()}
