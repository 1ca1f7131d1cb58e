"""`inspect` of safetensors files and of Orbax checkpoints, without reading any tensor."""

import argparse
import math
import os
from typing import Any

from jstep.checkpoint.manifest import NAME as MANIFEST
from jstep.checkpoint.manifest import CheckpointError
from jstep.cli.checkpoints import at, below
from jstep.cli.command import OK, as_json, cell, printable, table
from jstep.core.checks import size
from jstep.stores.objects import is_url
from jstep.weights.files import INDEX, SUFFIX, Weights, find_weights, folder_of, name_of


def are_at(path: str) -> bool:
    """Return whether a path has weights: a file, or a folder with weights that is not and has no checkpoints."""
    if is_url(path) or not os.path.isdir(path):
        return not is_url(path) and (os.path.isfile(path) or os.path.isfile(path + INDEX))
    if not any(name.endswith((SUFFIX, SUFFIX + INDEX)) for name in os.listdir(path)):
        return False
    try:
        return at(path) is None and not below(path)[0]
    except CheckpointError:
        return True  # a folder such as gpt-2, whose name looks like that of a checkpoint


def show(path: str, arguments: argparse.Namespace) -> int:
    """Print the tensors of a file, or of an index and its shards.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is corrupted.
    """
    if arguments.verify:
        raise ValueError("--verify: safetensors files have no checksums; leave it out, and headers are checked anyway")
    weights = find_weights(path)
    about: dict[str, Any] = {
        "path": weights.path,
        "format": "safetensors",
        "bytes": sum(tensor.nbytes for tensor in weights.tensors.values()),
        "parameters": sum(math.prod(tensor.shape) for tensor in weights.tensors.values()),
        "metadata": dict(weights.metadata),
        "files": [{"path": one.file, "tensors": len(one.tensors)} for one in weights.files],
    }
    several = len(weights.files) > 1
    where = f"in {len(weights.files)} file{'s' * several}"
    _print(about, _rows(weights), where, ["dtype", "stored_as", "shape", "bytes"] + ["file"] * several, arguments)
    return OK


def orbax_folder(path: str) -> str | None:
    """Return the folder with the arrays of the Orbax checkpoint at a path; None if Orbax did not write any.

    Raises:
        ValueError: The checkpoint is incomplete, or the path has several checkpoints or items.
    """
    if is_url(path) or not os.path.isdir(path) or os.path.lexists(os.path.join(path, MANIFEST)):
        return None
    return folder_of(path)


def show_orbax(folder: str, arguments: argparse.Namespace) -> int:
    """Print the arrays of an Orbax checkpoint, from its metadata.

    Raises:
        ValueError: Orbax cannot read it, or jstep wrote it and its manifest is missing.
    """
    if arguments.verify:
        raise ValueError("--verify: Orbax checkpoints have no checksums; leave it out")
    from jstep.weights import orbax_checkpoint  # not at the top: importing Orbax is slow

    arrays = orbax_checkpoint.opened(folder).arrays.values()
    about: dict[str, Any] = {
        "path": folder,
        "format": "orbax",
        "bytes": sum(array.nbytes for array in arrays),
        "parameters": sum(math.prod(array.shape) for array in arrays),
        "metadata": {},
    }
    rows = [
        {"name": array.name, "dtype": array.code, "shape": list(array.shape), "bytes": array.nbytes}
        for array in sorted(arrays, key=lambda array: array.name)
    ]
    _print(about, rows, "in a checkpoint of Orbax", ["dtype", "shape", "bytes"], arguments)
    return OK


def _print(
    about: dict[str, Any], rows: list[dict[str, Any]], where: str, columns: list[str], arguments: argparse.Namespace
) -> None:
    if arguments.json:
        print(as_json({**about, "tensors": rows}))
        return
    print(printable(about["path"]))
    print(
        f"{len(rows)} tensor{'s' * (len(rows) != 1)}, {about['parameters']} parameters, {size(about['bytes'])}, {where}"
    )
    if about["metadata"]:
        print(f"metadata {printable(as_json(about['metadata']))}")
    print()
    heads = ["tensor", *(column.replace("_", " ") for column in columns)]
    table(heads, [[cell(row[column]) for column in ("name", *columns)] for row in rows], left=heads.index("bytes"))


def _rows(weights: Weights) -> list[dict[str, Any]]:
    return [
        {
            "name": tensor.name,
            "dtype": name_of(tensor.code) or tensor.code,
            "stored_as": tensor.code,
            "shape": list(tensor.shape),
            "bytes": tensor.nbytes,
            "file": os.path.relpath(tensor.file, os.path.dirname(weights.path) or "."),
        }
        for tensor in sorted(weights.tensors.values(), key=lambda tensor: tensor.name)
    ]
