"""Finding weights at a path: a file, an index with its shards, a directory, or a checkpoint."""

import json
import ntpath
import os
from collections.abc import Sequence

from jstep.array_store.listing import TEMPORARY, list_names
from jstep.array_store.manifest import MANIFEST_FILE
from jstep.core.checks import format_value
from jstep.core.tables import printable
from jstep.stores.files import read_small
from jstep.stores.urls import is_url, location
from jstep.weights.tensors import LARGEST, Tensor, read_header

SUFFIX = ".safetensors"
INDEX = ".index.json"
_DEFAULTS = (f"model{SUFFIX}", f"model{SUFFIX}{INDEX}")


def local_path(path: object) -> str:
    if path == "":
        raise ValueError("path='': must name a file or a directory")
    resolved = location(path, "path")
    if is_url(resolved):
        raise ValueError(
            f"path={resolved!r}: must be a local path; copy the files to this machine first"
        )
    return resolved


def weights_file(path: str) -> str | None:
    if os.path.isdir(path):
        names = _files_in(path)
        if len(names) > 1:
            raise _several(path, "the directory has several sets of weights", names)
        if not names:
            return None
        return os.path.join(path, names[0])
    if os.path.exists(path):
        return path
    if os.path.isfile(path + INDEX):
        return path + INDEX
    raise FileNotFoundError(
        f"path={path!r}: there is no such file or directory; huggingface_hub.snapshot_download "
        "downloads one"
    )


def _files_in(directory: str) -> list[str]:
    # Hidden files are ignored, as by globs: macOS leaves "._model.safetensors" next to copies.
    names = sorted(name for name in os.listdir(directory) if not name.startswith("."))
    defaults = [name for name in names if name in _DEFAULTS]
    if defaults:
        return defaults
    indexes = [name for name in names if name.endswith(SUFFIX + INDEX)]
    shards: set[str] = set()
    for name in indexes:
        shards.update(_files_of(os.path.join(directory, name)).values())
    return indexes + [name for name in names if name.endswith(SUFFIX) and name not in shards]


def _several(directory: str, what: str, names: Sequence[str]) -> ValueError:
    such_as = os.path.join(directory, names[0])
    shown = ", ".join(map(printable, names[:10]))
    return ValueError(
        f"path={directory!r}: {what} ({shown}); pass the path of one, such as {such_as!r}"
    )


def read_tensors(path: str) -> dict[str, Tensor]:
    if not path.endswith(".json"):
        return read_header(path)
    weight_map = _files_of(path)
    files = {}
    for name in sorted(set(weight_map.values())):
        file = os.path.join(os.path.dirname(path), name)
        if not os.path.isfile(file):
            raise FileNotFoundError(
                f"{printable(path)}: the index names {name!r}, but there is no such file"
            )
        files[name] = read_header(file)
    tensors: dict[str, Tensor] = {}
    for header in files.values():
        for name, tensor in header.items():
            if name in tensors:
                several = f"{printable(tensors[name].file)} and {printable(tensor.file)}"
                raise ValueError(
                    f"{printable(path)}: the tensor {name!r} is in two files, {several}"
                )
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in files[file]:
            raise ValueError(
                f"{printable(path)}: the tensor {name!r} should be in {file!r}, "
                "which does not have it"
            )
    return tensors


def _files_of(path: str) -> dict[str, str]:
    data = read_small(path, LARGEST)
    shown = printable(path)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shown}: corrupted: is not JSON ({error!s:.300})") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(x, str) for x in weight_map.values()):
        raise ValueError(
            f"{shown}: not an index: must have a weight_map from tensors to files, got "
            f"{format_value(content)}"
        )
    for file in set(weight_map.values()):
        # Check the name, not the link target: snapshots of the Hub are links to files elsewhere.
        parts = file.replace("\\", "/").split("/")
        if "" in parts or ".." in parts or "\0" in file or ntpath.splitdrive(file)[0]:
            raise ValueError(
                f"{shown}: the index names the file {format_value(file)}: must be a name inside "
                "the index's directory"
            )
    return weight_map


# The arrays of an Orbax checkpoint among its files, without importing Orbax.

_METADATA = "_METADATA"
_DEFAULT = "default"  # the name of the only item of a CheckpointManager


def arrays_directory(path: str) -> str:
    if TEMPORARY in os.path.basename(os.path.abspath(path)):
        raise ValueError(
            f"path={path!r}: this checkpoint is incomplete: its save was interrupted, or still runs"
        )
    entries = list_names(path)
    if _METADATA in entries:
        return path
    # The items of a CheckpointManager, or checkpoints, are directories in this one.
    names_below: dict[str, list[str]] = {}
    for name in sorted(entries):
        if TEMPORARY not in name:
            names_below[name] = list_names(os.path.join(path, name))
    items = [name for name, names in names_below.items() if _METADATA in names]
    if not items:
        raise FileNotFoundError(
            f"path={path!r}: the directory has no *{SUFFIX} and is not a complete checkpoint; "
            "pass the path of one"
        )
    if _DEFAULT in items:
        return os.path.join(path, _DEFAULT)
    if len(items) > 1 or any(MANIFEST_FILE in names_below[name] for name in items):
        raise _several(path, "has several items or checkpoints", items)
    return os.path.join(path, items[0])
