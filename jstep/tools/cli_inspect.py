"""`inspect` of the command line: checkpoints, directories of checkpoints, safetensors files."""

import argparse
import dataclasses
import functools
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jstep.checkpoint.checksums import size_differences
from jstep.checkpoint.listing import has_data, misnaming_text, missing
from jstep.checkpoint.manifest import MANIFEST_FILE, CheckpointError, Leaf, LeftOut, Manifest
from jstep.checkpoint.open_store import open_store
from jstep.checkpoint.store import Store
from jstep.core.checks import format_bytes, truncate_path
from jstep.core.tables import printable
from jstep.stores.files import is_directory, names_in
from jstep.stores.urls import absolute, is_url, location, split_path
from jstep.tools import cli
from jstep.tools.ranges import array_range, is_inexact
from jstep.weights.files import INDEX, SUFFIX, arrays_folder, read_headers, weights_kind
from jstep.weights.tensors import in_groups

# Finding and reading checkpoints for the command line, leaf by leaf.

_NAME = re.compile(r"(.+)-(0|[1-9][0-9]*)", re.DOTALL)
_AT_ONCE = 2**28
"""The number of bytes of leaves to read together."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint; if its name has no step, `step` comes from the manifest."""

    path: str
    prefix: str
    step: int
    manifest: Manifest
    store: Store

    @functools.cached_property
    def named(self) -> dict[str, Leaf]:
        """Name → leaf: the name is its path, followed by a number if several leaves share the path."""
        from jstep.checkpoint.leaf_records import unique

        return dict(zip(unique(leaf.path for leaf in self.manifest.leaves), self.manifest.leaves, strict=True))

    @property
    def left_out(self) -> dict[str, LeftOut]:
        return {leaf.path: leaf for leaf in self.manifest.left_out}

    def leaves(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Leaf, np.ndarray[Any, Any]]]:
        """Iterate over leaves, by default all, with names and values; PRNG keys become their data."""
        chosen = ((name, self.named[name]) for name in (self.named if names is None else names))
        for group in in_groups(((name, leaf.nbytes, leaf) for name, leaf in chosen), _AT_ONCE):
            yield from self._read(group)

    def _read(self, leaves: dict[str, Leaf]) -> Iterator[tuple[str, Leaf, np.ndarray[Any, Any]]]:
        # Imported here so that a directory is listed without JAX.
        from jstep.checkpoint.leaf_records import leaf_value

        wanted: dict[str, Any] = {leaf.array: None for leaf in leaves.values() if leaf.array is not None}
        try:
            arrays = self.store.contents(self.path, self.manifest).restore(wanted) if wanted else {}
        except (CheckpointError, OSError):
            raise
        except Exception as error:
            raise CheckpointError(f"{self.path} could not be read: {type(error).__name__}: {error}"[:500]) from error
        for name, leaf in leaves.items():
            yield name, leaf, np.asarray(leaf_value(leaf, None, arrays))

    def problems(self, *, every: bool = False) -> list[str]:
        """Describe the corruption of its files; with `every`, also of files that nothing reads."""
        return self.store.find_corruption(self.path, self.manifest, every=every)

    def size_problems(self) -> list[str]:
        """Describe the files on a disk whose sizes differ from those in the manifest."""
        found = {} if is_url(self.path) else size_differences(self.path, self.manifest.files)
        return [f"{self.path}/{path}: {why}" for path, why in found.items() if why]


def at(path: str) -> Checkpoint | None:
    """Return the checkpoint at a path, or None; raise `CheckpointError` if it is corrupted."""
    path = absolute(path)
    above, last = split_path(path.rstrip("/"))
    match = _NAME.fullmatch(last)
    if match is None:
        return None if is_url(path) else _renamed(path)
    store, step = open_store(above), int(match[2])
    stored = store.at(match[1], step)
    if stored is None:
        problem = dict(store.broken(match[1], step - 1)).get(path)
        if problem is not None:
            raise CheckpointError(f"{path}: {problem}: the checkpoint is corrupted")
        return None
    try:
        manifest = store.manifest(stored)
    except FileNotFoundError:  # evicted meanwhile
        return None
    if manifest.step != step:
        raise CheckpointError(f"{path}: {misnaming_text(match[1], step, manifest.step)}")
    return Checkpoint(stored, match[1], step, manifest, store)


