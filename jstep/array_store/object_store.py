"""A store of checkpoints below a URL of an object store: one exists when its manifest does."""

import contextlib
import dataclasses
import functools
import re
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jstep.array_store import attempts, claims, listing
from jstep.array_store.manifest import (
    MANIFEST_FILE,
    CheckpointError,
    Manifest,
    UnsupportedFormatError,
    decode,
    encode,
)
from jstep.array_store.store import Store
from jstep.core.checks import format_list
from jstep.core.logs import logger
from jstep.core.threads import SerialTasks
from jstep.stores.objects import (
    ABSENT,
    INDEX,
    START_TIMEOUT_SECS,
    Bucket,
    PendingOperation,
    ReadResult,
    UnknownMarkError,
    pipelined,
    spec,
)
from jstep.stores.urls import parts_of_url

_ENTRY = b"an attempt to save a checkpoint\n"
"""The content of an entry of the index. It is not empty, because copies and clean-ups leave out
empty objects."""
_FOLLOWED = b"a checkpoint that was followed by "
"""The beginning of the content of the entry of a checkpoint that is not the newest."""
_MANIFEST_KEY = re.compile(rf"[^/]+/{re.escape(MANIFEST_FILE)}")
_MIN_LISTED = 3
"""The minimum number of checkpoints beside the newest one for which all objects may be listed."""
_OTHER_OBJECTS = 8
"""The objects of a checkpoint that are not full, for each process: nodes and roots, and the report
of its part."""
_KEYS_OF_PAGE = 1000
"""The keys in one response to a list. The next page is requested after it."""
_READS_OF_PAGE = 16
"""How many concurrent reads take as long as one page of a list."""
_MAX_LISTINGS = 3
"""The maximum number of lists until one has a checkpoint: a writer may replace the only one during
a list."""


@contextlib.contextmanager
def _known_marks() -> Iterator[None]:
    try:
        yield
    except UnknownMarkError as error:
        raise UnsupportedFormatError(str(error)) from None


