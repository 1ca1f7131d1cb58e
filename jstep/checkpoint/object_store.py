"""A store of checkpoints below a URL of an object store: a checkpoint exists when its manifest does."""

import contextlib
import dataclasses
import logging
import math
import shlex
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from jstep.checkpoint import listing, packs
from jstep.checkpoint import manifest as _manifest
from jstep.checkpoint.listing import Checkpoints, Commit, CorruptedError
from jstep.checkpoint.manifest import CheckpointError, Manifest
from jstep.checkpoint.object_save import OUTCOME, ObjectClaim, ObjectSave
from jstep.checkpoint.packs import own_blocks
from jstep.distributed import processes
from jstep.stores.objects import Directory, at_once, parts_of_url

HURRIED = 5.0
"""Seconds for optional requests."""
START = 38.0
"""Seconds within which the start of a run checks that it can read, list and write."""
_AT_ONCE = 16

_logger = logging.getLogger("jstep")


class ObjectStore:
    """A `Store` below a URL."""

    def __init__(self, url: str) -> None:
        self.directory = url
        self._objects = Directory(url)
        self._keys: list[str] | None = None
        """The list of a save in progress, while it decides which checkpoints to keep."""
        self._hurried = False
        self._claimed: ObjectClaim | None = None
        self._prefix = ""
        self._save: ObjectSave | None = None
        self._saving = ""
        self._warned = self._forbidden = False

    def path(self, name: str) -> str:
        """See `Store.path`."""
        return self._objects.at(name)

    def _name(self, path: str) -> str:
        return path.removeprefix(self.directory + "/")

    def _list(self, prefix: str | None) -> list[str]:
        return self._objects.listing("" if prefix is None else f"{prefix}-")

    def newest_first(self, prefix: str | None, trusted: Collection[int] = frozenset()) -> Iterator[tuple[int, str]]:
        """See `Store.newest_first`. Only manifests are listed; missing objects are found on restore."""
        del trusted
        hurried, self._hurried = self._hurried, False
        with self._objects.within(HURRIED if hurried else math.inf):
            keys = self._list(prefix) if self._keys is None else self._keys
        for step, name in Checkpoints(keys, prefix).newest_first():
            yield step, self.path(name)

    def at(self, prefix: str, step: int) -> str | None:
        """See `Store.at`."""
        name = f"{prefix}-{step}"
        there = self._objects.read(f"{name}/{_manifest.NAME}").data is not None
        return self.path(name) if there else None

    def broken(self, prefix: str, above: int) -> list[tuple[str, str]]:
        """See `Store.broken`."""
        return []

    def manifest(self, path: str) -> Manifest:
        """See `Store.manifest`."""
        url = f"{path}/{_manifest.NAME}"
        found = self._objects.read(f"{self._name(path)}/{_manifest.NAME}")
        if found.data is None:
            raise FileNotFoundError(f"{url}: there is no such object; the checkpoint was deleted")
        try:
            manifest = _manifest.decode(found.data)
            if manifest.is_packed and not listing.is_attempt(manifest.data):
                raise CheckpointError(f"its data is in {manifest.data!r:.50}, where jstep never puts it")
        except CheckpointError as error:
            raise type(error)(f"{url}: {error}") from None
        return manifest

    def find_corruption(
        self, path: str, manifest: Manifest, share: tuple[int, int] = (0, 1), *, every: bool = False
    ) -> list[str]:
        """See `Store.find_corruption`. Reads every byte."""
        above = f"{self._name(path)}/"
        if manifest.is_packed:
            return packs.find_corruption(self._objects, above, manifest, share)
        return listing.find_corruption_of_copy(self._objects, above, manifest, share, every=every)

    def restore(self, path: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Store.restore`. Each process reads the blocks that it needs and verifies their checksums."""
        if not shardings:
            return {}
        above = f"{self._name(path)}/"
        if not manifest.is_packed:
            from jstep.checkpoint import orbax_arrays  # not at the top: importing tensorstore is slow

            return orbax_arrays.read_copy(self._objects, above, manifest, shardings)
        try:
            return packs.read(self._objects, above, manifest, shardings)
        except CorruptedError:
            with contextlib.suppress(CheckpointError, OSError):
                if self.manifest(path).data != manifest.data:
                    raise CheckpointError(f"{path} was replaced while it was read; restore it again") from None
            raise

    def claim(self, prefix: str) -> None:
        """See `Store.claim`. Reads, lists and writes once, within `START` seconds."""
        if self._claimed is not None and self._claimed.is_held() and self._prefix == prefix:
            return
        with self._objects.within(START):
            self._objects.mark(f"{prefix}-")
            claim = ObjectClaim(self._objects, prefix)
            try:
                self._list(prefix)
            except BaseException:
                claim.release()
                raise
            self._claimed, self._prefix = claim, prefix

    def save(self, path: str, arrays: Mapping[str, Any], compress: bool, commit: Commit) -> None:
        """See `Store.save`."""
        process, count = jax.process_index(), jax.process_count()
        name = self._name(path)
        attempt = listing.attempt_of(*processes.broadcast_ints(*listing.new_attempt(commit.saved_at)))
        blocks = own_blocks(arrays, packs.PACK)

        def look() -> bytes:
            return self._objects.read(f"{name}/{_manifest.NAME}").stamp

        def end(files: Mapping[str, Mapping[str, Any]], seen: bytes) -> None:
            self._commit(name, attempt, files, commit, seen)

        self._saving = f"{name}/{attempt}"
        self._save = ObjectSave(self._objects, name, attempt, blocks, compress, (process, count), (look, end))
        if self._claimed is not None:
            self._claimed.saving = self._save.thread

    def _commit(
        self, name: str, attempt: str, files: Mapping[str, Mapping[str, Any]], commit: Commit, before: bytes
    ) -> None:
        keys = self._list(self._prefix)
        self._keys = keys  # one list request per save
        try:
            sealed, committed = commit.seal({f"{attempt}/{key}": record for key, record in files.items()})
            data = _manifest.encode(dataclasses.replace(sealed, data=attempt))
            self._put(f"{name}/{_manifest.NAME}", data, before)
            self._saving = ""
            with self._never_failing():
                committed()
                if not self._forbidden:
                    self._clean_up(Checkpoints(keys, self._prefix), name, attempt, commit.saved_at)
        finally:
            self._keys = None

    def _put(self, key: str, data: bytes, before: bytes) -> None:
        """Write the manifest, if the claim holds and no other writer has written it meanwhile."""
        if self._claimed is not None:
            self._claimed.check()
        stamp = self._objects.write_if(key, data, before)
        if stamp is None:
            raise CheckpointError(
                f"{self._objects.at(key)} was written by another writer meanwhile, and is left unchanged; give "
                "each run its own directory or prefix"
            )
        try:  # a process suspended between the two may have lost its claim and its data: undo the commit
            if self._claimed is not None:
                self._claimed.check()
        except OSError:
            pass
        except CheckpointError:
            self._objects.delete(key, stamp)
            raise

    def _clean_up(self, listed: Checkpoints, new: str, attempt: str, now: float) -> None:
        """Remove what the new manifest has replaced, and what interrupted saves left behind."""
        for name, attempts in listed.attempts.items():
            if name == new and name not in listed.committed:
                victims = [old for old in attempts if old != attempt]
            elif name == new:  # a reader may still read what was replaced
                victims = [old for old in attempts if old != attempt and listing.is_old(old, now)]
            elif name in listed.committed:
                victims = self._stale_attempts(name, list(attempts), now)
            else:  # a list is not reliable: only a read shows that there is no manifest
                gone = self._objects.read(f"{name}/{_manifest.NAME}").data is None
                victims = list(attempts) if gone else []
            self._delete([key for victim in victims for key in attempts[victim]])

    def _stale_attempts(self, name: str, attempts: Sequence[str], now: float) -> list[str]:
        """Return attempts that are older than an hour and do not belong to an existing checkpoint."""
        old = [attempt for attempt in attempts if listing.is_old(attempt, now)]
        if len(attempts) < 2 or not old:
            return []
        data = self.manifest(self.path(name)).data
        return [attempt for attempt in old if attempt != data]

    def wait(self) -> None:
        """See `Store.wait`."""
        save, self._save = self._save, None
        if save is not None:
            save.wait()

    def abandon(self, path: str) -> None:
        """See `Store.abandon`. The next save removes what remains."""
        self._hurried = True  # the error names the newest checkpoint only if the store responds quickly
        folder, self._saving = self._saving, ""
        if folder:
            with contextlib.suppress(OSError), self._objects.within(HURRIED):
                left = self._objects.list(f"{folder}/", f"{folder}0")
                self._delete([key for key in left if not key.endswith(f"/{OUTCOME}")])  # others may still read it

    def command_to_set_aside(self, path: str) -> str:
        """See `Store.command_to_set_aside`. The command is that of the cloud's own tool."""
        aside = f"{path}{listing.ASIDE}{int(time.time())}"
        if parts_of_url(path)[0] == "gs":
            return shlex.join(["gcloud", "storage", "mv", path, aside])
        return shlex.join(["aws", "s3", "mv", "--recursive", f"{path}/", f"{aside}/"])

    def evict(self, path: str) -> None:
        """See `Store.evict`. Deletes the manifest first, if it is unchanged, then our data."""
        if self._forbidden and self._keys is not None:
            return  # trying again at each save, for more and more checkpoints, would be useless
        with self._never_failing():
            name = self._name(path)
            key = f"{name}/{_manifest.NAME}"
            keys = self._list(name.rpartition("-")[0]) if self._keys is None else self._keys
            there = self._objects.read(key)
            if there.data is None or not self._objects.delete(key, there.stamp):
                return
            ours = {key for found in Checkpoints(keys, None).attempts.get(name, {}).values() for key in found}
            with contextlib.suppress(CheckpointError):  # a copy from a disk has its files next to the manifest
                ours |= {f"{name}/{file}" for file in _manifest.decode(there.data).files}
            self._delete(sorted(ours))

    def _delete(self, keys: Sequence[str]) -> None:
        for _, pending in at_once(((key, self._objects.start_delete(key)) for key in keys), _AT_ONCE):
            pending.result()

    @contextlib.contextmanager
    def _never_failing(self) -> Iterator[None]:
        """Never fail: the checkpoint exists, and what cannot be deleted is logged once."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            self._forbidden = self._forbidden or isinstance(error, PermissionError)
            if not self._warned:
                self._warned = True
                _logger.warning("old checkpoints in %s stay because they cannot be deleted: %s", self.directory, error)

    def leave(self) -> None:
        """See `Store.leave`. The claim waits for the save."""

    def close(self, wait: bool = True) -> None:
        """See `Store.close`."""
        if not wait and self._save is not None:
            self._save.detach()
        if self._claimed is not None:
            self._claimed.release(HURRIED if wait else 1)
            self._claimed = None
