"""A store of checkpoints below a URL of an object store: a checkpoint exists when its manifest does."""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import secrets
import shlex
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from jstep.checkpoint import checksums, claims, listing, packs
from jstep.checkpoint.contents import Contents, OrbaxContents
from jstep.checkpoint.manifest import MANIFEST_FILE, CheckpointError, Manifest, decode, encode
from jstep.checkpoint.store import Commit, Files, Store
from jstep.checkpoint.writes import Write
from jstep.distributed import processes
from jstep.stores.objects import START_TIMEOUT_SECS, Directory, PendingOperation, pipelined, spec
from jstep.stores.urls import parts_of_url

_AT_ONCE = 16

_logger = logging.getLogger("jstep")


class ObjectStore(Store):
    poll_secs = 10.0  # each poll is a request
    _claim: claims.ObjectClaim | None = None

    def __init__(self, url: str, prefix: str | None) -> None:
        super().__init__(url, prefix)
        self._objects = Directory(url)
        self._listed: listing.Checkpoints | None = None
        """The list of a save in progress, while it decides which checkpoints to keep."""
        self._warned = self._forbidden = False

    def _name(self, path: str) -> str:
        return path.removeprefix(self.directory + "/")

    def _list(self, prefix: str | None) -> listing.Checkpoints:
        start = "" if prefix is None else f"{prefix}-"
        return self._listed or listing.Checkpoints(self._objects.listing(start), prefix)

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
        if manifest.is_packed and not listing.is_attempt(manifest.data):
            raise CheckpointError(f"{url}: its data is in {manifest.data!r:.50}, where jstep never puts it")
        return manifest

    def contents(self, path: str, manifest: Manifest) -> Contents:
        name = self._name(path)

        def start_read(key: str, *bounds: int) -> Any:
            return self._objects.start_read(f"{name}/{key}", *bounds)

        if manifest.is_packed:
            return packs.PackedContents(start_read, manifest)

        def wait(future: object, nbytes: int) -> Any:
            return PendingOperation(self._objects, future, "read", f"{name}/", nbytes).result()

        differences = functools.partial(checksums.differences_of_objects, start_read)  # a copy from a disk
        return OrbaxContents(path, manifest, start_read, differences, spec(path), wait)

    def lock(self) -> claims.ObjectClaim:
        """Read, list and write once, within `START_TIMEOUT_SECS` seconds."""
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
        name = self._name(path)
        began, number = processes.broadcast_ints(max(0, int(commit.saved_at)), secrets.randbits(31))
        attempt = f"data.{began}-{number:08x}"
        blocks = itertools.chain(packs.own_blocks(arrays), packs.file_blocks(files))
        folder = f"{name}/{attempt}"
        commit_attempt = functools.partial(self._commit_attempt, name, attempt, commit)
        part = ObjectSave(self._objects, name, folder, blocks, commit_attempt)
        self._write = Write(folder, part.run, f"jstep-save-{name}")

    def _commit_attempt(self, name: str, attempt: str, commit: Commit, files: Files, before: bytes) -> None:
        listed = self._listed = self._list(self._prefix)  # one list request per save
        try:
            below = {f"{attempt}/{key}": record for key, record in files.items()}
            commit.finish(below, functools.partial(self._publish, name, attempt, before))
            if not self._forbidden:
                try:  # the checkpoint exists
                    self._clean_up(listed, name, attempt, commit.saved_at)
                except (OSError, CheckpointError) as error:
                    self.log_undeleted(self.directory, error)
        finally:
            self._listed = None

    def _publish(self, name: str, attempt: str, before: bytes, manifest: Manifest) -> list[str]:
        """Write the manifest, if the claim holds and no other writer has written one meanwhile."""
        key, data = f"{name}/{MANIFEST_FILE}", encode(dataclasses.replace(manifest, data=attempt))
        if self._claim is not None:
            self._claim.check()
        stamp = self._objects.write_if(key, data, before)
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
            self._objects.delete(key, stamp)
            raise
        return []  # a reader may still read the replaced objects

    def _clean_up(self, listed: listing.Checkpoints, new: str, attempt: str, now: float) -> None:
        """Remove what the new manifest has replaced, and what interrupted saves left behind."""
        for name, attempts in listed.attempts.items():
            old = [folder for folder in attempts if listing.is_old(folder, now)]
            victims: list[str] = []
            if name == new:  # a reader may still read the replaced objects
                victims = [folder for folder in (old if name in listed.committed else attempts) if folder != attempt]
            elif name not in listed.committed:  # lists are unreliable: only a read shows that it has no manifest
                victims = list(attempts) if self._objects.read(f"{name}/{MANIFEST_FILE}").data is None else []
            elif old and len(attempts) > 1:  # all but the attempt of the existing checkpoint
                data = self.manifest(self.path(name)).data
                victims = [folder for folder in old if folder != data]
            self.erase([key for victim in victims for key in attempts[victim]])

    def command_to_set_aside(self, path: str) -> str:
        aside = f"{path}{listing.ASIDE}{int(time.time())}"
        if parts_of_url(path)[0] == "gs":
            return shlex.join(["gcloud", "storage", "mv", path, aside])
        return shlex.join(["aws", "s3", "mv", "--recursive", f"{path}/", f"{aside}/"])

    def hide(self, path: str) -> list[str]:
        """Delete the manifest, if it is unchanged."""
        if self._forbidden and self._listed is not None:
            return []  # trying again at each save, for more and more checkpoints, would be useless
        name = self._name(path)
        key = f"{name}/{MANIFEST_FILE}"
        listed = self._list(name.rpartition("-")[0])
        there = self._objects.read(key)
        if there.data is None or not self._objects.delete(key, there.stamp):
            return []
        ours = {key for attempt in listed.attempts.get(name, {}).values() for key in attempt}
        with contextlib.suppress(CheckpointError):  # a copy from a disk has its files next to the manifest
            ours |= {f"{name}/{file}" for file in (*decode(there.data).files, listing.COMMITTED)}
        return sorted(ours)

    def erase(self, remains: Sequence[str]) -> None:
        for _, pending in pipelined(((key, self._objects.start_delete(key)) for key in remains), _AT_ONCE):
            pending.result()

    def log_undeleted(self, path: str, error: Exception) -> None:
        """Log one warning for all checkpoints."""
        self._forbidden = self._forbidden or isinstance(error, PermissionError)
        if not self._warned:
            self._warned = True
            _logger.warning("old checkpoints in %s stay because they cannot be deleted: %s", self.directory, error)

    def close(self, wait: bool = True) -> None:
        if self._write is not None and not wait:
            self._write.detach()
        super().close(wait)


