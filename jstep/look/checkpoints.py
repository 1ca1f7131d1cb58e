"""`inspect` of the command line: checkpoints, and directories of them."""

import argparse
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jstep.array_store.listing import FOUND_NAME, REPLACED, misnaming_text
from jstep.array_store.manifest import (
    CheckpointError,
    CorruptedCheckpointError,
    Leaf,
    LeftOutLeaf,
    Manifest,
)
from jstep.array_store.store import Store
from jstep.checkpoint.names import open_store
from jstep.core.checks import format_bytes
from jstep.core.tables import printable
from jstep.look import cli
from jstep.look.arrays import array_range, is_inexact, norm
from jstep.look.checkpoint_positions import Positions, lines_of_positions, positions_in
from jstep.stores.files import is_directory, names_in
from jstep.stores.untrusted import UntrustedError, step_in
from jstep.stores.urls import absolute, is_url, join_path, location, split_path

# Finding and reading checkpoints for the command line, leaf by leaf.

_MAX_GROUP_BYTES = 2**28
"""The number of bytes of leaves to read together."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest has been read.

    Attributes:
        path: The path at which the store has it.
        store: The store of its directory or bucket.
    """

    path: str
    prefix: str
    step: int
    manifest: Manifest
    store: Store

    @functools.cached_property
    def named(self) -> dict[str, Leaf]:
        """Name → leaf: its path, and a number if several leaves share the path."""
        from jstep.array_store.leaf_records import unique

        names = unique(leaf.path for leaf in self.manifest.leaves)
        return dict(zip(names, self.manifest.leaves, strict=True))

    @property
    def left_out(self) -> dict[str, LeftOutLeaf]:
        return {leaf.path: leaf for leaf in self.manifest.left_out}

    @functools.cached_property
    def _array_problem(self) -> str:
        """What jstep does not write in a checkpoint, or "": tensorstore must not open that."""
        return self.store.reader(self.path, self.manifest).foreign_content()

    def positions(self) -> Positions | None:
        """Read the positions of its loaders, and of the objects of `from_loop`."""
        try:
            return positions_in(
                self.manifest.extra, self.store.reader(self.path, self.manifest).read_file
            )
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def leaves(
        self, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, Leaf, np.ndarray[Any, Any]]]:
        """Iterate over leaves, by default all, with names and values; PRNG keys become data."""
        from jstep.weights.tensors import group_by_bytes  # it imports JAX

        chosen = {name: self.named[name] for name in (self.named if names is None else names)}
        sized = ((name, leaf.nbytes, leaf) for name, leaf in chosen.items())
        for group in group_by_bytes(sized, _MAX_GROUP_BYTES):
            yield from self._read(group)

    def _read(self, leaves: dict[str, Leaf]) -> Iterator[tuple[str, Leaf, np.ndarray[Any, Any]]]:
        # Imported here so that a directory is listed without JAX.
        from jstep.array_store.leaf_records import leaf_value

        wanted: dict[str, Any] = {
            leaf.array: None for leaf in leaves.values() if leaf.array is not None
        }
        try:
            if self._array_problem:
                raise CheckpointError(f"{self.path} is corrupted: {self._array_problem}")
            arrays = self.store.reader(self.path, self.manifest).read(wanted)
        except (CheckpointError, OSError):
            raise
        except Exception as error:
            # A corrupted file may raise anything in tensorstore and its decoders.
            raise CheckpointError(
                f"{self.path} could not be read: {type(error).__name__}: {error}"[:500]
            ) from error
        for name, leaf in leaves.items():
            yield name, leaf, np.asarray(leaf_value(leaf, None, arrays))

    def problems(self, *, every: bool = False) -> list[str]:
        """Describe the corruption of its files; with `every`, also of files that nothing reads."""
        return self.store.find_corruption(self.path, self.manifest, every=every)

    def size_problems(self) -> list[str]:
        found = self.store.find_wrong_sizes(self.path, self.manifest)
        return [f"{self.path}/{path}: {why}" for path, why in found.items()]


