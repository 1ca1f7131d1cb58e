"""The manifest of a checkpoint: what it holds, in words, and checksums of every file beside it.

Orbax checks nothing: a flipped byte in its files restores silently. The manifest covers every byte: that of
each file by the file's checksums, its own by the one in its last line. Checksums are of files and not of
arrays, so that a process which wrote only its shards can compute its part, and a process on another mesh,
or with other shards, can verify them.
"""

import concurrent.futures
import dataclasses
import importlib.metadata
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

NAME = "manifest.json"
FORMAT = 1
BLOCK = 64 * 2**20  # one checksum for so many bytes: large files are read by several threads
_PIECE = 2**20  # what fits a core's cache
_PART = "checksums.process_"
_SEAL = ',\n "crc32": "'


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or what is on disk is not what was written."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a saved state.

    Attributes:
        path: As everywhere in jstep, such as `params/dense/kernel`.
        keys: The keys the path is made of; they may hold slashes themselves.
        shape: Of the leaf.
        dtype: Of the leaf, such as `bfloat16` or `key<fry>`.
        nbytes: Its size in memory.
        array: The name of the array that orbax stores; None where the leaf has no elements and nothing is stored.
        stored_as: The dtype on disk, where the storage format does not know the leaf's.
        key_impl: The generator of a PRNG key, whose raw data is what is stored.
    """

    path: str
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    array: str | None
    stored_as: str | None = None
    key_impl: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A short dict: what follows from the path is left out."""
        out: dict[str, Any] = {"path": self.path, "shape": list(self.shape), "dtype": self.dtype, "bytes": self.nbytes}
        if list(self.keys) != self.path.split("/"):
            out["keys"] = list(self.keys)
        if self.array != self.path:
            out["array"] = self.array
        out |= {name: getattr(self, name) for name in ("stored_as", "key_impl") if getattr(self, name) is not None}
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Leaf":
        """The leaf that `to_json` wrote."""
        path = data["path"]
        return cls(
            path,
            tuple(data.get("keys", path.split("/"))),
            tuple(data["shape"]),
            data["dtype"],
            data["bytes"],
            data.get("array", path),
            data.get("stored_as"),
            data.get("key_impl"),
        )


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: The global step of the state.
        saved_at: When it was saved, in seconds since 1970.
        leaves: Of the state, in its order.
        extra: The user's values.
        retention: What `_retention` remembers.
        files: Path below the checkpoint → its size and the CRC-32 of each `BLOCK` of it.
        jstep: The version that wrote it.
    """

    step: int
    saved_at: float
    leaves: tuple[Leaf, ...]
    extra: Any = None
    retention: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    jstep: str = dataclasses.field(default_factory=lambda: importlib.metadata.version("jstep"))


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON, a line for each leaf and file, sealed with a checksum of all before it."""
    head = {
        "format": FORMAT,
        "jstep": manifest.jstep,
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "bytes": sum(leaf.nbytes for leaf in manifest.leaves),
        "extra": manifest.extra,
        "retention": dict(manifest.retention),
    }
    lines = [f' "{name}": {json.dumps(value)}' for name, value in head.items()]
    leaves = ",\n".join(f"  {json.dumps(leaf.to_json())}" for leaf in manifest.leaves)
    files = ",\n".join(f"  {json.dumps(path)}: {json.dumps(record)}" for path, record in manifest.files.items())
    lines += [f' "leaves": [\n{leaves}\n ]', f' "files": {{\n{files}\n }}']
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + f'{_SEAL}{zlib.crc32(body):08x}"\n}}\n'.encode()


def decode(data: bytes) -> Manifest:
    """The manifest that `encode` wrote.

    Raises:
        CheckpointError: It is damaged, or of a format this version does not know.
    """
    body, seal, tail = data.rpartition(_SEAL.encode())
    if not seal or tail != f'{zlib.crc32(body):08x}"\n}}\n'.encode():
        raise CheckpointError("its checksum differs: the file was cut short or changed")
    loaded = json.loads(body + b"\n}")
    if loaded["format"] != FORMAT:
        raise CheckpointError(
            f"format {loaded['format']}, written by jstep {loaded['jstep']}, and this version reads format {FORMAT}: "
            "read it with that version of jstep"
        )
    return Manifest(
        loaded["step"],
        loaded["saved_at"],
        tuple(Leaf.from_json(leaf) for leaf in loaded["leaves"]),
        loaded["extra"],
        loaded["retention"],
        loaded["files"],
        loaded["jstep"],
    )


