"""Reading of checkpoints below a URL: listing, manifests and arrays."""

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jstep.checkpoint.format import manifest as _manifest
from jstep.checkpoint.format.manifest import CheckpointError, Manifest
from jstep.checkpoint.store import copied, packed
from jstep.checkpoint.store import object_names as names
from jstep.checkpoint.store.object_names import Checkpoints
from jstep.checkpoint.store.protocol import CorruptedError
from jstep.stores import Directory

HURRIED = 5.0
"""Seconds for optional requests."""


class ObjectReader:
    """The read-only half of a `Store` below a URL."""

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
            if manifest.is_packed and not names.is_attempt(manifest.data):
                raise CheckpointError(f"its data is in {manifest.data!r:.50}, where jstep never puts it")
        except CheckpointError as error:
            raise type(error)(f"{url}: {error}") from None
        return manifest, found.stamp

    def find_corruption(self, path: str, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> list[str]:
        """See `Store.find_corruption`. Reads every byte."""
        above = f"{self._name(path)}/"
        if manifest.is_packed:
            return packed.find_corruption(self._objects, above, manifest, share)
        return copied.find_corruption(self._objects, above, manifest, share)

    def restore(self, path: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """See `Store.restore`. Each process reads the blocks that it needs and verifies their checksums."""
        if not shardings:
            return {}
        above = f"{self._name(path)}/"
        if not manifest.is_packed:
            return copied.read(self._objects, above, manifest, shardings)
        try:
            return packed.read(self._objects, above, manifest, shardings)
        except CorruptedError:
            with contextlib.suppress(CheckpointError, OSError):
                if self.manifest(path).data != manifest.data:
                    raise CheckpointError(f"{path} was replaced while it was read; restore it again") from None
            raise