def checkpoint_at(path: str) -> Checkpoint | None:
    """Return the checkpoint at a path, or None; raise `CheckpointError` if it is corrupted."""
    path = absolute(path)
    directory, name = split_path(path.rstrip("/"))
    match = FOUND_NAME.fullmatch(name)
    if match is None:
        return None
    prefix = match["prefix"]
    step = step_in(match["step"])
    if step is None:
        return None
    store = open_store(directory)
    stored = store.find_path(prefix, step)
    if stored is None:
        problem = dict(store.find_broken(prefix, step - 1)).get(path)
        if problem is not None:
            raise CorruptedCheckpointError(f"{path}: {problem}: the checkpoint is corrupted")
        return None
    try:
        manifest = store.manifest(stored)
    except FileNotFoundError:
        # Its run has deleted it meanwhile.
        return None
    if manifest.step != step:
        raise CheckpointError(f"{path}: {misnaming_text(prefix, step, manifest.step)}")
    return Checkpoint(stored, prefix, step, manifest, store)


def checkpoints_in(directory: str) -> tuple[list[Checkpoint], dict[str, Exception]]:
    """Return a directory's checkpoints by prefix and step, and the errors of others by path."""
    directory = absolute(directory)
    store = open_store(directory)
    paths: list[str] = []
    errors: dict[str, Exception] = {}
    names = [split_path(path)[1] for _, path in store.newest_first(None)]
    if not is_url(directory) and is_directory(directory):
        # The store lists only what is complete; a prefix may have nothing but broken checkpoints.
        names += names_in(directory)
    matches = map(FOUND_NAME.fullmatch, names)
    for prefix in sorted({match["prefix"] for match in matches if match is not None}):
        paths += [path for _, path in store.newest_first(prefix)]
        for path, problem in store.find_broken(prefix, -1):
            errors[path] = CorruptedCheckpointError(f"{path}: {problem}")
    checkpoints: list[Checkpoint] = []
    for path in paths:
        try:
            checkpoint = checkpoint_at(path)
        except (CheckpointError, OSError) as error:
            errors[path] = error
            continue
        if checkpoint is not None:
            checkpoints.append(checkpoint)
    checkpoints.sort(key=lambda checkpoint: (checkpoint.prefix, checkpoint.step))
    return checkpoints, errors


# The command.

