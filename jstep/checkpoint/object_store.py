"""A store of checkpoints below a URL of an object store: a checkpoint exists when its manifest does."""

import contextlib
import dataclasses
import functools
import shlex
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from jstep.checkpoint import attempts, claims, listing
from jstep.checkpoint.manifest import MANIFEST_FILE, CheckpointError, Manifest, decode, encode
from jstep.checkpoint.store import Commit, Files, Store
from jstep.core.logs import logger
from jstep.stores.objects import ABSENT, START_TIMEOUT_SECS, Bucket, PendingOperation, ReadResult, spec
from jstep.stores.urls import parts_of_url

_AT_ONCE = 16
"""Objects to delete at once."""


class ObjectStore(Store):
    poll_secs = 10.0  # each poll is a request
    _claim: claims.ObjectClaim | None = None

    def __init__(self, url: str, prefix: str | None) -> None:
        super().__init__(url, prefix)
        self._objects = Bucket(url)
        self._listed: listing.ListedCheckpoints | None = None
        """The list of a save in progress, while it decides which checkpoints to keep."""
        self._warned = self._forbidden = False

    def _name(self, path: str) -> str:
        return path.removeprefix(self.directory + "/")

    def _list(self, prefix: str | None) -> listing.ListedCheckpoints:
        start = "" if prefix is None else f"{prefix}-"
        return self._listed or listing.ListedCheckpoints(self._objects.listing(start), prefix)

    def newest_first(self, prefix: str | None, trusted: Collection[int] = frozenset()) -> Iterator[tuple[int, str]]:
        """See `Store.newest_first`. Missing objects are found on restore."""
        committed = self._list(prefix).committed
        for step, name in sorted(((step, name) for name, step in committed.items()), reverse=True):
            yield step, self.path(name)

    def at(self, prefix: str, step: int) -> str | None:
        name = listing.format_name(prefix, step)
        return None if self._objects.read(f"{name}/{MANIFEST_FILE}").data is None else self.path(name)

    def manifest(self, path: str) -> Manifest:
        url = f"{path}/{MANIFEST_FILE}"
        result = self._objects.read(f"{self._name(path)}/{MANIFEST_FILE}")
        if result.data is None:
            raise FileNotFoundError(f"{url}: there is no such object; the checkpoint was deleted")
        manifest = listing.decode_manifest(result.data, url)
        if manifest.data is not None and not listing.is_attempt(manifest.data):
            raise CheckpointError(f"{url}: its data is in {manifest.data!r:.50}, where jstep never puts it")
        return manifest

    def storage(self, path: str, manifest: Manifest) -> "ObjectStorage":
        name = self._name(path)
        return ObjectStorage(self._objects, name if manifest.data is None else f"{name}/{manifest.data}", verb="read")

    def lock(self) -> claims.ObjectClaim:
        """Take the claim, and check within `START_TIMEOUT_SECS` that the store can be read, listed and written."""
        with self._objects.within(START_TIMEOUT_SECS):
            self._objects.mark(f"{self._prefix}-")
            claim = claims.ObjectClaim(self._objects, self._prefix)
            try:
                self._list(self._prefix)
            except BaseException:
                claim.release()
                raise
            return claim

    def save(self, path: str, arrays: Mapping[str, Any], files: Mapping[str, Any], commit: Commit) -> None:
        """Write a checkpoint in a thread: arrays and files below an attempt, then the manifest, on condition."""
        from jstep.checkpoint import array_writer  # not at the top: importing tensorstore is slow

        name = self._name(path)
        attempt = f"data.{max(0, int(commit.saved_at))}-{commit.number:08x}"
        storage = ObjectStorage(self._objects, f"{name}/{attempt}", f"{name}/{MANIFEST_FILE}")

        def commit_attempt(sizes: Files) -> None:
            self._commit_attempt(name, attempt, storage.before, commit)

        def is_committed() -> bool:
            data = self._objects.read(f"{name}/{MANIFEST_FILE}").data
            return data is not None and decode(data).data == attempt

        process, count = jax.process_index(), jax.process_count()
        own_parts = array_writer.take(arrays)
        part = attempts.Attempt(
            storage, attempt, process, count, commit.saved_at, own_parts, files, commit_attempt, is_committed
        )
        self._write = attempts.BackgroundWrite(f"{name}/{attempt}", part.run, f"jstep-save-{name}")

    def _commit_attempt(self, name: str, attempt: str, before: ReadResult, commit: Commit) -> None:
        listed = self._listed = self._list(self._prefix)  # one list request per save
        try:
            commit.finish({}, functools.partial(self._publish, name, attempt, before))
            if not self._forbidden:
                try:  # the checkpoint exists
                    self._clean_up(listed, name, attempt, commit.saved_at)
                except (OSError, CheckpointError) as error:
                    self.log_undeleted(self.directory, error)
        finally:
            self._listed = None

    def _publish(self, name: str, attempt: str, before: ReadResult, manifest: Manifest) -> list[str]:
        """Write the manifest, if the claim holds and no other writer has written one meanwhile."""
        key, data = f"{name}/{MANIFEST_FILE}", encode(dataclasses.replace(manifest, data=attempt))
        if self._claim is not None:
            self._claim.check()
        stamp = self._objects.write_if(key, data, before.stamp)
        if stamp is None:
            raise CheckpointError(
                f"{self._objects.at(key)} was written by another writer meanwhile, and is left unchanged; give "
                "each run its own directory or prefix"
            )
        try:  # a process suspended between the two may have lost its claim and its data: undo the commit
            with contextlib.suppress(OSError):
                if self._claim is not None:
                    self._claim.check()
        except CheckpointError:
            if before.data is None:
                self._objects.delete(key, stamp)
            else:  # the step was saved before, and that checkpoint is still there
                self._objects.write_if(key, before.data, stamp)
            raise
        return []  # a reader may still read the replaced objects

    def _clean_up(self, listed: listing.ListedCheckpoints, new: str, attempt: str, time_now: float) -> None:
        """Remove what the new manifest has replaced, and what interrupted saves left behind."""
        for name, keys in listed.attempts.items():
            old = [other for other in keys if listing.is_old(other, time_now)]
            victims: list[str] = []
            if name == new:  # a reader may still read the replaced objects
                victims = [other for other in (old if name in listed.committed else keys) if other != attempt]
            elif name not in listed.committed:  # lists are unreliable: only a read shows that it has no manifest
                victims = list(keys) if self._objects.read(f"{name}/{MANIFEST_FILE}").data is None else []
            elif old and len(keys) > 1:  # all but the attempt of the existing checkpoint
                data = self.manifest(self.path(name)).data
                victims = [other for other in old if other != data]
            self.erase([key for victim in victims for key in keys[victim]])

    def command_to_set_aside(self, path: str) -> str:
        aside = f"{path}{listing.ASIDE}{int(time.time())}"
        if parts_of_url(path)[0] == "gs":
            return shlex.join(["gcloud", "storage", "mv", path, aside])
        return shlex.join(["aws", "s3", "mv", "--recursive", f"{path}/", f"{aside}/"])

    def hide(self, path: str) -> list[str]:
        """Delete the manifest unless another writer has replaced it; return the keys that it leaves behind."""
        if self._forbidden and self._listed is not None:
            return []  # trying again at each save, for more and more checkpoints, would be useless
        name = self._name(path)
        key = f"{name}/{MANIFEST_FILE}"
        listed = self._list(name.rpartition("-")[0])
        manifest = self._objects.read(key)
        if manifest.data is None or not self._objects.delete(key, manifest.stamp):
            return []
        ours = {key for attempt in listed.attempts.get(name, {}).values() for key in attempt}
        with contextlib.suppress(CheckpointError):  # a copy from a disk has its files next to the manifest
            ours |= {f"{name}/{file}" for file in decode(manifest.data).files}
        return sorted(ours)

    def erase(self, remains: Sequence[str]) -> None:
        for first in range(0, len(remains), _AT_ONCE):
            for pending in [self._objects.start_delete(key) for key in remains[first : first + _AT_ONCE]]:
                pending.result()

    def log_undeleted(self, path: str, error: Exception) -> None:
        """Log one warning for all checkpoints."""
        self._forbidden = self._forbidden or isinstance(error, PermissionError)
        if not self._warned:
            self._warned = True
            logger.warning("old checkpoints in %s stay because they cannot be deleted: %s", self.directory, error)

    def close(self, wait: bool = True) -> None:
        if self._write is not None and not wait:
            self._write.detach()
        super().close(wait)


