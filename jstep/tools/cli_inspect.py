"""`inspect` of the command line: checkpoints, directories of checkpoints, safetensors files."""

import argparse
import math
import os
from collections import Counter
from typing import Any

import numpy as np

from jstep.checkpoint.manifest import NAME as MANIFEST
from jstep.checkpoint.manifest import CheckpointError
from jstep.core.checks import cut_path, size
from jstep.stores.files import is_directory
from jstep.stores.urls import is_url, location
from jstep.tools import cli_common as common
from jstep.tools.cli_common import Checkpoint, Command
from jstep.tools.ranges import is_inexact, range_of
from jstep.weights.files import INDEX, SUFFIX, folder_of, kind_of, read_headers

OWN_EXTRA = frozenset({"batches", "batches_of_processes", "ended", "held", "hooks", "past", "stopped"})
"""The keys that `train` itself keeps in `extra`. The modules that define them import JAX, which is not needed here."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint (run/model-1000), a directory of checkpoints, or safetensors")
    parser.add_argument("--verify", action="store_true", help="compare every byte with the checksums")
    parser.add_argument("--all", action="store_true", help="also show what jstep itself keeps in `extra`")


def _run(arguments: argparse.Namespace) -> int:
    path = location(arguments.path, "path")
    if _are_weights(path):
        return _safetensors(path, arguments)
    folder, problem = None, None
    if not is_url(path) and os.path.isdir(path) and not os.path.lexists(os.path.join(path, MANIFEST)):
        try:
            folder = folder_of(path)
        except ValueError as error:  # this may be a directory of checkpoints of jstep
            problem = error
    if folder is not None:
        return _orbax(folder, arguments)
    one = common.at(path)
    if one is not None:
        return _checkpoint(one, arguments)
    if not is_directory(path):
        raise FileNotFoundError(f"no checkpoint, directory of checkpoints or safetensors file: {path}")
    return _directory(path, arguments, problem)


# Safetensors files and Orbax checkpoints, without reading any tensor.


def _are_weights(path: str) -> bool:
    """Return whether a path has weights: a file, or a folder with weights that is not and has no checkpoints."""
    if is_url(path) or not os.path.isdir(path):
        return not is_url(path) and (os.path.isfile(path) or os.path.isfile(path + INDEX))
    if not any(name.endswith((SUFFIX, SUFFIX + INDEX)) for name in os.listdir(path)):
        return False
    try:
        return common.at(path) is None and not common.below(path)[0]
    except CheckpointError:
        return True  # a folder such as gpt-2, whose name looks like that of a checkpoint


def _safetensors(path: str, arguments: argparse.Namespace) -> int:
    """Print the tensors of a file, or of an index and its shards.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is corrupted.
    """
    if arguments.verify:
        raise ValueError("--verify: safetensors files have no checksums; leave it out, and headers are checked anyway")
    weights = read_headers(kind_of(path)[1])
    folder = os.path.dirname(weights.path) or "."
    rows = [
        {
            "name": tensor.name,
            "dtype": str(tensor.dtype or tensor.code),
            "stored_as": tensor.code,
            "shape": list(tensor.shape),
            "bytes": tensor.nbytes,
            "file": os.path.relpath(tensor.file, folder),
        }
        for tensor in weights.tensors.values()
    ]
    held = Counter(tensor.file for tensor in weights.tensors.values())
    files = [{"path": file, "tensors": held[file]} for file in weights.files]
    several = len(files) > 1
    columns = ["dtype", "stored_as", "shape", "bytes"] + ["file"] * several
    about = {"format": "safetensors", **_sums(rows), "metadata": dict(weights.metadata), "files": files}
    where = f"in {len(files)} file{'s' * several}"
    return _tensors({"path": weights.path, **about}, rows, where, columns, arguments)


def _orbax(folder: str, arguments: argparse.Namespace) -> int:
    """Print the arrays of an Orbax checkpoint, from its metadata.

    Raises:
        ValueError: Orbax cannot read it, or jstep wrote it and its manifest is missing.
    """
    if arguments.verify:
        raise ValueError("--verify: Orbax checkpoints have no checksums; leave it out")
    from jstep.weights import orbax_checkpoint  # not at the top: importing Orbax is slow

    found, _ = orbax_checkpoint.opened(folder)
    rows = [
        {"name": array.name, "dtype": array.code, "shape": list(array.shape), "bytes": array.nbytes}
        for array in found.values()
    ]
    about = {"path": folder, "format": "orbax", **_sums(rows), "metadata": {}}
    return _tensors(about, rows, "in a checkpoint of Orbax", ["dtype", "shape", "bytes"], arguments)


def _sums(rows: list[dict[str, Any]]) -> dict[str, int]:
    return {"bytes": sum(row["bytes"] for row in rows), "parameters": sum(math.prod(row["shape"]) for row in rows)}


def _tensors(
    about: dict[str, Any], rows: list[dict[str, Any]], where: str, columns: list[str], arguments: argparse.Namespace
) -> int:
    rows = sorted(rows, key=lambda row: row["name"])
    keys = {"tensor": "name"} | {column.replace("_", " "): column for column in columns}
    lines = [
        _path_line(about["path"]),
        f"{len(rows)} tensor{'s' * (len(rows) != 1)}, {about['parameters']} parameters, "
        f"{size(about['bytes'])}, {where}",
        *([f"metadata {common.printable(common.as_json(about['metadata']))}"] if about["metadata"] else []),
        "",
        *common.table(keys, rows, left=list(keys).index("bytes")),
    ]
    return common.answer(arguments, {**about, "tensors": rows}, lines)


def _path_line(path: str) -> str:
    return cut_path(common.printable(path), common.terminal_width())


# Checkpoints of jstep.


def _checkpoint(one: Checkpoint, arguments: argparse.Namespace) -> int:
    problems = one.problems(every=True) if arguments.verify else []
    if problems:
        return common.complain("inspect", *(f"{one.path} is corrupted: {problem}" for problem in problems))
    rows = [
        {"path": name, "dtype": leaf.dtype, "shape": list(leaf.shape), "bytes": leaf.nbytes, **_numbers(leaf, array)}
        for name, leaf, array in one.leaves()
    ]
    about = _about(one)
    absent = [leaf.to_json() for leaf in one.manifest.left_out]
    verified = {"verified": True} if arguments.verify else {}
    left_out = {"left_out": absent} if absent else {}
    fields = {**about, "extra": one.manifest.extra, "leaves": rows, **left_out, **verified}
    kinds = {"leaf": "path", "dtype": "dtype", "shape": "shape"}
    figures = {"bytes": "bytes", "min": "min", "max": "max", "mean": "mean", "non-finite": "nonfinite"}
    lines = [
        _path_line(one.path),
        f"step {one.step}, saved {about['time']}, by jstep {common.printable(one.manifest.jstep)}, "
        f"{len(rows)} leaves, {size(about['bytes'])}{', every byte as it was written' if arguments.verify else ''}",
        *_extra_lines(one.manifest.extra, with_own=arguments.all),
        "",
        *common.table(kinds | figures, rows, left=3),
    ]
    if absent:
        lines += ["", "left out by Saver(leave_out=…); restore takes them from the target", ""]
        lines += common.table(kinds | {"fingerprint": "fingerprint"}, absent, left=4)
    return common.answer(arguments, fields, lines)


def _extra_lines(extra: Any, *, with_own: bool) -> list[str]:
    own = [] if with_own or not isinstance(extra, dict) else [key for key in extra if key in OWN_EXTRA]
    shown = {key: value for key, value in extra.items() if key not in own} if own else extra
    is_shown = shown or (shown is not None and not own)
    lines = [f"extra {common.printable(common.as_json(shown))}"] if is_shown else []
    number = f"{len(own)} {'entry' if len(own) == 1 else 'entries'}"
    return [*lines, f"{number} of jstep in extra (--all shows them)"] if own else lines


def _numbers(leaf: Any, array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return minimum, maximum and mean of the finite numbers; None for keys."""
    found = None if leaf.key_impl is not None else range_of(array)
    nonfinite = None if found is None else found.nans + found.infinities
    if found is None or found.low is None:
        return {"min": None, "max": None, "mean": None, "nonfinite": nonfinite}
    values = (np.abs(array) if np.iscomplexobj(array) else array).astype(np.float64)
    mean = float(np.mean(values, where=np.isfinite(values)))
    is_whole = not is_inexact(array.dtype)
    low, high = (int(array.min()), int(array.max())) if is_whole else (found.low, found.high)
    return {"min": low, "max": high, "mean": mean, "nonfinite": nonfinite}


