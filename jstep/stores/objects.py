"""The objects below a URL, in tensorstore's key-value stores; credentials of S3; stores' errors.

Every operation gives up within half a minute (large objects get more time, by their size), with an
OSError that names operation and URL. After one timeout, later requests wait less, since many may
follow before a run ends.

A list may be wrong: for HTTP status 401, 403 or 404, tensorstore's gs:// driver returns an empty or
truncated one. A run whose token has expired would start from step 0. A `Bucket` therefore has a
mark, an object that sorts after all others, and rejects a list that does not end in it.
"""

import configparser
import contextlib
import functools
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from jstep.core.secret_text import hide
from jstep.core.tables import printable
from jstep.stores.urls import parts_of_url

ABSENT = b"\x02"
"""The stamp of a missing object."""
RETRIES = {"max_retries": 10, "initial_delay": "100ms", "max_delay": "4s"}
"""22 seconds in all. tensorstore's default of 32 retries takes a quarter of an hour to report an
unknown host."""
START_TIMEOUT_SECS = 38.0
"""Timeout of all requests at the start of a run, which check that it can read, list and write."""
BYTES_PER_SEC = 1e6
"""Bytes per second, for which a large object gets more time than `TIMEOUT_SECS`."""
TIMEOUT_SECS = 26.0
"""Timeout of an operation on a store that does not respond."""
SHORT_TIMEOUT_SECS = 14.0
"""Timeout of an operation after a recent outage, since many may follow."""
OUTAGE_SECS = 60.0
"""Seconds for which an outage counts as recent."""


class _Outage(NamedTuple):
    """A store that did not respond, at a monotonic time; `why` is for errors."""

    seen_at: float
    why: str


_outages: dict[str, _Outage] = {}
"""The latest outage of each bucket that has not responded since."""


def recent_outage(bucket: str) -> str | None:
    """Return why a bucket did not respond a short time ago; None if it did, or was not queried."""
    outage = _outages.get(bucket)
    if outage is None or time.monotonic() - outage.seen_at >= OUTAGE_SECS:
        return None
    return outage.why


_ERRORS = (ValueError, RuntimeError, OverflowError, NotImplementedError)
"""The exceptions of tensorstore."""


class ReadResult(NamedTuple):
    """The result of a read.

    Attributes:
        data: None if there is no such object.
        stamp: The stamp of the version, which conditional writes and deletes compare.
    """

    data: bytes | None
    stamp: bytes


class PendingOperation:
    """An operation that tensorstore has begun."""

    def __init__(
        self, objects: "Objects", future: Any, verb: str, key: str, nbytes: int = 0
    ) -> None:
        self._objects = objects
        self._future = future
        self._verb = verb
        self.url = objects.url_of(key)
        self._bucket = "://".join(parts_of_url(objects.url)[:2])
        timeout = TIMEOUT_SECS if recent_outage(self._bucket) is None else SHORT_TIMEOUT_SECS
        self._deadline = min(
            time.monotonic() + timeout + nbytes / BYTES_PER_SEC, objects.deadline()
        )

    def result(self) -> Any:
        """Return the result; raise an OSError if the operation fails or takes too long."""
        left = self._deadline - time.monotonic()
        # Raised outside of `except`, so that tensorstore's error, which may hold secrets, is not
        # even its context.
        try:
            self._wait(left)
            result = self._future.result(timeout=0.01)
        except TimeoutError:
            self._future.cancel()
            # The reason of an earlier failure, after which this request has waited less.
            reason = recent_outage(self._bucket)
            if reason is None:
                store = f"the store of {self._bucket} gave no response in {max(1.0, left):.0f} s"
                reason = f"{store}. Check the network and the address: {self._endpoint()}"
            problem: OSError = ConnectionError(
                f"{printable(self.url)}: cannot {self._verb}: {reason}"
            )
        except _ERRORS as error:
            problem = translate_error(error, self._verb, self.url)
        else:
            _outages.pop(self._bucket, None)
            return result
        if isinstance(problem, BusyError | ConnectionError):
            why = str(problem).partition(f"cannot {self._verb}: ")[2]
            _outages[self._bucket] = _Outage(time.monotonic(), why)
        raise problem

    def _wait(self, secs: float) -> bool:
        """Wait for at most so many seconds; return whether the operation has ended."""
        with contextlib.suppress(TimeoutError, *_ERRORS):
            self._future.result(timeout=max(0.01, secs))
        return bool(self._future.done())

    def _endpoint(self) -> str:
        return ENDPOINT[self._bucket.partition("://")[0]]


