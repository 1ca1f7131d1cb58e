"""Reading of a checkpoint that was written to a disk and copied below a URL."""

import zlib
from collections.abc import Mapping
from typing import Any

from jstep.checkpoint.format.manifest import Manifest
from jstep.checkpoint.store.checksums import BLOCK, difference
from jstep.stores import Objects, Pending, TruncatedError
from jstep.stores.objects import spec

_AT_ONCE = 4
"""Concurrent reads: 256 MB at most."""


def read(objects: Objects, above: str, manifest: Manifest, shardings: Mapping[str, Any]) -> dict[str, Any]:
    """Read arrays by name, unverified; see `Store.restore`.

    Args:
        objects: The objects.
        above: What the keys of the checkpoint begin with: its name and a slash.
        manifest: The manifest of the checkpoint.
        shardings: Name → sharding of the array; None for a NumPy array.
    """
    from jstep.checkpoint.store import tensors  # not at the top: importing tensorstore is slow

    def wait(future: Any, nbytes: int) -> Any:
        return Pending(objects, future, "read", above, nbytes).result()

    return tensors.read(spec(objects.at(above.rstrip("/"))), manifest, shardings, wait)


def find_corruption(objects: Objects, above: str, manifest: Manifest, share: tuple[int, int]) -> list[str]:
    """Return descriptions of what is wrong with the objects of a checkpoint; see `Store.find_corruption`."""
    paths = sorted(manifest.files)[share[0] :: share[1]]
    actual = _records(objects, above, {path: manifest.files[path]["bytes"] for path in paths})
    return [
        f"{objects.at(above + path)}: {problem}"
        for path in paths
        if (problem := difference(manifest.files[path], actual.get(path)))
    ]


def _records(objects: Objects, above: str, sizes: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return the sizes and checksums of objects, as `checksums.records` does for files; missing ones are left out."""
    found: dict[str, dict[str, Any]] = {path: {"bytes": 0, "crc32": []} for path in sizes}
    missing = set()
    reading: list[tuple[str, Pending]] = []

    def end_one() -> None:
        path, pending = reading.pop(0)
        try:
            data = objects.read_result(pending).data
        except TruncatedError:
            return  # the size that was read until here differs
        if data is None:
            missing.add(path)
        else:
            found[path]["bytes"] += len(data)
            found[path]["crc32"] += [f"{zlib.crc32(data):08x}"] if data else []

    try:
        for path, size in sizes.items():
            for at in range(0, max(size, 1), BLOCK):
                if len(reading) == _AT_ONCE:
                    end_one()
                stop = at + BLOCK if at + BLOCK < size else None  # the last read shows whether the object is longer
                reading.append((path, objects.start_read(above + path, at, stop)))
        while reading:
            end_one()
    finally:
        for _, pending in reading:
            pending.give_up()
    return {path: record for path, record in found.items() if path not in missing}
