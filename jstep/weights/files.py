"""Search for weights: a file, an index with its shards, a folder, or the arrays of an Orbax checkpoint in a folder."""

import json
import ntpath
import os
import re
from collections.abc import Sequence

from jstep.checkpoint.checksums import unreadable
from jstep.checkpoint.listing import LARGEST_MANIFEST, OF_ORBAX, TEMPORARY, has_data, list_names, missing
from jstep.checkpoint.manifest import MANIFEST_FILE
from jstep.core.checks import format_value
from jstep.stores.files import open_regular, read_small
from jstep.stores.urls import is_url, location
from jstep.weights.tensors import LARGEST, Tensor, Weights, parse_json, read_header

# The files with the weights: a file, a folder, or an index with its shards.

SUFFIX = ".safetensors"
INDEX = ".index.json"
_DEFAULTS = (f"model{SUFFIX}", f"model{SUFFIX}{INDEX}")
"""The names that `transformers` writes and searches for in a folder."""


def local_path(path: object) -> str:
    if path == "":
        raise ValueError("path='': must name a file or a folder")
    place = location(path, "path")
    if is_url(place):
        raise ValueError(f"path={place!r}: must be a local path; copy the files to this machine first")
    return place


FILES, OF_JSTEP, BY_ORBAX = "files", "of jstep", "by Orbax"
"""Kinds of weights: safetensors files, and checkpoints."""


def weights_kind(path: str) -> tuple[str, str]:
    """Return the kind of the weights at a path, and their place: a file, an index, or the folder with the arrays."""
    if not os.path.isdir(path):
        return FILES, _file_at(path)
    if names := _files_in(path):
        if len(names) > 1:
            raise _several(path, "the folder has several sets of weights", names)
        return FILES, os.path.join(path, names[0])
    if missing(path) != MANIFEST_FILE:  # a manifest of another program does not count
        return OF_JSTEP, path
    folder = arrays_folder(path)
    if folder is not None:
        return BY_ORBAX, folder
    if has_data(path):
        raise ValueError(
            f"path={path!r}: is a checkpoint of jstep without {MANIFEST_FILE}: its save to a bucket was interrupted, "
            "or its copy was; in the latter case, copy it again"
        )
    raise FileNotFoundError(
        f"path={path!r}: the folder has no weights (*{SUFFIX}, *{SUFFIX}{INDEX}), and is not a checkpoint of Orbax or "
        "jstep"
    )


def _file_at(path: str) -> str:
    if os.path.exists(path):
        return path
    if os.path.isfile(path + INDEX):
        return path + INDEX
    raise FileNotFoundError(
        f"path={path!r}: there is no such file or folder; huggingface_hub.snapshot_download downloads a repository of "
        "the Hub, and returns the path of its folder"
    )


def _files_in(folder: str) -> list[str]:
    """Return the loadable files and indexes in a folder: the names of `transformers`, or all."""
    # Hidden files are ignored, as by globs: macOS leaves "._model.safetensors" next to copied files.
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    if defaults := [name for name in names if name in _DEFAULTS]:
        return defaults
    indexes = [name for name in names if name.endswith(SUFFIX + INDEX)]
    shards = {shard for name in indexes for shard in _files_of(os.path.join(folder, name)).values()}
    return indexes + [name for name in names if name.endswith(SUFFIX) and name not in shards]


def read_headers(path: str) -> Weights:
    return _sharded(path) if _is_index(path) else read_header(path)


def _is_index(path: str) -> bool:
    """Return whether a file is JSON: as the size of a safetensors header, its first bytes would be far too large."""
    with open_regular(path) as file:
        first = file.read(8)
    if int.from_bytes(first, "little") <= LARGEST and len(first) == 8:
        return False
    return first.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") or path.endswith(INDEX)


def _sharded(path: str) -> Weights:
    weight_map = _files_of(path)
    if not weight_map:
        raise ValueError(f"{path}: the index lists no tensor")
    headers = {}
    for name in sorted(set(weight_map.values())):
        file = os.path.join(os.path.dirname(path), name)
        if not os.path.isfile(file):
            raise FileNotFoundError(f"{path}: the index names {name!r}, but there is no such file")
        headers[name] = read_header(file)
    tensors: dict[str, Tensor] = {}
    for header in headers.values():
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ValueError(f"{path}: the tensor {name!r} is in two files, {tensors[name].file} and {tensor.file}")
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in headers[file].tensors:
            raise ValueError(f"{path}: the tensor {name!r} should be in {file!r}, which does not have it")
    metadata = {key: text for header in headers.values() for key, text in header.metadata.items()}
    return Weights(path, tuple(header.path for header in headers.values()), tensors, metadata)


