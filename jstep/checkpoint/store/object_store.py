"""Checkpoints below a URL of an object store: a checkpoint is what its manifest says, and none without it."""

import contextlib
import dataclasses
import logging
import math
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jstep.checkpoint.format import manifest as _manifest
from jstep.checkpoint.format.manifest import CheckpointError, Manifest
from jstep.checkpoint.store import object_names as names
from jstep.checkpoint.store import packs, unpack
from jstep.checkpoint.store.blocks import own_blocks
from jstep.checkpoint.store.object_claim import ObjectClaim
from jstep.checkpoint.store.object_names import Checkpoints
from jstep.checkpoint.store.object_save import OUTCOME, ObjectSave
from jstep.checkpoint.store.protocol import Commit, DamagedError
from jstep.stores import Directory, Pending

START = 38.0
"""Seconds in which the start of a run has found out whether it can read, list and write."""
_HURRIED = 5.0
"""Seconds for what may as well not be done."""
_AT_ONCE = 16

_logger = logging.getLogger("jstep")


class ObjectStore:
    """A `Store` below a URL."""

    checks_what_it_reads = True

    def __init__(self, url: str) -> None:
        self.directory = url
        self._objects = Directory(url)
        self._claimed: ObjectClaim | None = None
        self._prefix = ""
        self._save: ObjectSave | None = None
        self._saving = ""
        self._keys: list[str] | None = None
        self._warned = self._forbidden = self._hurried = False

    # Reading.

    def path(self, name: str) -> str:
        """As `Store.path`."""
        return self._objects.at(name)

    def _name(self, path: str) -> str:
        return path.removeprefix(self.directory + "/")

    def _list(self, prefix: str | None) -> list[str]:
        return self._objects.listing("" if prefix is None else f"{prefix}-")

    def newest_first(self, prefix: str | None, trusted: Collection[int] = frozenset()) -> Iterator[tuple[int, str]]:
        """As `Store.newest_first`: what has a manifest. Objects are not looked for one by one, restoring does that."""
        del trusted
        hurried, self._hurried = self._hurried, False
        with self._objects.within(_HURRIED if hurried else math.inf):
            keys = self._list(prefix) if self._keys is None else self._keys
        for step, name in Checkpoints(keys, prefix).newest_first():
            yield step, self.path(name)

    def at(self, prefix: str, step: int) -> str | None:
        """As `Store.at`."""
        name = f"{prefix}-{step}"
        there = self._objects.read(f"{name}/{_manifest.NAME}").data is not None
        return self.path(name) if there else None

    def broken(self, prefix: str, above: int) -> list[str]:
        """As `Store.broken`."""
        return []

    def manifest(self, path: str) -> Manifest:
        """As `Store.manifest`."""
        return self._manifest(path)[0]

    def _manifest(self, path: str) -> tuple[Manifest, bytes]:
        url = f"{path}/{_manifest.NAME}"
        found = self._objects.read(f"{self._name(path)}/{_manifest.NAME}")
        if found.data is None:
            raise FileNotFoundError(f"{url}: there is no such object: the checkpoint was deleted")
        try:
            manifest = _manifest.decode(found.data)
            if not names.is_attempt(manifest.data):
                raise CheckpointError("it was written for a local directory; download the whole checkpoint to read it")
        except CheckpointError as error:
            raise CheckpointError(f"{url}: {error}") from None
        return manifest, found.stamp

    def damage(self, path: str, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> list[str]:
        """As `Store.damage`: every byte is read."""
        try:
            blocks = self._blocks(path, manifest)
            mine = set(sorted({block.pack for block in blocks})[share[0] :: share[1]])
            blocks = [block for block in blocks if block.pack in mine]
            dtypes = {block.dtype: jax.numpy.dtype(block.dtype) for block in blocks}
            folder = f"{self._name(path)}/{manifest.data}"
            unpack.read(
                self._objects, folder, blocks, lambda block, body: packs.decoded(block, body, dtypes[block.dtype])
            )
        except DamagedError as error:
            return error.problems
        except (TypeError, ValueError) as error:
            return [f"{path}: {error}"]
        return []

    def restore(self, path: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """As `Store.restore`: each process reads the blocks it needs, and compares the checksum of each."""
        if not shardings:
            return {}
        folder = f"{self._name(path)}/{manifest.data}"
        try:
            return unpack.arrays(self._objects, folder, manifest, self._blocks(path, manifest), shardings)
        except DamagedError:
            with contextlib.suppress(CheckpointError, OSError):
                if self.manifest(path).data != manifest.data:
                    raise CheckpointError(f"{path} was replaced while it was read; restore it again") from None
            raise

    def _blocks(self, path: str, manifest: Manifest) -> list[packs.Stored]:
        """All blocks of a checkpoint, from the parts that its processes wrote."""
        parts = {key: record for key, record in manifest.files.items() if key.split("/")[-1].startswith("part.")}
        reading = [(key, parts[key], self._objects.start_read(f"{self._name(path)}/{key}")) for key in parts]
        blocks: list[packs.Stored] = []
        problems = []
        for _, record, pending in reading:
            data = self._objects.found(pending).data
            if data is None:
                problems.append(f"{pending.url}: missing")
            elif record.get("crc32") != [f"{zlib.crc32(data):08x}"]:
                problems.append(f"{pending.url}: its checksum differs")
            else:
                try:
                    found = packs.read_index(data)[1]
                    if any(f"{manifest.data}/{block.pack}" not in manifest.files for block in found):
                        raise ValueError("it names an object that the manifest does not")
                    blocks += found
                except ValueError as error:
                    problems.append(f"{pending.url}: {error}")
        if problems:
            raise DamagedError(problems)
        return blocks

    # Writing.

    def claim(self, prefix: str) -> None:
        """As `Store.claim`: reads, lists and writes once, inside `START` seconds."""
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
        """As `Store.save`."""
        process, count = jax.process_index(), jax.process_count()
        name = self._name(path)
        attempt = _agreed_attempt()
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
        self._keys = keys  # one list a save
        try:
            sealed = commit.seal({f"{attempt}/{key}": record for key, record in files.items()})
            data = _manifest.encode(dataclasses.replace(sealed, data=attempt))
            if self._claimed is not None:
                self._claimed.check()
            if self._objects.write_if(f"{name}/{_manifest.NAME}", data, before) is None:
                raise CheckpointError(
                    f"{self.path(name)} was committed by another writer meanwhile, and is as that one left it; give "
                    "each run a directory or a prefix of its own"
                )
            self._saving = ""
            with self._never_failing():
                commit.committed()
                if not self._forbidden:
                    self._tidy(Checkpoints(keys, self._prefix), name, attempt)
        finally:
            self._keys = None

    def _tidy(self, listed: Checkpoints, new: str, attempt: str) -> None:
        """Clears what the new manifest has replaced, and what saves that were cut short have left."""
        for name, attempts in listed.attempts.items():
            if name == new and name not in listed.committed:
                victims = [old for old in attempts if old != attempt]
            elif name == new:  # a reader may be at what was replaced
                victims = [old for old in attempts if old != attempt and names.is_old(old)]
            elif name in listed.committed:
                victims = self._old_ones(name, list(attempts))
            else:  # a list is no evidence: only the store itself says that there is no manifest
                gone = self._objects.read(f"{name}/{_manifest.NAME}").data is None
                victims = list(attempts) if gone else []
            self._delete([key for victim in victims for key in attempts[victim]])

    def _old_ones(self, name: str, attempts: Sequence[str]) -> list[str]:
        """Attempts of a checkpoint that is there, of more than an hour ago, that are not what it consists of."""
        old = [attempt for attempt in attempts if names.is_old(attempt)]
        if len(attempts) < 2 or not old:
            return []
        data = self.manifest(self.path(name)).data
        return [attempt for attempt in old if attempt != data]

    def wait(self) -> None:
        """As `Store.wait`."""
        save, self._save = self._save, None
        if save is not None:
            save.wait()

    def abandon(self, path: str) -> None:
        """As `Store.abandon`: what is left is cleared by the next save."""
        self._hurried = True  # an error is to name what there is; where the store is down, it does without
        folder, self._saving = self._saving, ""
        if folder:
            with contextlib.suppress(OSError), self._objects.within(_HURRIED):
                left = self._objects.list(f"{folder}/", f"{folder}0")
                self._delete([key for key in left if not key.endswith(f"/{OUTCOME}")])  # others may still wait for it

    def evict(self, path: str) -> None:
        """As `Store.evict`: the manifest first, on condition, then the data that is ours."""
        if self._forbidden and self._keys is not None:
            return  # asking anew at each save, for ever more of them, is of no use
        with self._never_failing():
            name = self._name(path)
            key = f"{name}/{_manifest.NAME}"
            keys = self._list(name.rpartition("-")[0]) if self._keys is None else self._keys
            there = self._objects.read(key)
            if there.data is None or not self._objects.delete(key, there.stamp):
                return
            attempts = Checkpoints(keys, None).attempts.get(name, {})
            self._delete([key for found in attempts.values() for key in found])

    def _delete(self, keys: Sequence[str]) -> None:
        deleting: list[Pending] = []
        for key in keys:
            if len(deleting) == _AT_ONCE:
                deleting.pop(0).result()
            deleting.append(self._objects.start_delete(key))
        for pending in deleting:
            pending.result()

    @contextlib.contextmanager
    def _never_failing(self) -> Iterator[None]:
        """The checkpoint is there; what could not be deleted is said once."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            self._forbidden = self._forbidden or isinstance(error, PermissionError)
            if not self._warned:
                self._warned = True
                _logger.warning("old checkpoints in %s stay: %s", self.directory, error)

    def close(self, wait: bool = True) -> None:
        """As `Store.close`."""
        if not wait and self._save is not None:
            self._save.let_go()
        if self._claimed is not None:
            self._claimed.release(_HURRIED if wait else 1)
            self._claimed = None


def _agreed_attempt() -> str:
    """The name of a new attempt, the same on all processes."""
    attempt = names.new_attempt()
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        halves = np.array([*divmod(attempt[0], 2**16), attempt[1]], np.int32)
        high, low, number = map(int, np.asarray(multihost_utils.broadcast_one_to_all(halves)))
        attempt = high * 2**16 + low, number
    return names.attempt_of(attempt)