class ObjectStore(Store):
    poll_secs = 10.0  # each poll is a request
    _claim: claims.ObjectClaim | None = None

    def __init__(self, url: str, prefix: str | None) -> None:
        super().__init__(url, prefix)
        self.objects = Bucket(url)
        # Name of a checkpoint → its attempts, as `_find_newest` last found them in the index.
        self._attempts: dict[str, list[str]] = {}
        # The same for checkpoints that the index lacks, and a list of all objects has. `lock` adds
        # them to the index.
        self._lost: dict[str, list[str]] = {}
        # Prefixes for which a list of all objects had no more than the index, so that no other such
        # list is needed.
        self._complete_prefixes: set[str | None] = set()
        # Step → path of the checkpoints of this writer, as long as it holds the claim.
        self._own_paths: dict[int, str] = {}
        # Why old checkpoints stay: the first error, or the last PermissionError if there is one.
        self._undeleted: Exception | None = None
        # The deletions, in a thread, and how many of them have not ended.
        self._erasing = SerialTasks(
            "jstep-delete", functools.partial(self.log_undeleted, url), daemon=True
        )
        self._unerased = 0
        # The result of `list_once`, by prefix; None if each call lists the index itself.
        self._keys: dict[str, list[str]] | None = None

    def _name(self, path: str) -> str:
        return path.removeprefix(self.directory + "/")

    def list_once(self) -> None:
        self._keys = listing.keys_by_prefix(self._list_keys(""))

    def _listed(self, prefix: str | None) -> listing.ListedCheckpoints:
        if self._keys is not None and prefix is not None:
            return listing.ListedCheckpoints(self._keys.get(prefix, ()), prefix)
        return listing.ListedCheckpoints(
            self._list_keys("" if prefix is None else f"{prefix}-"), prefix
        )

    def _list_keys(self, start: str) -> list[str]:
        """Return what the index has with this beginning; without an index, all keys."""
        with _known_marks():
            index = self.objects.index(start)
            return self.objects.listing() if index is None else index

    def newest_first(self, prefix: str | None) -> Iterator[tuple[int, str]]:
        """See `Store.newest_first`. Missing objects are found on restore.

        The index may lack entries: somebody has deleted them, or copied a bucket in which they were
        empty objects, as they once were. A run that believed such an index would start from
        scratch, and overwrite what is there.
        """
        for _ in range(_MAX_LISTINGS):
            found = self._find_newest(prefix)
            if not found.names:
                return
            # Before the others are looked for: most callers want only the newest one.
            if found.is_newest_there:
                newest = found.names[0]
                yield found.steps[newest], self.path(newest)
            others = self.objects.existing(f"{name}/{MANIFEST_FILE}" for name in found.names[1:])
            for key in others:
                name = key.rpartition("/")[0]
                yield found.steps[name], self.path(name)
            if found.is_newest_there or others:
                return
            if self._keys is not None:
                self.list_once()

    def _find_newest(self, prefix: str | None) -> "_FoundCheckpoints":
        """Find which checkpoints may exist, and whether the newest of them does.

        It also sets `_attempts`, and perhaps `_lost`, for `_complete_paths` and `lock`.
        """
        listed = self._listed(prefix)
        self._attempts = listed.attempts
        steps: Mapping[str, int] = listed.steps
        names = _highest_first(steps)
        is_newest_there = self._exists(names[:1])
        if not is_newest_there or self._is_followed(names[0], listed):
            # The index may lack the newest one.
            steps = {**steps, **self._find_lost(prefix, listed)}
            names = _highest_first(steps)
            is_newest_there = self._exists(names[:1])
        return _FoundCheckpoints(steps, names, is_newest_there)

    def _exists(self, names: Sequence[str]) -> bool:
        """Return whether one of some checkpoints exists."""
        return bool(self.objects.existing(f"{name}/{MANIFEST_FILE}" for name in names))

    def all_steps(self, prefix: str) -> list[int]:
        return sorted(self._complete_paths(prefix))

    def _complete_paths(self, prefix: str) -> dict[int, str]:
        """Return step → path.

        The index does not say which checkpoints exist: it also has saves that did not end, and
        checkpoints that were deleted by hand. Either all objects are listed, or each manifest is
        requested, whichever takes less time.
        """
        checkpoints = self.newest_first(prefix)
        newest = next(checkpoints, None)
        if newest is None:
            return {}
        # Both are what `newest_first` has found last. It sets `_attempts` each time, and `_lost`
        # only if it lists all objects.
        others = len(self._attempts.keys() | self._lost.keys()) - 1
        if others < _MIN_LISTED or not self._is_list_short(newest[1], others):
            return dict([newest, *checkpoints])
        with _known_marks():
            manifests = [key for key in self.objects.listing() if _MANIFEST_KEY.fullmatch(key)]
        steps = listing.ListedCheckpoints(manifests, prefix).steps
        return {step: self.path(name) for name, step in steps.items()}

    def _is_list_short(self, newest: str, others: int) -> bool:
        """Return whether a list of all objects takes less time than requests for manifests.

        It does if it has fewer pages than there would be rounds of such requests.
        """
        try:
            manifest = self.manifest(newest)
        except (CheckpointError, FileNotFoundError):
            return False
        nbytes = sum([leaf.nbytes for leaf in manifest.leaves])
        objects_of_one = nbytes // listing.OBJECT_BYTES + _OTHER_OBJECTS * manifest.processes
        pages = (others + 1) * objects_of_one / _KEYS_OF_PAGE
        return pages <= 1 + others / _READS_OF_PAGE

    def _is_followed(self, name: str, listed: listing.ListedCheckpoints) -> bool:
        """Return whether the index says that a newer checkpoint was saved after this one."""
        for attempt in listed.attempts.get(name, ()):
            entry = self.objects.read(f"{INDEX}{name}/{attempt}").data
            if entry is not None and entry.startswith(_FOLLOWED):
                return True
        return False

    def _find_lost(
        self, prefix: str | None, listed: listing.ListedCheckpoints
    ) -> Mapping[str, int]:
        """Return name → step of checkpoints that the index lacks, and a list of all objects has.

        Such a list may be long. Once it has had no more than the index, none is requested again.
        """
        if prefix in self._complete_prefixes:
            return {}
        whole = listing.ListedCheckpoints(self.objects.listing(), prefix)
        lost = {name: whole.steps[name] for name in whole.steps.keys() - listed.attempts.keys()}
        if not lost:
            # Checkpoints that are saved from now on are in the index.
            self._complete_prefixes.add(prefix)
            return {}
        logger.warning(
            "%s: the index %s lacks %s, which a list of all objects has; were its objects "
            "deleted, or not copied?",
            self.directory,
            INDEX,
            format_list(sorted(lost), 3),
        )
        self._lost = {name: whole.attempts[name] for name in lost}
        return lost

    def own_paths(self) -> dict[int, str]:
        return dict(self._own_paths)

    def find_path(self, prefix: str, step: int) -> str | None:
        name = listing.format_name(prefix, step)
        manifest = self.objects.read(f"{name}/{MANIFEST_FILE}").data
        return None if manifest is None else self.path(name)

    def path_to_read(self, prefix: str, step: int) -> str | None:
        """See `Store.path_to_read`: no request, since reading the manifest shows if it exists."""
        return self.path(listing.format_name(prefix, step))

    def manifest(self, path: str) -> Manifest:
        url = f"{path}/{MANIFEST_FILE}"
        result = self.objects.read(f"{self._name(path)}/{MANIFEST_FILE}")
        if result.data is None:
            raise FileNotFoundError(f"{url}: there is no such object; the checkpoint was deleted")
        manifest = listing.decode_manifest(result.data, url)
        if manifest.data is not None and not listing.is_attempt(manifest.data):
            raise CheckpointError(
                f"{url}: its data is in {manifest.data!r:.50}, where jstep never puts it"
            )
        return manifest

    def complete_manifest(self, prefix: str, step: int) -> Manifest | None:
        """See `Store.complete_manifest`: in one request."""
        try:
            return self.manifest(self.path(listing.format_name(prefix, step)))
        except FileNotFoundError:
            return None

    def storage(self, path: str, manifest: Manifest) -> "ObjectStorage":
        name = self._name(path)
        key = name if manifest.data is None else f"{name}/{manifest.data}"
        return ObjectStorage(self.objects, key, verb="read")

    def lock(self) -> claims.ObjectClaim:
        """Take the claim, and check that the store can be read, listed and written.

        The check ends within `START_TIMEOUT_SECS`.
        """
        with self.objects.time_limit(START_TIMEOUT_SECS), _known_marks():
            claim = claims.ObjectClaim(self.objects, self._prefix)
            try:
                if self.objects.index() is None:
                    self._index(listing.ListedCheckpoints(self.objects.listing(), None).attempts)
                    self.objects.mark()
                self._own_paths = self._complete_paths(self._prefix)
                self._index(self._lost)
                self._lost = {}
            except BaseException:
                claim.release()
                raise
            return claim

    def _index(self, found: Mapping[str, Sequence[str]]) -> None:
        """Add checkpoints to the index: their attempts by name."""
        for name, attempts_of_name in found.items():
            for attempt in attempts_of_name or [listing.COPIED]:
                self.objects.write(f"{INDEX}{name}/{attempt}", _ENTRY)

    def begin(
        self, path: str, attempt_id: int, saved_at: float, *, process: int, count: int
    ) -> attempts.Attempt:
        """See `Store.begin`.

        Arrays and files are written below the attempt, then the manifest (`publish`).
        """
        self.erase_secs = 0.0
        return ObjectAttempt(self, path, attempt_id, saved_at)

    def publish(self, attempt: "ObjectAttempt", manifest: Manifest) -> None:
        """Write the manifest, if the claim holds and no other writer has written one meanwhile."""
        data = encode(dataclasses.replace(manifest, data=attempt.data))
        claim = self._claim  # read once: a `close` that does not wait for this thread drops it
        if claim is not None:
            claim.check()
        stamp = self.objects.write_if(attempt.manifest_key, data, attempt.previous.stamp)
        if stamp is None:
            url = self.objects.url_of(attempt.manifest_key)
            raise CheckpointError(
                f"{url} was written by another writer meanwhile; stop one of the two runs"
            )
        try:
            # This process may have been suspended since the first check, while another one took the
            # claim and deleted the data of this attempt.
            if claim is not None:
                claim.check()
        except CheckpointError:
            if attempt.previous.data is None:
                self.objects.delete(attempt.manifest_key, stamp)
            else:  # the step was saved before, and that checkpoint is still there
                self.objects.write_if(attempt.manifest_key, attempt.previous.data, stamp)
            raise
        self._own_paths[manifest.step] = attempt.path

    def clean_up(self, new: "ObjectAttempt") -> None:
        """Remove data that a new checkpoint has replaced, and leftovers of interrupted saves."""
        listed = self._listed(self._prefix).attempts
        self._mark_followed(new, listed)
        complete = {self._name(path) for path in self._own_paths.values()}
        for name, found in listed.items():
            if name == self._name(new.path):
                useless = _useless_beside(new, found)
            elif name in complete:
                useless = self._useless_in_complete(new, name, found)
            elif self.objects.read(f"{name}/{MANIFEST_FILE}").data is None:
                useless = found
            else:
                # A checkpoint that this writer did not know.
                useless = []
            self.erase([f"{name}/{attempt}/" for attempt in useless])

    def _useless_in_complete(
        self, new: "ObjectAttempt", name: str, found: Sequence[str]
    ) -> list[str]:
        """Return the old attempts of an existing checkpoint, but the one that it is made of."""
        old = [attempt for attempt in found if listing.is_old(attempt, new.saved_at)]
        if not old or len(found) == 1:
            return []
        data = self.manifest(self.path(name)).data
        return [attempt for attempt in old if attempt != data]

    def _mark_followed(self, new: "ObjectAttempt", listed: Mapping[str, Sequence[str]]) -> None:
        """Note in the index, at the checkpoint before a new one, that it is not the newest."""
        step = next(step for step, path in self._own_paths.items() if path == new.path)
        lower = [other for other in self._own_paths if other < step]
        if not lower or max(self._own_paths) > step:
            return
        name = self._name(self._own_paths[max(lower)])
        for attempt in listed.get(name, ()):
            self.objects.write(
                f"{INDEX}{name}/{attempt}", _FOLLOWED + self._name(new.path).encode()
            )

    def command_to_set_aside(self, path: str) -> str:
        aside = f"{path}{listing.ASIDE}{int(time.time())}"
        if parts_of_url(path)[0] == "gs":
            return shlex.join(["gcloud", "storage", "mv", path, aside])
        return shlex.join(["aws", "s3", "mv", "--recursive", f"{path}/", f"{aside}/"])

    def hide(self, path: str) -> list[str]:
        """Delete the manifest unless another writer replaced it; return the keys that it leaves."""
        if isinstance(self._undeleted, PermissionError):
            # Trying again at each save, for more and more, is useless.
            raise self._undeleted.with_traceback(None)
        name = self._name(path)
        key = f"{name}/{MANIFEST_FILE}"
        manifest = self.objects.read(key)
        if manifest.data is not None and not self.objects.delete(key, manifest.stamp):
            return []  # there is another checkpoint now
        self._own_paths = {step: other for step, other in self._own_paths.items() if other != path}
        if manifest.data is None:
            return []  # it was deleted before
        with contextlib.suppress(CheckpointError):
            # The error is that of a manifest that does not say where its data is.
            hidden = decode(manifest.data)
            if listing.is_attempt(hidden.data):
                return [f"{name}/{hidden.data}/"]
            # It was copied from a disk: its files are beside the manifest.
            return [*[f"{name}/{file}" for file in hidden.files], f"{name}/{listing.COPIED}/"]
        return []

    # Deletion, in a thread: the next save does not wait for it.

    def erase(self, remains: Sequence[str]) -> None:
        """See `Store.erase`; keys with a slash at the end are those of attempts."""
        if remains:
            self._unerased += 1
            self._erasing.add(functools.partial(self._erase, remains))

    def _erase(self, remains: Sequence[str]) -> None:
        began = time.monotonic()
        try:
            for key in remains:
                is_attempt = key.endswith("/")
                keys = self.objects.list(key, _end_of(key)) if is_attempt else [key]
                for _, operation in pipelined(self.objects.start_delete, keys):
                    operation.result()
                # Its entry last: if this is interrupted, the next save finds what is left.
                if is_attempt:
                    self.objects.delete(f"{INDEX}{key[:-1]}")
        finally:
            self.erase_secs += time.monotonic() - began
            self._unerased -= 1

    def is_erasing(self) -> bool:
        return self._unerased > 0

    def finish_erasing(self) -> None:
        if self._claim is not None and self._claim.is_held():  # not in a fork, whose parent deletes
            self._erasing.wait(threading.TIMEOUT_MAX)

    def log_undeleted(self, path: str, error: Exception) -> None:
        """Log one warning for all checkpoints."""
        if self._undeleted is None:
            logger.warning(
                "old checkpoints in %s stay because they cannot be deleted: %s",
                self.directory,
                error,
            )
        if self._undeleted is None or isinstance(error, PermissionError):
            self._undeleted = error