class PendingList(PendingOperation):
    """A list that tensorstore has begun.

    A list of many pages takes long, and the list of a stranger's store may have no end.
    """

    def _wait(self, secs: float) -> bool:
        """Wait as long as the store responds, and the list does not seem to be endless."""
        earliest: _ListTraffic | None = None
        deadline = time.monotonic() + secs
        extensions = _MAX_EXTENSIONS
        while not super()._wait(min(_POLL_SECS, deadline - time.monotonic())):
            # Not before the loop: most lists have ended by now, and reading metrics takes 0.3 ms.
            traffic = _ListTraffic.now()
            earliest = earliest or traffic
            received = traffic - earliest
            if received.is_endless():
                self._future.cancel()
                raise EndlessListError(
                    f"{self.url}: cannot list: the list has not ended after {received.pages} pages "
                    f"with {received.nbytes / 1e6:.1f} MB. Pass a URL further below in the bucket, "
                    f"or check the address: {self._endpoint()}"
                )
            if time.monotonic() >= deadline:
                if extensions == 0 or not self._responds():
                    return False
                extensions -= 1
                deadline = time.monotonic() + TIMEOUT_SECS
        return True

    def _responds(self) -> bool:
        """Return whether the store responds to another request."""
        with contextlib.suppress(OSError):
            Objects(self._objects.url).read(MARK)
            return True
        return False


_POLL_SECS = 0.5
"""Seconds between two polls of what a list has received."""
_MAX_EXTENSIONS = 20
"""How often a list gets another `TIMEOUT_SECS`, if its store responds."""
_MAX_LIST_BYTES = 2**29
"""The maximum bytes of the pages of a list, which has then more than a million objects."""
_MAX_SMALL_PAGES = 1000
"""The maximum pages of a list, if they are smaller than `_BYTES_PER_PAGE` on average."""
_BYTES_PER_PAGE = 20_000
"""The least bytes of a page that is not the last one.

It has 1,000 objects, each of which takes 100 bytes or more, in S3's XML as in Google's JSON.
"""


class _ListTraffic(NamedTuple):
    """What this process has received since its start, other than the responses to reads and writes.

    tensorstore returns a list as a whole, and only its metrics show the progress. They count all
    requests of the process, so other requests that run meanwhile are subtracted.
    """

    pages: int
    nbytes: float

    @classmethod
    def now(cls) -> "_ListTraffic":
        import tensorstore as ts  # not at the top: importing tensorstore is slow

        pages = 0
        nbytes = 0.0
        # Not the requests, which count once more at each retry of a store that is busy.
        for response in _metric("/tensorstore/http/response_codes", ts):
            if response["code"] == "200":
                pages += response["value"]
        for responses in _metric("/tensorstore/http/response_bytes", ts):
            nbytes += responses["mean"] * responses["count"]
        for driver in ("s3", "gcs"):
            for reads in _metric(f"/tensorstore/kvstore/{driver}/batch_read", ts):
                pages -= reads["value"]
            for writes in _metric(f"/tensorstore/kvstore/{driver}/write", ts):
                # S3 asks for an object before it writes it on a condition.
                pages -= 2 * writes["value"]
            for received in _metric(f"/tensorstore/kvstore/{driver}/bytes_read", ts):
                nbytes -= received["value"]
        return cls(pages, nbytes)

    def __sub__(self, earlier: "_ListTraffic") -> "_ListTraffic":
        return _ListTraffic(self.pages - earlier.pages, self.nbytes - earlier.nbytes)

    def is_endless(self) -> bool:
        if self.nbytes > _MAX_LIST_BYTES:
            return True
        return self.pages > _MAX_SMALL_PAGES and self.nbytes < self.pages * _BYTES_PER_PAGE


