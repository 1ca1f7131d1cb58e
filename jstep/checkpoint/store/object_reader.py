"""Reading of checkpoints below a URL: listing, manifests and arrays."""

import contextlib
import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax

from jstep.checkpoint.format import manifest as _manifest
from jstep.checkpoint.format.manifest import CheckpointError, Manifest
from jstep.checkpoint.store import object_names as names
from jstep.checkpoint.store import packs, unpack
from jstep.checkpoint.store.object_names import Checkpoints
from jstep.checkpoint.store.protocol import CorruptedError
from jstep.stores import Directory

HURRIED = 5.0
"""Seconds for optional requests."""


class ObjectReader:
    """The read-only half of a `Store` below a URL."""

    checks_what_it_reads = True

    def __init__(self, url: str) -> None:
        self.directory = url
        self._objects = Directory(url)
        self._keys: list[str] | None = None
        """The list of a save in progress, while it decides which checkpoints to keep."""
        self._hurried = False

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

    def broken(self, prefix: str, above: int) -> list[str]:
        """See `Store.broken`."""
        return []

    def manifest(self, path: str) -> Manifest:
        """See `Store.manifest`."""
        return self._manifest(path)[0]

    def _manifest(self, path: str) -> tuple[Manifest, bytes]:
        url = f"{path}/{_manifest.NAME}"
        found = self._objects.read(f"{self._name(path)}/{_manifest.NAME}")
        if found.data is None:
            raise FileNotFoundError(f"{url}: there is no such object; the checkpoint was deleted")
        try:
            manifest = _manifest.decode(found.data)
            if not names.is_attempt(manifest.data):
                raise CheckpointError("it was written for a local directory; download the whole checkpoint to read it")
        except CheckpointError as error:
            raise CheckpointError(f"{url}: {error}") from None
        return manifest, found.stamp

    def find_corruption(self, path: str, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> list[str]:
        """See `Store.find_corruption`. Reads every byte."""
        try:
            blocks = self._blocks(path, manifest)
            mine = set(sorted({block.pack for block in blocks})[share[0] :: share[1]])
            blocks = [block for block in blocks if block.pack in mine]
            dtypes = {block.dtype: jax.numpy.dtype(block.dtype) for block in blocks}
            folder = f"{self._name(path)}/{manifest.data}"
            unpack.read(
                self._objects, folder, blocks, lambda block, body: packs.decoded(block, body, dtypes[block.dtype])
            )
        except CorruptedError as error:
            return error.problems
        except (TypeError, ValueError) as error:
            return [f"{path}: {error}"]
        return []

    def restore(self, path: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Store.restore`. Each process reads the blocks that it needs and verifies their checksums."""
        if not shardings:
            return {}
        folder = f"{self._name(path)}/{manifest.data}"
        try:
            return unpack.arrays(self._objects, folder, manifest, self._blocks(path, manifest), shardings)
        except CorruptedError:
            with contextlib.suppress(CheckpointError, OSError):
                if self.manifest(path).data != manifest.data:
                    raise CheckpointError(f"{path} was replaced while it was read; restore it again") from None
            raise

    def _blocks(self, path: str, manifest: Manifest) -> list[packs.Stored]:
        """Return all blocks of a checkpoint, from the indexes that its processes wrote."""
        parts = {key: record for key, record in manifest.files.items() if key.split("/")[-1].startswith("part.")}
        reading = [(key, parts[key], self._objects.start_read(f"{self._name(path)}/{key}")) for key in parts]
        blocks: list[packs.Stored] = []
        problems = []
        for _, record, pending in reading:
            data = self._objects.read_result(pending).data
            if data is None:
                problems.append(f"{pending.url}: missing")
            elif record.get("crc32") != [f"{zlib.crc32(data):08x}"]:
                problems.append(f"{pending.url}: its checksum differs")
            else:
                try:
                    found = packs.read_index(data)[1]
                    if any(f"{manifest.data}/{block.pack}" not in manifest.files for block in found):
                        raise ValueError("it names an object that is not in the manifest")
                    blocks += found
                except ValueError as error:
                    problems.append(f"{pending.url}: {error}")
        if problems:
            raise CorruptedError(problems)
        return blocks