def read(checkpoint: str) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: It is damaged (names its path).
        FileNotFoundError: There is none.
    """
    path = os.path.join(checkpoint, NAME)
    with open(path, "rb") as file:
        data = file.read()
    try:
        return decode(data)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def write(checkpoint: str, manifest: Manifest) -> None:
    """Puts the manifest into a checkpoint, and both onto the disk."""
    with open(os.path.join(checkpoint, NAME), "wb") as file:
        file.write(encode(manifest))
        file.flush()
        os.fsync(file.fileno())


def files_below(checkpoint: str) -> list[str]:
    """The paths of all files of a checkpoint below it, the manifest left out, sorted."""
    found = [
        os.path.relpath(os.path.join(folder, name), checkpoint).replace(os.sep, "/")
        for folder, _, names in os.walk(checkpoint)
        for name in names
    ]
    return sorted(path for path in found if path != NAME)


def records(checkpoint: str, paths: Iterable[str], threads: int = 2) -> dict[str, dict[str, Any]]:
    """The size and checksums of some files of a checkpoint, for `Manifest.files`."""
    sizes = {path: os.path.getsize(os.path.join(checkpoint, path)) for path in paths}
    blocks = [(path, at) for path, size in sizes.items() for at in range(0, size, BLOCK)]
    with concurrent.futures.ThreadPoolExecutor(threads, "jstep-checksum") as pool:
        sums = pool.map(lambda block: _checksum(os.path.join(checkpoint, block[0]), block[1]), blocks)
        found: dict[str, dict[str, Any]] = {path: {"bytes": size, "crc32": []} for path, size in sizes.items()}
        for (path, _), value in zip(blocks, sums, strict=True):
            found[path]["crc32"].append(value)
    return found


def _checksum(path: str, at: int) -> str:
    value, left = 0, BLOCK
    buffer = memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        file.seek(at)
        while left and (count := file.readinto(buffer[: min(left, _PIECE)])):
            value, left = zlib.crc32(buffer[:count], value), left - count
    return f"{value:08x}"


def damage(checkpoint: str, manifest: Manifest, share: tuple[int, int] = (0, 1), threads: int = 8) -> list[str]:
    """What is wrong with the files of a checkpoint, in words; nothing where all is well.

    Args:
        checkpoint: Its path.
        manifest: Its manifest.
        share: (i, n) to look at every n-th of the large files only, from the i-th on.
        threads: How many read at once.
    """
    large = [path for path in sorted(manifest.files) if manifest.files[path]["bytes"] > _PIECE]
    others = set(large) - set(large[share[0] :: share[1]])
    expected = {path: record for path, record in manifest.files.items() if path not in others}
    there = [path for path in expected if os.path.isfile(os.path.join(checkpoint, path))]
    actual = records(checkpoint, there, threads)
    return [
        f"{os.path.join(checkpoint, path)}: {problem}"
        for path, record in expected.items()
        if (problem := _difference(record, actual.get(path)))
    ]


def _difference(expected: Mapping[str, Any], actual: Mapping[str, Any] | None) -> str:
    if actual is None:
        return "missing"
    if actual["bytes"] != expected["bytes"]:
        return f"{actual['bytes']} bytes instead of {expected['bytes']}"
    bad = [i for i, pair in enumerate(zip(actual["crc32"], expected["crc32"], strict=True)) if pair[0] != pair[1]]
    ranges = ", ".join(f"[{i * BLOCK}, {min((i + 1) * BLOCK, expected['bytes'])})" for i in bad)
    return f"the checksum of bytes {ranges} differs" if bad else ""


def is_intact(checkpoint: str) -> bool:
    """Whether every byte of a checkpoint is as it was written."""
    try:
        return not damage(checkpoint, read(checkpoint))
    except (CheckpointError, OSError):
        return False


def write_part(checkpoint: str, process: int) -> None:
    """Computes the checksums of what one process wrote, and leaves them for `collect`."""
    part = records(checkpoint, [path for path in files_below(checkpoint) if _is_of(path, process)])
    with open(os.path.join(checkpoint, f"{_PART}{process}"), "w") as file:
        json.dump(part, file)


def _is_of(path: str, process: int) -> bool:
    # Orbax's folders: ocdbt.process_3, and with a suffix for replicas.
    name = path.split("/")[0].removeprefix("ocdbt.process_")
    return name != path.split("/")[0] and re.match(r"[0-9]*", name)[0] == str(process)  # type: ignore[index]


def collect(checkpoint: str) -> dict[str, dict[str, Any]]:
    """The records of all files of a checkpoint: those that processes left, and the rest computed here."""
    found: dict[str, dict[str, Any]] = {}
    paths = files_below(checkpoint)
    for path in [path for path in paths if path.startswith(_PART)]:
        with open(os.path.join(checkpoint, path)) as file:
            found |= json.load(file)
        os.remove(os.path.join(checkpoint, path))
    rest = [path for path in paths if path not in found and not path.startswith(_PART)]
    found |= records(checkpoint, rest)
    return dict(sorted(found.items()))
