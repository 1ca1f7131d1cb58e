"""Atomic writing of safetensors files: to temporary names first, then all renamed together."""

import contextlib
import json
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jstep.checkpoint.directory import is_alive, this_process
from jstep.stores.files import make_folders, new_file, sync_folder
from jstep.weights.find import INDEX
from jstep.weights.header import LARGEST, METADATA, confirm

_AT_ONCE = 2**26
_ABANDONED = 86400.0
"""Seconds after which a temporary file of a process that cannot be looked up counts as left behind."""
_TEMPORARY = re.compile(
    r"\.(?P<name>.+)\.(?P<place>[0-9a-f]{8})-(?P<pid>[0-9]{1,9})(?:-(?P<started>[0-9a-z]+))?-[0-9a-f]{8}\.tmp",
    re.DOTALL,
)
"""Names of temporary files; those of older versions lack the time at which their process started."""


class Entry(NamedTuple):
    """A tensor to write.

    Attributes:
        name: Its name.
        code: The safetensors code of its dtype.
        shape: Its shape.
        nbytes: Its size.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    nbytes: int


def header_of(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file, with the entries in order.

    Raises:
        ValueError: The header is larger than readers allow.
    """
    found: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for entry in entries:
        found[entry.name] = {"dtype": entry.code, "shape": entry.shape, "data_offsets": [at, at + entry.nbytes]}
        at += entry.nbytes
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # align the tensors
    if len(text) > LARGEST:
        raise ValueError(f"the header would have {len(text)} bytes, and {LARGEST} are allowed; shorten the metadata")
    return len(text).to_bytes(8, "little") + text


def write_tensor(file: Any, array: np.ndarray[Any, Any]) -> None:
    """Append the bytes of an array, in C order and little-endian."""
    array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
    view = array.reshape(-1).view(np.uint8).data
    for at in range(0, view.nbytes, _AT_ONCE):
        file.write(view[at : at + _AT_ONCE])


class Files:
    """The files of one save, which are written under temporary names and then published.

    Args:
        path: The user's path: the file, or the name from which those of shards and index are derived.
        shards: The number of shards.

    Attributes:
        names: The names of the files, in order.
        path: The path of the file, or of the index.
    """

    def __init__(self, path: str, shards: int) -> None:
        self._folder, self._base = os.path.split(path)
        self._stem, self._suffix = os.path.splitext(self._base)
        mine = this_process()
        self._token = f"{_place(mine)}-{mine['pid']}-{mine['started']}-{secrets.token_hex(4)}"
        self.names = [self._base]
        if shards > 1:
            self.names = [f"{self._stem}-{i + 1:05d}-of-{shards:05d}{self._suffix}" for i in range(shards)]
        self.path = path + INDEX if shards > 1 else path

    def begin(self) -> None:
        """Create the folder if necessary."""
        make_folders(self._folder)

    def writing(self, number: int) -> contextlib.AbstractContextManager[BinaryIO]:
        """A context that opens a file under its temporary name for writing."""
        return new_file(self._temporary(self.names[number]))

    def publish(self, shard_of: Mapping[str, int], total_size: int) -> None:
        """Rename the files to their final names, and remove those of an older save.

        Readers that follow the index, meanwhile or after a crash, find all of the older save or all of this one: each
        change that a later one relies on is flushed to disk before that.

        Args:
            shard_of: The number of the file of each tensor.
            total_size: The bytes of all tensors.
        """
        confirm(self._temporary(name) for name in self.names)
        older, index = self._older(), self._base + INDEX
        sharded = len(self.names) > 1
        # If the older index refers to shards of the same names, the new ones get interim names first.
        clash = sharded and not set(older).isdisjoint(self.names)
        entry = index if sharded else self._base
        is_new, is_switched = entry not in older, False
        first = [self._interim(name) for name in self.names] if clash else self.names
        moved: list[tuple[str, str]] = []
        try:
            for name, under in zip(self.names, first, strict=True):
                moved.append((self._temporary(name), self._at(under)))
                os.replace(*moved[-1])
            if sharded:
                self._switch_index(first, shard_of, total_size)
            is_switched = True
            sync_folder(self._folder)
        except BaseException:
            # A file or an index that replaced an older one stays, complete. Otherwise the older weights stay alone.
            if is_new:
                self._remove(entry)
            for temporary, final in moved if sharded and (is_new or not is_switched) else ():
                with contextlib.suppress(OSError):
                    os.replace(final, temporary)
            raise
        if clash:
            for name, under in zip(self.names, first, strict=True):
                _link(self._at(under), self._temporary(name))
                os.replace(self._temporary(name), self._at(name))
            self._switch_index(self.names, shard_of, total_size)
            sync_folder(self._folder)
        finals = [*self.names, index] if sharded else self.names
        stale = {*older, *first} - set(finals)
        if index in stale:
            self._remove(index)
            sync_folder(self._folder)
        for name in [*sorted(stale - {index}), *self._orphans()]:
            self._remove(name)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._at(name))

    def _switch_index(self, names: Sequence[str], shard_of: Mapping[str, int], total_size: int) -> None:
        """Replace the index with one that refers to files of these names, which are on the disk before it is."""
        weight_map = {name: names[number] for name, number in sorted(shard_of.items())}
        found = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        with new_file(self._temporary(self._base + INDEX)) as file:
            file.write(json.dumps(found, indent=2, ensure_ascii=False).encode() + b"\n")
        sync_folder(self._folder)
        os.replace(self._temporary(self._base + INDEX), self._at(self._base + INDEX))

    def discard(self) -> None:
        """Remove the temporary files that were not published."""
        for name in [*self.names, self._base + INDEX]:
            with contextlib.suppress(OSError):
                os.remove(self._temporary(name))

    def _older(self) -> list[str]:
        """Return the existing files of an older save: the file, the index and all shards."""
        return [name for name in os.listdir(self._folder or ".") if self._is_own(name)]

    def _is_own(self, name: str) -> bool:
        """Return whether a file may come from a save under this path."""
        shard = rf"{re.escape(self._stem)}-\d{{5}}-of-\d{{5}}(\.[0-9a-f]{{8}})?{re.escape(self._suffix)}"
        return name in (self._base, self._base + INDEX) or re.fullmatch(shard, name) is not None

    def _orphans(self) -> list[str]:
        """Return the temporary files of processes that ended without removing them."""
        found = [(name, _TEMPORARY.fullmatch(name)) for name in os.listdir(self._folder or ".")]
        return [name for name, match in found if match and self._is_own(match["name"]) and self._is_orphan(match)]

    def _is_orphan(self, match: re.Match[str]) -> bool:
        mine = this_process()
        alive = None  # on another host, in another container, or before this host was started again
        if match["place"] == _place(mine) and match["started"] is not None:
            alive = is_alive({**mine, "pid": int(match["pid"]), "started": match["started"]})
        if alive is not None:
            return not alive
        try:
            return time.time() - os.stat(self._at(match[0])).st_mtime > _ABANDONED
        except OSError:  # it was removed meanwhile
            return False

    def _at(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _interim(self, name: str) -> str:
        return f"{name.removesuffix(self._suffix)}.{self._token[-8:]}{self._suffix}"

    def _temporary(self, name: str) -> str:
        # Readers that take all *.safetensors of a folder must not find it.
        return os.path.join(self._folder, f".{name}.{self._token}.tmp")


def _place(process: Mapping[str, Any]) -> str:
    """Return where a process runs: its host since that was started, and its container."""
    text = f"{process['host']} {process['space']}"
    return f"{zlib.crc32(text.encode()):08x}"


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)