OWN_EXTRA = frozenset(
    {
        *("batches", "batches_of_processes", "before_end", "ended", "held", "hooks"),
        *("last_body", "last_iteration", "past", "run", "stopped"),
    }
)
"""The keys of `train` in `extra` that are only named; what says something to a reader, such as
`config`, is shown. The modules that define them import JAX, which is not needed here."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = (
        "a checkpoint (run/model-1000), or a directory of checkpoints, "
        "with those in its folder best"
    )
    parser.add_argument("paths", metavar="PATH", nargs="+", help=what)
    parser.add_argument("--verify", action="store_true", help="verify every byte, not only sizes")


def _print_contents(arguments: argparse.Namespace) -> int:
    codes: list[int] = []
    for path in arguments.paths:
        if codes and not arguments.json:
            print()
        try:
            codes.append(_inspect(location(path, "path"), arguments))
        except CheckpointError as error:
            codes.append(_print_corruption({"path": path}, [str(error)], arguments))
        except (OSError, ValueError, ImportError) as error:
            codes.append(cli.complain("inspect", error))
    return max(codes)


def _inspect(path: str, arguments: argparse.Namespace) -> int:
    checkpoint = checkpoint_at(path)
    if checkpoint is not None:
        return _inspect_checkpoint(checkpoint, arguments)
    if not is_directory(path):
        raise FileNotFoundError(f"no checkpoint or directory of checkpoints: {path}")
    return _inspect_directory(path, arguments)


def _print_corruption(
    about: Mapping[str, Any], problems: Sequence[str], arguments: argparse.Namespace
) -> int:
    fields = {**about, "problems": problems}
    if arguments.verify:
        fields["sound"] = False
    cli.answer(arguments, fields, [])
    return cli.complain("inspect", *problems)


_KIND_COLUMNS = {"leaf": "path", "dtype": "dtype", "shape": "shape"}
_NUMBER_COLUMNS = {
    "bytes": "bytes",
    "min": "min",
    "max": "max",
    "mean": "mean",
    "norm": "norm",
    "non-finite": "nonfinite",
}


def _inspect_checkpoint(checkpoint: Checkpoint, arguments: argparse.Namespace) -> int:
    manifest = checkpoint.manifest
    about = _about(checkpoint)
    _, problems = _check(checkpoint, arguments)
    if problems:
        return _print_corruption(about, problems, arguments)
    rows: list[dict[str, Any]] = []
    for name, leaf, array in checkpoint.leaves():
        row = {"path": name, "dtype": leaf.dtype, "shape": list(leaf.shape), "bytes": leaf.nbytes}
        rows.append({**row, **_numbers(leaf, array)})
    left_out = [leaf.to_json() for leaf in manifest.left_out]
    positions = checkpoint.positions()

    fields = {**about, "extra": manifest.extra, "leaves": rows}
    if positions is not None:
        fields["positions"] = positions.as_json()
    if left_out:
        fields["left_out"] = left_out
    if arguments.verify:
        fields["sound"] = True

    lines = [
        checkpoint.path,
        f"step {checkpoint.step}, saved {about['time']}, by jstep {manifest.jstep}, {len(rows)} "
        f"leaves, {format_bytes(about['bytes'])}, {_extent(checkpoint.path, arguments)}",
        *_extra_lines(manifest.extra),
        "",
        *cli.table(_KIND_COLUMNS | _NUMBER_COLUMNS, rows, left=3),
    ]
    if left_out:
        lines += ["", "left out by Saver(leave_out=…); restore takes them from the target", ""]
        lines += cli.table(_KIND_COLUMNS | {"fingerprint": "fingerprint"}, left_out, left=4)
    if positions is not None:
        shown = [printable(line) for line in lines_of_positions(positions)]
        lines += [
            "",
            "positions of the batches, and of the objects of from_loop",
            *cli.first_lines(shown),
        ]
    return cli.answer(arguments, fields, lines)


def _extent(path: str, arguments: argparse.Namespace) -> str:
    if arguments.verify:
        return "every byte as it was written"
    if is_url(path):
        return "not verified (--verify does)"
    return "sizes only (--verify reads every byte)"


def _extra_lines(extra: Any) -> list[str]:
    own_keys: list[str] = []
    users_extra = extra
    if isinstance(extra, dict):
        own_keys = [key for key in extra if key in OWN_EXTRA]
        users_extra = {key: value for key, value in extra.items() if key not in own_keys}
    lines: list[str] = []
    # An empty `extra` is shown if the user saved it, not if only jstep's entries were in it.
    if users_extra or (extra is not None and not own_keys):
        lines.append(f"extra {cli.as_strict_json(users_extra)}")
    if own_keys:
        lines.append(f"entries of jstep in extra, which --json shows: {', '.join(own_keys)}")
    return lines


def _numbers(leaf: Leaf, array: np.ndarray[Any, Any]) -> dict[str, Any]:
    numbers: dict[str, Any] = dict.fromkeys(("min", "max", "mean", "norm", "nonfinite"))
    if leaf.key_impl is not None:
        # The data of a PRNG key are no numbers.
        return numbers
    value_range = array_range(array)
    numbers["nonfinite"] = value_range.nans + value_range.infinities
    if value_range.low is None:
        return numbers
    if is_inexact(array.dtype):
        numbers["min"] = value_range.low
        numbers["max"] = value_range.high
    else:
        # Not the bounds of the range, which are floats, and inexact beyond 2**53.
        numbers["min"] = int(array.min())
        numbers["max"] = int(array.max())
    values = (np.abs(array) if np.iscomplexobj(array) else array).astype(np.float64)
    numbers["mean"] = float(np.mean(values, where=np.isfinite(values)))
    numbers["norm"] = norm(array)
    return numbers


_AS_WRITTEN = "as written"
_CORRUPTED = "CORRUPTED"
_UNUSABLE = "UNUSABLE"
"""The verdict on a checkpoint that may be intact, but has another name, another format, or cannot
be read now."""


class _Check(NamedTuple):
    """The verdict on a checkpoint, and its defects."""

    verdict: str
    problems: list[str]


def _check(checkpoint: Checkpoint, arguments: argparse.Namespace) -> _Check:
    path = checkpoint.path
    try:
        found = checkpoint.problems(every=True) if arguments.verify else checkpoint.size_problems()
    except (CorruptedCheckpointError, UntrustedError) as error:
        found = [str(error)]
    except (CheckpointError, OSError, ValueError) as error:
        # Not "corrupted": a bucket that is not reachable, or a file without permission
        # (tensorstore's ValueError), says nothing about the bytes.
        return _Check(_UNUSABLE, [f"{path} cannot be verified: {error}"])
    if found:
        return _Check(_CORRUPTED, [f"{path} is corrupted: {problem}" for problem in found])
    return _Check(_AS_WRITTEN if arguments.verify else "", [])


_DIRECTORY_COLUMNS = {
    "checkpoint": "name",
    "saved": "time",
    "step": "step",
    "leaves": "leaves",
    "size": "size",
    "": "note",
}


def _inspect_directory(path: str, arguments: argparse.Namespace) -> int:
    checkpoints, broken = checkpoints_in(path)
    if not checkpoints and not broken:
        from jstep.look.runs import hint_at_runs, runs

        none = (
            f"no checkpoints in {path}: they are folders such as model-1000, in the checkpoint_dir "
            "of train"
        )
        raise FileNotFoundError(hint_at_runs(path, runs(path)) or none)
    best: list[Checkpoint] = []
    broken_best: dict[str, Exception] = {}
    if checkpoints:
        best, broken_best = checkpoints_in(join_path(path, "best"))
    broken |= broken_best
    rows: list[dict[str, Any]] = []
    shown: dict[tuple[str, str, int], dict[str, Any]] = {}  # by folder, prefix and step
    problems = [str(error) for error in broken.values()]
    for checkpoint in [*checkpoints, *best]:
        verdict, found = _check(checkpoint, arguments)
        problems += found
        folder = "best/" if checkpoint in best else ""
        name = f"{folder}{checkpoint.prefix}-{checkpoint.step}"
        row = {"name": name, **_about(checkpoint), "leaves": len(checkpoint.manifest.leaves)}
        if arguments.verify:
            row["sound"] = not found
        rows.append(row)
        size = format_bytes(row["bytes"])
        shown[folder, checkpoint.prefix, checkpoint.step] = {
            **row,
            "size": size,
            "verdict": verdict,
        }
    for broken_path, error in broken.items():
        folder = "best/" if broken_path in broken_best else ""
        prefix, _, step = split_path(broken_path.removesuffix(REPLACED))[1].rpartition("-")
        verdict = _CORRUPTED if isinstance(error, CorruptedCheckpointError) else _UNUSABLE
        shown[folder, prefix, int(step)] = {
            "name": f"{folder}{prefix}-{step}",
            "step": step,
            "verdict": verdict,
        }
    in_order = [{**shown[key], "note": _note(shown[key])} for key in sorted(shown)]
    lines = [path] if len(arguments.paths) > 1 else []
    lines += cli.table(_DIRECTORY_COLUMNS, in_order, left=2)
    bad = _verdict_lines(in_order)
    lines += bad
    if not (bad and arguments.verify):
        lines.append(_extent(path, arguments))
    if arguments.verify:
        rows += [
            {"name": split_path(broken_path)[1], "path": broken_path, "sound": False}
            for broken_path in broken
        ]
    cli.answer(arguments, {"path": path, "checkpoints": rows, "problems": problems}, lines)
    return cli.complain("inspect", *problems)


def _note(row: Mapping[str, Any]) -> str:
    notes = [row["verdict"]]
    if not row.get("finite", True):
        notes.append("NOT FINITE")
    if row.get("temporary"):
        notes.append("until the next one")
    return ", ".join(filter(None, notes))


def _verdict_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Count the checkpoints that are not as written, if there are such."""
    counts = Counter(row["verdict"] for row in rows)
    parts: list[str] = []
    for verdict in (_CORRUPTED, _UNUSABLE):
        if counts[verdict]:
            parts.append(
                f"{counts[verdict]} of {len(rows)} {'is' if counts[verdict] == 1 else 'are'} "
                f"{verdict}"
            )
    return ["; ".join(parts)] if parts else []


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "path": checkpoint.path,
        "step": checkpoint.step,
        "saved_at": manifest.saved_at,
        "time": f"{cli.utc_text(manifest.saved_at)} UTC",
        "jstep": manifest.jstep,
        "bytes": sum(leaf.nbytes for leaf in manifest.leaves),
        "finite": manifest.finite,
        "temporary": manifest.temporary,
    }


INSPECT = cli.Command(_add_arguments, _print_contents)