class _FoundCheckpoints(NamedTuple):
    """What a list shows of the checkpoints of a prefix.

    Attributes:
        steps: Name → step of the checkpoints that may exist.
        names: Their names, in descending order of the steps.
        is_newest_there: Whether the first of them exists.
    """

    steps: Mapping[str, int]
    names: Sequence[str]
    is_newest_there: bool


def _end_of(key: str) -> str:
    """Return the end of the range of the keys below one, which has a slash at its end."""
    # In ASCII, 0 follows the slash.
    return f"{key[:-1]}0"


def _highest_first(steps: Mapping[str, int]) -> list[str]:
    """Return the names of checkpoints in descending order of their steps."""
    return sorted(steps, key=lambda name: (steps[name], name), reverse=True)


def _useless_beside(new: "ObjectAttempt", found: Sequence[str]) -> list[str]:
    """Return the other attempts of a new checkpoint.

    If it replaces one, only attempts of more than an hour ago: a reader may still read the data of
    the replaced one.
    """
    others = [attempt for attempt in found if attempt != new.data]
    if new.previous.data is None:
        return others
    return [attempt for attempt in others if listing.is_old(attempt, new.saved_at)]


class ObjectAttempt(attempts.Attempt):
    """An attempt in a bucket.

    Attributes:
        data: The name of its data.
        key: The key of its data.
        manifest_key: The key of the manifest.
        previous: The manifest that it may replace.
    """

    may_report_saved = True

    def __init__(self, store: ObjectStore, path: str, attempt_id: int, saved_at: float) -> None:
        self.saved_at = saved_at
        self.data = f"data.{max(0, int(saved_at))}-{attempt_id:08x}"
        name = path.removeprefix(store.directory + "/")
        self.key = f"{name}/{self.data}"
        self.manifest_key = f"{name}/{MANIFEST_FILE}"
        super().__init__(ObjectStorage(store.objects, self.key), path)
        self.thread = f"jstep-save-{name}"
        self._store = store
        self.previous = ReadResult(None, ABSENT)

    def begin(self) -> None:
        self.previous = self._store.objects.read(self.manifest_key)
        self._store.objects.write(f"{INDEX}{self.key}", _ENTRY)

    def publish(self, manifest: Manifest) -> Sequence[str]:
        self._store.publish(self, manifest)
        return []  # a reader may still read the replaced objects

    def is_published(self, report_key: str) -> bool:
        data = self._store.objects.read(self.manifest_key).data
        return data is not None and decode(data).data == self.data

    def clean_up(self) -> None:
        try:
            self._store.clean_up(self)
        except (OSError, CheckpointError) as error:
            # It is not an error of the save: the checkpoint exists.
            self._store.log_undeleted(self._store.directory, error)


