"""Finding of the files that hold the weights: a file, a folder, or an index with its shards."""

import ntpath
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from jstep.core.checks import shown
from jstep.stores.objects import is_url, location
from jstep.weights.header import LARGEST, Header, Tensor, parsed, read_header

SUFFIX = ".safetensors"
INDEX = ".index.json"
_DEFAULTS = (f"model{SUFFIX}", f"model{SUFFIX}{INDEX}")
"""The names that `transformers` writes, and looks for in a folder."""


class Weights(NamedTuple):
    """The combined content of all headers.

    Attributes:
        path: The file, or the index.
        files: The headers of all files.
        tensors: All tensors, by name.
        metadata: The metadata strings of all files.
    """

    path: str
    files: tuple[Header, ...]
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def local(path: Any, name: str = "path") -> str:
    """Return a local path.

    Raises:
        TypeError: It is not a path.
        ValueError: It is empty, or a URL.
    """
    if path == "":
        raise ValueError(f"{name}='': must name a file or a folder")
    found = location(path, name)
    if is_url(found):
        raise ValueError(f"{name}={found!r}: must be a local path; copy the files to this machine first")
    return found


def find_weights(path: Any) -> Weights:
    """Find the files, and read and check all headers; no tensor is read.

    Args:
        path: A safetensors file, an index, or a folder.

    Raises:
        FileNotFoundError: The path does not exist, the folder has no weights, or an index names a missing file.
        ValueError: A file is corrupted, the index contradicts the files, or a folder has several sets of weights.
    """
    path = local(path)
    if os.path.isdir(path):
        path = os.path.join(path, _chosen(path))
    elif os.path.isfile(path + INDEX) and not os.path.exists(path):
        path += INDEX
    elif not os.path.exists(path):
        raise FileNotFoundError(
            f"path={path!r}: there is no such file or folder; huggingface_hub.snapshot_download downloads a "
            "repository of the Hub, and returns the path of its folder"
        )
    return _sharded(path) if _is_index(path) else _single(path)


def _chosen(folder: str) -> str:
    """Return the name of the file or index in a folder."""
    # Hidden files are ignored, as by globs: macOS leaves "._model.safetensors" next to copied files.
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    found = [name for name in names if name in _DEFAULTS]
    if not found:
        indexes = [name for name in names if name.endswith(SUFFIX + INDEX)]
        shards = {shard for name in indexes for shard in _files_of(os.path.join(folder, name)).values()}
        found = indexes + [name for name in names if name.endswith(SUFFIX) and name not in shards]
    if not found:
        raise FileNotFoundError(
            f"path={folder!r}: the folder has no weights (*{SUFFIX}, *{SUFFIX}{INDEX}), and is not a "
            "checkpoint of Orbax or jstep"
        )
    if len(found) > 1:
        listed = ", ".join(map(repr, found[:10]))
        raise ValueError(f"path={folder!r}: the folder has several sets of weights ({listed}); pass the path of one")
    return found[0]


def _is_index(path: str) -> bool:
    """Return whether a file is JSON: as the size of a safetensors header, its first bytes would be far too large."""
    with open(path, "rb") as file:
        first = file.read(8)
    if int.from_bytes(first, "little") <= LARGEST and len(first) == 8:
        return False
    return first.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") or path.endswith(INDEX)


def _single(path: str) -> Weights:
    header = read_header(path)
    return Weights(path, (header,), header.tensors, header.metadata)


def _sharded(path: str) -> Weights:
    weight_map = _files_of(path)
    if not weight_map:
        raise ValueError(f"{path}: the index lists no tensor")
    headers = {name: _shard(path, name) for name in sorted(set(weight_map.values()))}
    tensors: dict[str, Tensor] = {}
    for header in headers.values():
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ValueError(f"{path}: the tensor {name!r} is in two files, {tensors[name].file} and {tensor.file}")
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in headers[file].tensors:
            raise ValueError(f"{path}: the tensor {name!r} should be in {file!r}, which does not have it")
    metadata: dict[str, str] = {}
    for header in headers.values():
        metadata |= header.metadata
    return Weights(path, tuple(headers.values()), tensors, metadata)


def _files_of(path: str) -> dict[str, str]:
    """Return the file names in an index, by tensor."""
    with open(path, "rb") as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"{path}: the index is too large: {LARGEST} bytes are allowed")
    weight_map = parsed(text, path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{path}: not an index: must have a weight_map from tensors to files, got {shown(weight_map)}")
    for file in set(weight_map.values()):
        _check_inside(file, path)
    return weight_map


def _check_inside(file: str, path: str) -> None:
    # Check the name, not the link target: snapshots of the Hub are links to files elsewhere.
    parts = file.replace("\\", "/").split("/")
    if "" in parts or ".." in parts or "\0" in file or ntpath.splitdrive(file)[0]:
        raise ValueError(f"{path}: the index names the file {shown(file)}: must be a name inside the index's folder")


def _shard(index: str, name: str) -> Header:
    path = os.path.join(os.path.dirname(index), name)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{index}: the index names {name!r}, but there is no such file")
    return read_header(path)