def _files_of(path: str) -> dict[str, str]:
    with open_regular(path) as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"{path}: the index is too large: {LARGEST} bytes are allowed")
    weight_map = parse_json(text, path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(
            f"{path}: not an index: must have a weight_map from tensors to files, got {format_value(weight_map)}"
        )
    for file in set(weight_map.values()):
        # Check the name, not the link target: snapshots of the Hub are links to files elsewhere.
        parts = file.replace("\\", "/").split("/")
        if "" in parts or ".." in parts or "\0" in file or ntpath.splitdrive(file)[0]:
            raise ValueError(
                f"{path}: the index names the file {format_value(file)}: must be a name inside the index's folder"
            )
    return weight_map


# The arrays of an Orbax checkpoint among its files, without importing Orbax.

_METADATA = "_METADATA"
_ARRAYS = "manifest.ocdbt"
_DEFAULT = "default"  # the name of the only item of a CheckpointManager
_STEP = re.compile(r"(?:.*[_-])?[0-9]+")
_SHOWN = 10  # folders listed in a message


def arrays_folder(path: str) -> str | None:
    """Return the folder with the arrays of a checkpoint; None if Orbax wrote no arrays there.

    It is the folder itself, or an item of a step of a CheckpointManager.
    """
    if TEMPORARY in os.path.basename(os.path.abspath(path)):
        raise ValueError(
            f"path={path!r}: this checkpoint of Orbax is incomplete: its save was interrupted, or still runs"
        )
    entries = set(list_names(path))
    if _METADATA in entries:
        return _with_arrays(path)
    folders = sorted(name for name in entries if os.path.isdir(os.path.join(path, name)))
    if _ARRAYS in entries:
        raise _without_metadata(path)
    checkpoints = sorted(
        (name for name in folders if _STEP.fullmatch(name) and _is_checkpoint(os.path.join(path, name))),
        key=lambda name: int(re.split("[_-]", name)[-1]),
    )
    if checkpoints:
        raise _several(path, "is a directory of checkpoints", checkpoints[::-1])
    items = [name for name in folders if _METADATA in list_names(os.path.join(path, name)) and TEMPORARY not in name]
    if _DEFAULT in items or len(items) == 1:
        return _with_arrays(os.path.join(path, _DEFAULT if _DEFAULT in items else items[0]))
    if items:
        raise _several(path, "has several items or checkpoints", items)
    unfinished = [name for name in folders if TEMPORARY in name]
    if unfinished:
        raise ValueError(
            f"path={path!r}: has only {unfinished[0]}, an incomplete checkpoint of Orbax: its save was interrupted, or "
            "still runs"
        )
    if entries & OF_ORBAX:
        raise _without_metadata(path)
    return None


def _several(folder: str, what: str, names: Sequence[str]) -> ValueError:
    first, such_as = ", ".join(names[:_SHOWN]), os.path.join(folder, names[0])
    return ValueError(f"path={folder!r}: {what} ({first}); pass the path of one, such as {such_as!r}")


def _with_arrays(folder: str) -> str:
    """Return the folder if the file that lists its arrays exists: without it, Orbax prints errors of its threads."""
    if problems := unreadable(folder, linked=True):
        raise ValueError(f"path={folder!r}: {problems[0]}")
    data = read_small(os.path.join(folder, _METADATA), LARGEST_MANIFEST)
    try:
        metadata = json.loads(data)
    except (ValueError, RecursionError):
        return folder  # for Orbax to describe
    if isinstance(metadata, dict) and metadata.get("use_ocdbt") and _ARRAYS not in list_names(folder):
        raise ValueError(f"{folder}: a checkpoint of Orbax without {_ARRAYS}: its copy is incomplete; copy it again")
    return folder


def _without_metadata(path: str) -> ValueError:
    return ValueError(
        f"path={path!r}: a checkpoint of Orbax without {_METADATA}: its copy is incomplete, or an old version wrote "
        "it; in the latter case, restore it with Orbax and save it again with ocp.StandardCheckpointer"
    )


def _is_checkpoint(path: str) -> bool:
    entries = set(list_names(path))
    return bool(entries & {MANIFEST_FILE, *OF_ORBAX}) or any(
        _METADATA in list_names(os.path.join(path, name)) for name in entries
    )