def _metric(name: str, ts: Any) -> Iterable[dict[str, Any]]:
    for metric in ts.experimental_collect_matching_metrics(name):
        if metric["name"] == name:
            yield from metric["values"]


_Item = TypeVar("_Item")
_Pending = TypeVar("_Pending")
_MAX_CONCURRENT = 64
"""The maximum number of small operations that run at the same time."""


def pipelined(
    begin: Callable[[_Item], _Pending],
    items: Iterable[_Item],
    max_concurrent: int = _MAX_CONCURRENT,
) -> Iterator[tuple[_Item, _Pending]]:
    """Begin an operation for each item, several before the first ends, and yield both, in order.

    The caller waits for the yielded operation.
    """
    running: deque[tuple[_Item, _Pending]] = deque()
    for item in items:
        running.append((item, begin(item)))
        if len(running) >= max_concurrent:
            yield running.popleft()
    yield from running


class Objects:
    """The objects below a URL, opened at the first request. Thread-safe."""

    def __init__(self, url: str) -> None:
        self.url = url
        # Its `deadline` is the monotonic time of the innermost `time_limit`.
        self._limits = threading.local()

    def url_of(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    # Operations.

    def read(self, key: str) -> ReadResult:
        found = self._begin("read", key, lambda kv: kv.read(key)).result()
        if found.state == "value":
            return ReadResult(bytes(found.value), bytes(found.stamp.generation))
        return ReadResult(None, ABSENT)

    def write(self, key: str, data: bytes) -> bytes:
        operation = self._begin("write", key, lambda kv: kv.write(key, data), len(data))
        return bytes(operation.result().generation)

    def write_if(self, key: str, data: bytes, stamp: bytes) -> bytes | None:
        """Write an object if the existing version has this stamp, and return the new one, or None.

        The data must differ from any other writer's: a lost response looks like an unmet condition,
        and only the bytes show whose write it was.
        """

        def begin(kv: Any) -> Any:
            return kv.write(key, data, if_equal=stamp)

        for _ in range(2):
            wrote = self._begin("write", key, begin, len(data)).result()
            if wrote.generation:
                return bytes(wrote.generation)
            current = self.read(key)
            if current.data == data:
                return current.stamp
            if current.data is not None or stamp != ABSENT:
                return None
        # Missing, and yet not `ABSENT`: S3 reports this if there is no bucket.
        raise no_bucket(self.url_of(key), "write")

    def existing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys of objects that exist, in order."""

        def begin(key: str) -> PendingOperation:
            return self._begin("read", key, lambda kv: kv.read(key, byte_range=slice(0, 1)))

        found = []
        for key, operation in pipelined(begin, keys):
            try:
                if operation.result().state == "value":
                    found.append(key)
            except LostError:  # it has no byte
                found.append(key)
        return found

    def delete(self, key: str, stamp: bytes | None = None) -> bool:
        """Delete an object, if it exists and has this stamp; return whether it is deleted."""
        return bool(self.start_delete(key, stamp).result().generation)

    def start_delete(self, key: str, stamp: bytes | None = None) -> PendingOperation:
        return self._begin("delete", key, lambda kv: kv.write(key, None, if_equal=stamp))

    def list(self, start: str = "", stop: str | None = None) -> list[str]:
        """Return sorted keys in [start, stop) as the store reports them; see `Bucket.listing`."""
        import tensorstore as ts

        bounds = ts.KvStore.KeyRange(start.encode(), b"" if stop is None else stop.encode())
        keys = self._begin("list", "", lambda kv: kv.list(bounds), pending=PendingList).result()
        return sorted(key.decode(errors="surrogateescape") for key in keys)

    # Time.

    @contextlib.contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """Limit the total time of this thread's operations inside the context."""
        earlier = self.deadline()
        self._limits.deadline = min(earlier, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._limits.deadline = earlier

    def deadline(self) -> float:
        """Return the monotonic time by which this thread's operations must end."""
        return float(getattr(self._limits, "deadline", float("inf")))

    def _begin(
        self,
        verb: str,
        key: str,
        request: Any,
        nbytes: int = 0,
        pending: type[PendingOperation] = PendingOperation,
    ) -> PendingOperation:
        store = self._store
        try:
            return pending(self, request(store), verb, key, nbytes)
        except _ERRORS as error:
            problem = translate_error(error, verb, self.url_of(key))
        raise problem

    @functools.cached_property
    def _store(self) -> Any:
        import tensorstore as ts  # not at the top: importing tensorstore is slow

        return PendingOperation(self, ts.KvStore.open(spec(self.url)), "open", "").result()


INDEX_FORMAT = 2
MARK = f"~jstep.{INDEX_FORMAT}"
"""The mark of a bucket, whose number is that of the format of the index.

It has the version of jstep that wrote it, and sorts after all letters, digits and punctuation of
ASCII, and after the index.
"""
_MARK_NAME = re.compile(r"~jstep\.(?P<number>[0-9]+)")
_MARKS_END = "~jstep/"
"""Follows the marks of all formats."""
INDEX = "~attempts/"
"""The small object `~attempts/model-7/data.1` stands for the objects below `model-7/data.1/`, which
may be very many: a list of the index passes through none of them. (tensorstore lists all of an S3
prefix, whatever the range.)"""


class UnknownMarkError(Exception):
    """A later version of jstep has written the index of a bucket."""


class Bucket(Objects):
    """The objects below a URL, with the mark."""

    def mark(self) -> None:
        """Write the mark, if it does not exist yet."""
        if self.read(MARK).data is None:
            self.write_if(MARK, str(sys.modules["jstep"].__version__).encode(), ABSENT)

    def exists(self) -> bool:
        return self.read(MARK).data is not None or bool(self.listing())

    def index(self, start: str = "") -> list[str] | None:
        """Return the index's entries with this beginning; None if there is no mark.

        Then nothing was written there, or a copy.
        """
        for _ in range(2):  # the mark may be written meanwhile
            keys = self.list(f"{INDEX}{start}", _MARKS_END)
            self._check_no_later_mark(keys)
            if MARK in keys:
                entries = [key for key in keys if key.startswith(f"{INDEX}{start}")]
                return [entry.removeprefix(INDEX) for entry in entries]
            if self.read(MARK).data is None:
                return None
        raise self._truncated()

    def listing(self) -> list[str]:
        """Return all keys in order, without the mark; if it is absent, a second list must agree."""
        keys = self.list()
        self._check_no_later_mark(keys)
        if MARK in keys:
            return [key for key in keys if key != MARK]
        is_marked = self.read(MARK).data is not None
        if not is_marked and not keys:
            return []
        second_keys = self.list()
        # A mark that the first list lacks was written meanwhile, or the list is truncated: the
        # second one must have it.
        if MARK not in second_keys and (is_marked or second_keys != keys):
            raise self._truncated()
        return [key for key in second_keys if key != MARK]

    def _check_no_later_mark(self, keys: Iterable[str]) -> None:
        """Reject a bucket with the mark of a later version, which must not count as unmarked."""
        for key in keys:
            match = _MARK_NAME.fullmatch(key)
            if match is None or int(match["number"]) <= INDEX_FORMAT:
                continue
            version = (self.read(key).data or b"").decode(errors="replace")
            raise UnknownMarkError(
                f"{self.url_of(key)}: the index of this bucket has format {match['number']}, which "
                f"this version of jstep ({sys.modules['jstep'].__version__}) does not know. Its "
                f"checkpoints are intact, and were written by jstep {printable(version):.50}: "
                "install that or a later one"
            )

    def _truncated(self) -> PermissionError:
        return PermissionError(
            f"{self.url}: cannot list, or the list is truncated: have the credentials expired, or "
            "do they lack the right storage.objects.list or s3:ListBucket? If not, delete "
            f"{self.url_of(MARK)}"
        )


# Endpoint and credentials of S3 for a tensorstore spec, from the environment and the profiles of
# AWS's tools.
#
# tensorstore 0.1.86 does not read profiles by itself and ignores `AWS_ENDPOINT_URL`: it would send
# unsigned requests, and to Amazon. The spec contains paths of credential files, never their
# content, since a spec may be printed.


def spec(url: str) -> dict[str, Any]:
    """Return tensorstore's JSON for a URL, which names credential files but has no secrets."""
    scheme, bucket, key = parts_of_url(url)
    path = f"{key}/" if key else ""
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "path": path, "gcs_request_retries": RETRIES}
    return {
        "driver": "s3",
        "bucket": bucket,
        "path": path,
        "s3_request_retries": RETRIES,
        **s3_fields(),
    }


_CREDENTIALS = {"aws_access_key_id", "role_arn", "credential_process"}
"""The settings of a profile from which tensorstore obtains credentials."""


def s3_fields(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the endpoint, region and credentials of an `s3` spec.

    Keys in the environment come first, then the profile (`AWS_PROFILE`, `AWS_DEFAULT_PROFILE` or
    "default"), then the role of the container or instance.
    """
    env = os.environ if environ is None else environ
    files = (
        _file(env, "AWS_SHARED_CREDENTIALS_FILE", "credentials"),
        _file(env, "AWS_CONFIG_FILE", "config"),
    )
    name = env.get("AWS_PROFILE") or env.get("AWS_DEFAULT_PROFILE") or "default"
    settings = _profile(files, name)
    fields: dict[str, Any] = {}
    if env.get("AWS_ACCESS_KEY_ID") and env.get("AWS_SECRET_ACCESS_KEY"):
        fields["aws_credentials"] = {"type": "environment"}
    elif settings.keys() & _CREDENTIALS:
        existing = [path if os.path.isfile(path) else os.devnull for path in files]
        paths = {"credentials_file": existing[0], "config_file": existing[1]}
        fields["aws_credentials"] = {"type": "profile", "profile": name, **paths}
    elif env.get("AWS_PROFILE") and not settings:
        raise PermissionError(
            f"AWS_PROFILE={name!r}: must be a profile in {files[0]} or {files[1]}"
        )
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or settings.get("region")
    endpoint = (
        env.get("AWS_ENDPOINT_URL_S3")
        or env.get("AWS_ENDPOINT_URL")
        or settings.get("endpoint_url")
    )
    if endpoint:
        fields["endpoint"] = endpoint.rstrip("/")
    if region or endpoint:  # tensorstore requires a region with an endpoint, but uses only its name
        fields["aws_region"] = region or "us-east-1"
    return fields


def _file(env: Mapping[str, str], variable: str, name: str) -> str:
    return os.path.expanduser(env.get(variable) or os.path.join("~", ".aws", name))


def _profile(files: tuple[str, str], name: str) -> dict[str, str]:
    """Return a profile's settings: credentials are in the first file, others in the second."""
    settings: dict[str, str] = {}
    for path, sections in ((files[0], (name,)), (files[1], (f"profile {name}", name))):
        parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
        parser.read(path, encoding="utf-8")
        for section in filter(parser.has_section, sections):
            for key, value in parser.items(section):
                # The first file and the first section that have a key count.
                settings.setdefault(key, (value or "").strip())
    return settings


# Translation of tensorstore's errors: they name the bucket, the operation and what to do, and never
# a secret.
#
# tensorstore raises one ValueError for everything: its message begins with a status word and ends
# with the body of the response. That message is never shown, since bodies contain keys and
# signatures.

_LOGIN = {
    "gs": "`gcloud auth application-default login`, or GOOGLE_APPLICATION_CREDENTIALS",
    "s3": (
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; temporary keys expire "
        "after some hours"
    ),
}
_KEYS = (
    "ExpiredToken", "TokenRefreshRequired", "InvalidToken", "RequestExpired", "InvalidAccessKeyId",
    "SignatureDoesNotMatch", "AuthFailure", "UnrecognizedClientException",
)  # fmt: skip
_REGION = (
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
)
ENDPOINT = {
    "gs": "TENSORSTORE_GCS_HTTP_URL, if it is set",
    "s3": "AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL and AWS_REGION, if they are set",
}


class StoreError(OSError):
    """A request failed after all retries: the store is too busy, or the error is unknown."""


class BusyError(StoreError):
    """A store accepted no request for half a minute (429 and 5xx)."""


class EndlessListError(StoreError):
    """A list has more pages than a bucket of checkpoints needs."""


class LostError(StoreError):
    """Objects are missing or truncated, or their content is not what was written."""


def translate_error(error: Exception, verb: str, url: str) -> OSError:
    """Return the error to raise `from None` instead of tensorstore's error."""
    text = str(error)
    scheme, bucket, _ = parts_of_url(url)
    # Somebody else may have named the key.
    shown = printable(url)
    what = f"{shown}: cannot {verb}"
    codes = re.findall(r"\[http_response_code='([0-9]+)'\]", text)
    status = int(codes[-1]) if codes else 0
    code = next((code for code in (*_KEYS, *_REGION, "NoSuchBucket") if code in text), "")
    details = f"HTTP {status} {code}".strip()
    if status == 416 or text.startswith("OUT_OF_RANGE"):
        return LostError(f"{shown}: OUT_OF_RANGE: it is shorter than it was")
    if verb == "read" and text.startswith(("DATA_LOSS", "NOT_FOUND")) and not code:
        return LostError(f"{what}: {redact(text)}")
    if code in _REGION or status in (301, 307):
        return StoreError(
            f"{what}: the bucket is in another region ({details}); set AWS_REGION "
            "to that of the bucket"
        )
    if code in _KEYS or status == 401:
        return PermissionError(
            f"{what}: the credentials are not valid, or have expired ({details}): {_LOGIN[scheme]}"
        )
    if status == 403 or text.startswith("PERMISSION_DENIED"):
        return PermissionError(
            f"{what}: grant the right to {verb} in {bucket!r} ({details}), or use {_LOGIN[scheme]}"
        )
    if code == "NoSuchBucket" or (status == 404 and verb != "read"):
        return no_bucket(url, verb)
    curl = re.search(r"CURL error ([^\[\n]*)", text)
    if curl is not None:
        why = f"{hide('', curl[1].strip())}, tried for half a minute"
        return ConnectionError(
            f"{what}: {why}. Check the network and the address: {ENDPOINT[scheme]}"
        )
    if "retry attempts" in text or status == 429 or status >= 500:
        return BusyError(
            f"{what}: the store did not accept it ({details}). It is down; run again later"
        )
    if status:
        # S3 returns 400 for expired temporary keys, and gives the reason only in a body, which a
        # HEAD lacks.
        return StoreError(
            f"{what}: the store did not accept it ({details}); have the credentials expired?"
        )
    return StoreError(f"{what}: {redact(text)}")


def no_bucket(url: str, verb: str) -> FileNotFoundError:
    scheme, bucket, _ = parts_of_url(url)
    tools = {"gs": f"gcloud storage buckets create gs://{bucket}", "s3": f"aws s3 mb s3://{bucket}"}
    tool = tools[scheme]
    return FileNotFoundError(
        f"{printable(url)}: cannot {verb}: there is no bucket {bucket!r}; create it (`{tool}`)"
    )


def redact(text: str) -> str:
    beginning = re.split(r"\s*\[(?:http_response_body|source locations)|\n", text)[0]
    return printable(hide("", beginning))[:200]