# One save to an object store in a background thread: data, parts, manifest, and removal of superseded objects.
#
#     1. Every process writes its packs below data.<attempt>, and then its part: the index of its packs.
#     2. The first process waits for all parts, checks that its claim still holds, and writes the manifest, on the
#        condition that the previous manifest is unchanged. From here on the checkpoint exists.
#     3. The first process removes old objects, which never fails the save, and reports the outcome to the others.
#
# A crash before 2 leaves unreferenced objects, which the next save removes.

OUTCOME = "outcome.json"
"""The object in which the first process reports the outcome of a save to the others."""
_OUTCOME_TIMEOUT = 1800.0
"""Seconds that the others wait for the outcome: the first process may have much more to write."""
_PEER_SECS = 120.0
"""Seconds that the first process waits for the others, plus ten times the time of its own part."""


@dataclasses.dataclass(frozen=True)
class ObjectSave:
    """The part of one process in a save.

    `blocks` are taken once, and then their memory is free. The first process calls `commit` at the end, with the
    records of all objects and the stamp of the previous manifest.
    """

    objects: Directory
    name: str
    folder: str
    blocks: Iterator[packs.Block]
    commit: Callable[[Files, bytes], None]

    def run(self) -> None:
        """Write this process's part; then the first process commits all parts, and the others wait for it."""
        index = jax.process_index()
        is_first = index == 0
        try:
            before = self.objects.read(f"{self.name}/{MANIFEST_FILE}").stamp if is_first else b""
            began = time.monotonic()
            part = packs.write(self.objects, self.folder, index, self.blocks)
            self.objects.write(f"{self.folder}/part.{index}.json", part)
            if is_first:
                self.commit(self._parts(part, time.monotonic() - began), before)
        except BaseException as error:
            self._report(f"{type(error).__name__}: {error}"[:300])
            raise
        if is_first:
            self._report("")
        else:
            missing = "the first process has not reported the outcome"
            data = self._polled(f"{self.folder}/{OUTCOME}", began + _OUTCOME_TIMEOUT, missing)
            if failed := json.loads(data)["failed"]:
                raise CheckpointError(f"on the first process: {failed}")

    def _parts(self, own: bytes, took: float) -> dict[str, dict[str, Any]]:
        files: dict[str, dict[str, Any]] = {}
        until = time.monotonic() + _PEER_SECS + 10 * took
        for index in range(jax.process_count()):
            key = f"part.{index}.json"
            late = f"process {index} has not written"
            data = own if index == 0 else self._polled(f"{self.folder}/{key}", until, late)
            if data.startswith(b'{"failed"'):
                raise CheckpointError(f"process {index}: {json.loads(data)['failed']}")
            files |= packs.read_index(data)[0]
            files[key] = {"bytes": len(data), "crc32": [f"{zlib.crc32(data):08x}"]}
        return dict(sorted(files.items()))

    def _polled(self, key: str, until: float, missing: str) -> bytes:
        pause = 0.02
        while (data := self.objects.read(key).data) is None:
            if time.monotonic() > until:
                raise CheckpointError(f"{self.objects.at(key)}: {missing}")
            time.sleep(pause)
            pause = min(1.0, 1.5 * pause)
        return data

    def _report(self, failed: str) -> None:
        if jax.process_count() > 1:
            index = jax.process_index()
            key = OUTCOME if index == 0 else f"part.{index}.json"
            try:
                self.objects.write(f"{self.folder}/{key}", json.dumps({"failed": failed}).encode())
            except OSError as error:
                _logger.warning(
                    "the outcome of %s could not be reported to the other processes: %s", self.folder, error
                )