class ObjectStorage(attempts.Storage):
    """The objects of an attempt. An object has its content from the start, or does not exist.

    Args:
        objects: The objects below the URL of the store.
        attempt: The key of the attempt.
        manifest: The key of the manifest that the attempt may replace.
        verb: The operation, for errors.
    """

    before = ReadResult(None, ABSENT)
    """The manifest that this attempt may replace."""

    def __init__(self, objects: Bucket, attempt: str, manifest: str = "", verb: str = "write") -> None:
        self._objects = objects
        self._attempt = attempt
        self._manifest = manifest
        self._verb = verb

    def begin(self) -> None:
        self.before = self._objects.read(self._manifest)

    def _key(self, key: str) -> str:
        return f"{self._attempt}/{key}" if key else self._attempt

    def path(self, key: str) -> str:
        return self._objects.at(self._key(key))

    def spec(self) -> dict[str, Any]:
        return spec(self.path(""))

    def read(self, key: str) -> bytes | None:
        return self._objects.read(self._key(key)).data

    def write(self, key: str, data: bytes) -> object:
        return self._objects.write(self._key(key), data)

    publish = write

    def wait(self, future: Any, nbytes: int) -> Any:
        return PendingOperation(self._objects, future, self._verb, self._attempt, nbytes).result()
