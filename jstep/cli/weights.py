"""`inspect` of safetensors files, from their headers, without reading any tensor."""

import argparse
import math
import os
from typing import Any

from jstep.checkpoint import CheckpointError
from jstep.cli.checkpoints import at, below
from jstep.cli.command import OK
from jstep.cli.output import as_json, cell, printable, table
from jstep.core.text import size
from jstep.stores import is_url
from jstep.weights.dtypes import name_of
from jstep.weights.find import INDEX, SUFFIX, Weights, find_weights


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
    rows = _rows(weights)
    if arguments.json:
        print(as_json({**about, "tensors": rows}))
        return OK
    several = len(weights.files) > 1
    print(printable(weights.path))
    print(
        f"{len(rows)} tensor{'s' * (len(rows) != 1)}, {about['parameters']} parameters, {size(about['bytes'])}, "
        f"in {len(weights.files)} file{'s' * several}"
    )
    if weights.metadata:
        print(f"metadata {printable(as_json(about['metadata']))}")
    print()
    heads = ["tensor", "dtype", "stored as", "shape", "bytes"] + ["file"] * several
    keys = ["name", "dtype", "stored_as", "shape", "bytes"] + ["file"] * several
    table(heads, [[cell(row[key]) for key in keys] for row in rows], left=4)
    return OK


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