def _renamed(path: str) -> Checkpoint | None:
    """Return the checkpoint in a folder whose name has no step, such as a copy called "pretrained"."""
    if not os.path.lexists(os.path.join(path, MANIFEST_FILE)) or not has_data(path):
        return None
    above, last = split_path(path)
    store = open_store(above)
    manifest = store.manifest(path)
    if lacks := missing(path):
        raise CheckpointError(f"{path}: {lacks} is missing: the checkpoint is corrupted")
    return Checkpoint(path, last, manifest.step, manifest, store)


def below(directory: str) -> tuple[list[Checkpoint], dict[str, str]]:
    """Return the checkpoints in a directory, by prefix and step, and the problems of others by their paths."""
    directory = absolute(directory)
    store = open_store(directory)
    paths: list[str] = []
    problems: dict[str, str] = {}
    names = [split_path(path)[1] for _, path in store.newest_first(None)]
    if not is_url(directory) and is_directory(directory):
        names += names_in(directory)
    for prefix in sorted({match[1] for name in names if (match := _NAME.fullmatch(name))}):
        paths += [path for _, path in store.newest_first(prefix)]
        problems |= {path: f"{path}: {problem}" for path, problem in store.broken(prefix, -1)}
    checkpoints = []
    for path in paths:
        try:
            checkpoints.append(at(path))
        except (CheckpointError, OSError) as error:
            problems[path] = str(error)
    return sorted(filter(None, checkpoints), key=lambda checkpoint: (checkpoint.prefix, checkpoint.step)), problems


# The command.