def _directory(path: str, arguments: argparse.Namespace, not_one: ValueError | None) -> int:
    checkpoints, problems = common.below(path)
    if not checkpoints and not problems:
        if not_one is not None:
            raise not_one
        raise FileNotFoundError(
            f"no checkpoints in {path}: they are folders such as model-1000, in the checkpoint_dir of train"
        )
    rows = []
    for one in checkpoints:
        wrong = []
        if arguments.verify:
            try:
                wrong = one.problems(every=True)
            except (CheckpointError, OSError) as error:
                wrong = [str(error)]
        problems += [f"{one.path} is corrupted: {problem}" for problem in wrong]
        verified = {"verified": not wrong} if arguments.verify else {}
        name = f"{one.prefix}-{one.step}"
        rows.append({"name": name, **_about(one), "leaves": len(one.manifest.leaves), **verified})
    keys = {"checkpoint": "name", "saved": "time", "step": "step", "leaves": "leaves", "size": "bytes"}
    keys |= {"every byte": "verified"} if arguments.verify else {}
    keys |= {} if all(row["finite"] for row in rows) else {"parameters": "finite"}
    keys |= {"kept": "passing"} if any(row["passing"] for row in rows) else {}
    shown = [
        {
            **row,
            "bytes": size(row["bytes"]),
            "verified": "as written" if row.get("verified") else "CORRUPTED",
            "finite": "finite" if row["finite"] else "NOT FINITE",
            "passing": "until the next" if row["passing"] else "",
        }
        for row in rows
    ]
    lines = common.table(keys, shown, left=2) if rows else []
    common.answer(arguments, {"path": path, "checkpoints": rows, "problems": problems}, lines)
    return common.complain("inspect", *problems)


def _about(one: Checkpoint) -> dict[str, Any]:
    return {
        "path": one.path,
        "step": one.step,
        "saved_at": one.manifest.saved_at,
        "time": common.time_text(one.manifest.saved_at, " ", "seconds").replace("+00:00", " UTC"),
        "jstep": one.manifest.jstep,
        "bytes": sum(leaf.nbytes for leaf in one.manifest.leaves),
        "finite": one.manifest.finite,
        "passing": one.manifest.passing,
    }


INSPECT = Command(_add_arguments, _run)