class ObjectStorage(attempts.Storage):
    """The objects of an attempt. An object has its content from the start, or does not exist.

    Args:
        objects: The objects below the URL of the store.
        attempt: The key of the attempt.
        verb: The operation, for errors.
    """

    def __init__(self, objects: Bucket, attempt: str, verb: str = "write") -> None:
        self._objects = objects
        self._attempt = attempt
        self._verb = verb

    def _key(self, key: str) -> str:
        return f"{self._attempt}/{key}" if key else self._attempt

    def path(self, key: str) -> str:
        return self._objects.url_of(self._key(key))

    def spec(self) -> dict[str, Any]:
        return spec(self.path(""))

    def read(self, key: str) -> bytes | None:
        return self._objects.read(self._key(key)).data

    def names(self, key: str) -> list[str]:
        keys = self._objects.list(self._key(key), _end_of(self._key(key)))
        return [found.removeprefix(self._key(key)) for found in keys]

    def progress(self, keys: Sequence[str]) -> list[int]:
        # From the first key to the last one: between them are the parts of other processes.
        first = self._key(min(keys))
        last = self._key(max(keys))
        counts = dict.fromkeys(keys, 0)
        for found in self._objects.list(first, _end_of(last)):
            top = found.removeprefix(f"{self._attempt}/").partition("/")[0]
            if f"{top}/" in counts:
                counts[f"{top}/"] += 1
        return list(counts.values())

    def write(self, key: str, data: bytes) -> object:
        return self._objects.write(self._key(key), data)

    write_atomically = write

    def wait(self, future: Any, nbytes: int) -> Any:
        return PendingOperation(self._objects, future, self._verb, self._attempt, nbytes).result()