OWN_EXTRA = frozenset({"batches", "batches_of_processes", "ended", "held", "hooks", "past", "run", "stopped"})
"""The keys that `train` itself keeps in `extra`. The modules that define them import JAX, which is not needed here."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "a checkpoint (run/model-1000), a directory of checkpoints, or safetensors"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=what)
    parser.add_argument("--verify", action="store_true", help="compare every byte with the checksums, not only sizes")
    parser.add_argument("--all", action="store_true", help="also show what jstep itself keeps in `extra`")


def _run(arguments: argparse.Namespace) -> int:
    codes: list[int] = []
    for path in arguments.paths:
        if codes and not arguments.json:
            print()
        try:
            codes.append(_inspect(location(path, "path"), arguments))
        except CheckpointError as error:
            codes.append(_corrupted({"path": path}, [str(error)], arguments))
        except (OSError, ValueError, ImportError) as error:
            codes.append(cli.complain("inspect", error))
    return max(codes)


def _corrupted(about: Mapping[str, Any], problems: Sequence[str], arguments: argparse.Namespace) -> int:
    """Complain about a corrupted checkpoint, with `--json` also in the output."""
    fields = {**about, "problems": problems} | ({"sound": False} if arguments.verify else {})
    return max(cli.answer(arguments, fields, []), cli.complain("inspect", *problems))


def _inspect(path: str, arguments: argparse.Namespace) -> int:
    if _are_weights(path):
        return _safetensors(path, arguments)
    folder, problem = None, None
    if not is_url(path) and os.path.isdir(path) and not os.path.lexists(os.path.join(path, MANIFEST_FILE)):
        try:
            folder = arrays_folder(path)
        except ValueError as error:  # this may be a directory of checkpoints of jstep
            problem = error
    if folder is not None:
        return _orbax(folder, arguments)
    checkpoint = at(path)
    if checkpoint is not None:
        return _checkpoint(checkpoint, arguments)
    if not is_directory(path):
        raise FileNotFoundError(f"no checkpoint, directory of checkpoints or safetensors file: {path}")
    return _directory(path, arguments, problem)


# Safetensors files and Orbax checkpoints, without reading any tensor.


def _are_weights(path: str) -> bool:
    """Whether a path has weights: a file, or a folder with weights and without checkpoints."""
    if is_url(path) or not os.path.isdir(path):
        return not is_url(path) and (os.path.isfile(path) or os.path.isfile(path + INDEX))
    if not any(name.endswith((SUFFIX, SUFFIX + INDEX)) for name in os.listdir(path)):
        return False
    try:
        return at(path) is None and not below(path)[0]
    except CheckpointError:
        return True  # a folder such as gpt-2, which is named like a checkpoint


def _safetensors(path: str, arguments: argparse.Namespace) -> int:
    """Print the tensors of a file, or of an index and its shards."""
    if arguments.verify:
        raise ValueError("--verify: safetensors files have no checksums; leave it out, and headers are checked anyway")
    weights = read_headers(weights_kind(path)[1])
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
    if arguments.verify:
        raise ValueError("--verify: Orbax checkpoints have no checksums; leave it out")
    from jstep.weights import orbax_checkpoint  # not at the top: importing Orbax is slow

    arrays, _ = orbax_checkpoint.open_checkpoint(folder)
    rows = [
        {"name": array.name, "dtype": array.code, "shape": list(array.shape), "bytes": array.nbytes}
        for array in arrays.values()
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
        f"{format_bytes(about['bytes'])}, {where}",
        *([f"metadata {printable(cli.as_strict_json(about['metadata']))}"] if about["metadata"] else []),
        "",
        *cli.table(keys, rows, left=list(keys).index("bytes")),
    ]
    return cli.answer(arguments, {**about, "tensors": rows}, lines)


def _path_line(path: str) -> str:
    return truncate_path(printable(path), cli.terminal_width())


# Checkpoints of jstep.


def _checkpoint(checkpoint: Checkpoint, arguments: argparse.Namespace) -> int:
    about = _about(checkpoint)
    if problems := _problems(checkpoint, arguments):
        return _corrupted(about, problems, arguments)
    rows = [
        {"path": name, "dtype": leaf.dtype, "shape": list(leaf.shape), "bytes": leaf.nbytes, **_numbers(leaf, array)}
        for name, leaf, array in checkpoint.leaves()
    ]
    absent = [leaf.to_json() for leaf in checkpoint.manifest.left_out]
    sound = {"sound": True} if arguments.verify else {}
    left_out = {"left_out": absent} if absent else {}
    fields = {**about, "extra": checkpoint.manifest.extra, "leaves": rows, **left_out, **sound}
    kinds = {"leaf": "path", "dtype": "dtype", "shape": "shape"}
    figures = {"bytes": "bytes", "min": "min", "max": "max", "mean": "mean", "non-finite": "nonfinite"}
    lines = [
        _path_line(checkpoint.path),
        f"step {checkpoint.step}, saved {about['time']}, by jstep {printable(checkpoint.manifest.jstep)}, "
        f"{len(rows)} leaves, "
        f"{format_bytes(about['bytes'])}{', every byte as it was written' if arguments.verify else ''}",
        *_extra_lines(checkpoint.manifest.extra, with_own=arguments.all),
        "",
        *cli.table(kinds | figures, rows, left=3),
    ]
    if absent:
        lines += ["", "left out by Saver(leave_out=…); restore takes them from the target", ""]
        lines += cli.table(kinds | {"fingerprint": "fingerprint"}, absent, left=4)
    return cli.answer(arguments, fields, lines)


def _extra_lines(extra: Any, *, with_own: bool) -> list[str]:
    own = [] if with_own or not isinstance(extra, dict) else [key for key in extra if key in OWN_EXTRA]
    shown = {key: value for key, value in extra.items() if key not in own} if own else extra
    is_shown = shown or (shown is not None and not own)
    lines = [f"extra {printable(cli.as_strict_json(shown))}"] if is_shown else []
    number = f"{len(own)} {'entry' if len(own) == 1 else 'entries'}"
    return [*lines, f"{number} of jstep in extra (--all shows them)"] if own else lines


def _numbers(leaf: Any, array: np.ndarray[Any, Any]) -> dict[str, Any]:
    numbers = None if leaf.key_impl is not None else array_range(array)
    nonfinite = None if numbers is None else numbers.nans + numbers.infinities
    if numbers is None or numbers.low is None:
        return {"min": None, "max": None, "mean": None, "nonfinite": nonfinite}
    values = (np.abs(array) if np.iscomplexobj(array) else array).astype(np.float64)
    mean = float(np.mean(values, where=np.isfinite(values)))
    is_whole = not is_inexact(array.dtype)
    low, high = (int(array.min()), int(array.max())) if is_whole else (numbers.low, numbers.high)
    return {"min": low, "max": high, "mean": mean, "nonfinite": nonfinite}


def _problems(checkpoint: Checkpoint, arguments: argparse.Namespace) -> list[str]:
    try:
        found = checkpoint.problems(every=True) if arguments.verify else checkpoint.size_problems()
    except (CheckpointError, OSError) as error:
        found = [str(error)]
    return [f"{checkpoint.path} is corrupted: {problem}" for problem in found]


def _directory(path: str, arguments: argparse.Namespace, not_one: ValueError | None) -> int:
    checkpoints, broken = below(path)
    if not checkpoints and not broken:
        from jstep.tools.runs import directory_of_runs, runs

        if sentence := directory_of_runs(path, runs(path)):
            raise ValueError(sentence)
        if not_one is not None:
            raise not_one
        raise FileNotFoundError(
            f"no checkpoints in {path}: they are folders such as model-1000, in the checkpoint_dir of train"
        )
    rows, problems = [], list(broken.values())
    for checkpoint in checkpoints:
        wrong = _problems(checkpoint, arguments)
        problems += wrong
        sound = {"sound": not wrong} if arguments.verify else {}
        name = f"{checkpoint.prefix}-{checkpoint.step}"
        rows.append({"name": name, **_about(checkpoint), "leaves": len(checkpoint.manifest.leaves), **sound})
    keys = {"checkpoint": "name", "saved": "time", "step": "step", "leaves": "leaves", "size": "bytes"}
    keys |= {"every byte": "sound"} if arguments.verify else {}
    keys |= {} if all(row["finite"] for row in rows) else {"parameters": "finite"}
    keys |= {"kept": "passing"} if any(row["passing"] for row in rows) else {}
    shown = [
        {
            **row,
            "bytes": format_bytes(row["bytes"]),
            "sound": "as written" if row.get("sound") else "CORRUPTED",
            "finite": "finite" if row["finite"] else "NOT FINITE",
            "passing": "until the next" if row["passing"] else "",
        }
        for row in rows
    ]
    lines = cli.table(keys, shown, left=2) if rows else []
    if len(arguments.paths) > 1:
        lines = [_path_line(path), *lines]
    if arguments.verify:
        rows += [{"name": split_path(place)[1], "path": place, "sound": False} for place in broken]
    cli.answer(arguments, {"path": path, "checkpoints": rows, "problems": problems}, lines)
    return cli.complain("inspect", *problems)


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "path": checkpoint.path,
        "step": checkpoint.step,
        "saved_at": checkpoint.manifest.saved_at,
        "time": cli.time_text(checkpoint.manifest.saved_at, " ", "seconds").replace("+00:00", " UTC"),
        "jstep": checkpoint.manifest.jstep,
        "bytes": sum(leaf.nbytes for leaf in checkpoint.manifest.leaves),
        "finite": checkpoint.manifest.finite,
        "passing": checkpoint.manifest.temporary,
    }


INSPECT = cli.Command(_add_arguments, _run)
