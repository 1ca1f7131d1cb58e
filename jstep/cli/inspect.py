"""`inspect`: the contents of a checkpoint or of safetensors files, or the checkpoints in a directory."""

import argparse
from typing import Any

import numpy as np

from jstep.checkpoint.manifest import CheckpointError
from jstep.cli import weights
from jstep.cli.checkpoints import Checkpoint, at, below, names_of
from jstep.cli.command import OK, TROUBLE, Command, as_json, cell, complain, printable, table, time_text
from jstep.core.checks import is_inexact, range_of, size
from jstep.stores.files import is_directory
from jstep.stores.objects import location


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint (run/model-1000), a directory of checkpoints, or safetensors")
    parser.add_argument("--verify", action="store_true", help="compare every byte with the checksums")
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")


def _run(arguments: argparse.Namespace) -> int:
    path = location(arguments.path, "path")
    if weights.are_at(path):
        return weights.show(path, arguments)
    problem = None
    try:
        folder = weights.orbax_folder(path)
    except ValueError as error:  # this may be a directory of checkpoints of jstep
        folder, problem = None, error
    if folder is not None:
        return weights.show_orbax(folder, arguments)
    one = at(path)
    if one is not None:
        return _checkpoint(one, arguments)
    if not is_directory(path):
        raise FileNotFoundError(f"no checkpoint, directory of checkpoints or safetensors file: {path}")
    return _directory(path, arguments, problem)


def _checkpoint(one: Checkpoint, arguments: argparse.Namespace) -> int:
    problems = one.problems(every=True) if arguments.verify else []
    for problem in problems:
        complain("inspect", f"{one.path} is corrupted: {problem}")
    if problems:
        return TROUBLE
    rows = [
        {"path": name, "dtype": leaf.dtype, "shape": list(leaf.shape), "bytes": leaf.nbytes, **_numbers(leaf, array)}
        for name, (leaf, array) in zip(names_of(one), one.leaves(), strict=True)
    ]
    about = _about(one)
    if arguments.json:
        verified = {"verified": True} if arguments.verify else {}
        absent = [leaf.to_json() for leaf in one.manifest.left_out]
        left_out = {"left_out": absent} if absent else {}
        print(as_json({**about, "extra": one.manifest.extra, "leaves": rows, **left_out, **verified}))
        return OK
    print(printable(f"{one.path}"))
    print(
        f"step {one.step}, saved {about['time']}, by jstep {printable(one.manifest.jstep)}, {len(rows)} leaves, "
        f"{size(about['bytes'])}{', every byte as it was written' if arguments.verify else ''}"
    )
    if one.manifest.extra is not None:
        print(f"extra {printable(as_json(one.manifest.extra))}")
    print()
    heads = ("leaf", "dtype", "shape", "bytes", "min", "max", "mean", "non-finite")
    table(heads, [[cell(row.get(key)) for key in ("path", "dtype", "shape", "bytes", "min", "max", "mean")]
                   + [cell(row["nonfinite"])] for row in rows], left=3)  # fmt: skip
    if one.manifest.left_out:
        print("\nleft out by Saver(leave_out=…); restore takes them from the target\n")
        rest = [[cell(x.path), x.dtype, cell(list(x.shape)), x.fingerprint] for x in one.manifest.left_out]
        table(("leaf", "dtype", "shape", "fingerprint"), rest, left=4)
    return OK


def _numbers(leaf: Any, array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return minimum, maximum and mean of the finite numbers; None for keys."""
    nothing = {"min": None, "max": None, "mean": None}
    if leaf.key_impl is not None:
        return {**nothing, "nonfinite": None}
    found = range_of(array)
    nonfinite = found.nans + found.infinities
    if found.low is None:
        return {**nothing, "nonfinite": nonfinite}
    values = np.abs(array) if np.iscomplexobj(array) else array
    values = values.astype(np.float64)
    mean = float(np.mean(values, where=np.isfinite(values)))
    whole = not is_inexact(array.dtype)
    return {
        "min": int(array.min()) if whole else found.low,
        "max": int(array.max()) if whole else found.high,
        "mean": mean,
        "nonfinite": nonfinite,
    }


def _directory(path: str, arguments: argparse.Namespace, not_one: ValueError | None) -> int:
    checkpoints, problems = below(path)
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
        rows.append({"name": one.name, **_about(one), "leaves": len(one.manifest.leaves)})
        if arguments.verify:
            rows[-1]["verified"] = not wrong
    if arguments.json:
        print(as_json({"path": path, "checkpoints": rows, "problems": problems}))
    elif rows:
        heads = ["checkpoint", "saved", "step", "leaves", "size"] + ["every byte"] * arguments.verify
        verdict = {True: "as written", False: "CORRUPTED", None: ""}
        table(heads, [[printable(row["name"]), row["time"], str(row["step"]), str(row["leaves"]), size(row["bytes"])]
                       + [verdict[row.get("verified")]] * arguments.verify for row in rows], left=2)  # fmt: skip
    for problem in problems:
        complain("inspect", problem)
    return TROUBLE if problems else OK


def _about(one: Checkpoint) -> dict[str, Any]:
    return {
        "path": one.path,
        "step": one.step,
        "saved_at": one.manifest.saved_at,
        "time": time_text(one.manifest.saved_at, " ", "seconds").replace("+00:00", " UTC"),
        "jstep": one.manifest.jstep,
        "bytes": sum(leaf.nbytes for leaf in one.manifest.leaves),
    }


COMMAND = Command(_add_arguments, _run)
