"""The command line, `python -m jstep`: its commands, with those for costs, weights and checkpoints."""

import argparse
import importlib.util
import io
import math
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from jstep.checkpoint.manifest import NAME as MANIFEST
from jstep.checkpoint.manifest import CheckpointError
from jstep.core.checks import cut_path, is_inexact, kind, range_of, size
from jstep.stores.files import is_directory
from jstep.stores.objects import is_url, location
from jstep.summary.read import DataLossError
from jstep.tools import cli_common as common
from jstep.tools.cli_common import OK, TROUBLE, Checkpoint, Command
from jstep.weights.files import INDEX, SUFFIX, folder_of, kind_of, read_headers

# `cost`: an estimate of the cost of a training step, without running it.


def _add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "program",
        metavar="PROGRAM:FUNCTION",
        help="a file (train.py:step_and_shapes) or a module (my.train:step_and_shapes); the function takes no "
        "arguments and returns (train_step, state, *batch) as arrays or shapes",
    )
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help="the devices to compile for, such as v5e:16x16, v5e:4x4*2 or h100:4x8: data parallel over all of them. "
        "For another layout, let the function place state and batch on a mesh of jstep.topology",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")


def _run_cost(arguments: argparse.Namespace) -> int:
    place, separator, function = arguments.program.rpartition(":")
    if not (place and separator and function):
        raise ValueError(f"{arguments.program!r}: expected PROGRAM:FUNCTION, such as train.py:step_and_shapes")
    if place.endswith(".py") and not os.path.isfile(place):
        raise FileNotFoundError(f"no file {place}")
    # These import JAX, which --help and the errors above do not need.
    from jstep.core.devices import parsed
    from jstep.core.meshes import mesh_of
    from jstep.core.placement import compiles_only
    from jstep.tools.cost import cost
    from jstep.tools.topologies import name_of, prepare, require_compiler

    topology = None if arguments.topology is None else parsed(arguments.topology, "--topology")
    if topology is not None:
        require_compiler(topology)
        prepare()  # before the program uses JAX, which would otherwise warn on stderr that the compilers lack devices
    step, state, *batch = _returned(place, function)
    mesh = mesh_of((state, batch))
    is_there = mesh is not None and compiles_only(mesh) and name_of(mesh.devices.flat[0]) == topology
    found = cost(step, state, *batch, topology=None if topology is None or is_there else str(topology))
    fields = dict(vars(found))
    if found.collectives is not None:
        fields["collectives"] = {name: one._asdict() for name, one in found.collectives.items()}
    if arguments.json:
        print(common.as_json(fields))
    else:
        common.show(str(found))
    return OK  # even if the step does not fit into memory


def _returned(place: str, name: str) -> Any:
    program = f"{place}:{name}"
    function = getattr(_loaded(place), name, None)
    if not callable(function):
        raise ValueError(f"{program!r}: {place} has no function {name!r}")
    result = function()
    if not isinstance(result, tuple | list) or len(result) < 2:
        raise ValueError(f"{program!r}: must return (train_step, state, *batch), returned {kind(result)}")
    return result


def _loaded(place: str) -> ModuleType:
    """Import the module of a file or of a name, with the import path of `python FILE` or `python -m NAME`."""
    if not os.path.isfile(place):
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
    name = os.path.splitext(os.path.basename(place))[0]
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ValueError(f"{place} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # needed by dataclasses and pickles, which look up their module
    spec.loader.exec_module(module)
    return module


COST = Command(_add_cost_arguments, _run_cost)


# `inspect` of safetensors files and of Orbax checkpoints, without reading any tensor.


def are_at(path: str) -> bool:
    """Return whether a path has weights: a file, or a folder with weights that is not and has no checkpoints."""
    if is_url(path) or not os.path.isdir(path):
        return not is_url(path) and (os.path.isfile(path) or os.path.isfile(path + INDEX))
    if not any(name.endswith((SUFFIX, SUFFIX + INDEX)) for name in os.listdir(path)):
        return False
    try:
        return common.at(path) is None and not common.below(path)[0]
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
    files = [{"path": one.file, "tensors": len(one.tensors)} for one in weights.files]
    several = len(files) > 1
    columns = ["dtype", "stored_as", "shape", "bytes"] + ["file"] * several
    where = f"in {len(files)} file{'s' * several}"
    about = {"format": "safetensors", **_sums(rows), "metadata": dict(weights.metadata), "files": files}
    return _print_tensors({"path": weights.path, **about}, rows, where, columns, json=arguments.json)


def show_orbax(folder: str, arguments: argparse.Namespace) -> int:
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
    return _print_tensors(about, rows, "in a checkpoint of Orbax", ["dtype", "shape", "bytes"], json=arguments.json)


def _sums(rows: list[dict[str, Any]]) -> dict[str, int]:
    return {"bytes": sum(row["bytes"] for row in rows), "parameters": sum(math.prod(row["shape"]) for row in rows)}


def _print_tensors(
    about: dict[str, Any], rows: list[dict[str, Any]], where: str, columns: list[str], *, json: bool
) -> int:
    rows = sorted(rows, key=lambda row: row["name"])
    if json:
        print(common.as_json({**about, "tensors": rows}))
        return OK
    print(cut_path(common.printable(about["path"]), common.terminal_width()))
    number = f"{len(rows)} tensor{'s' * (len(rows) != 1)}"
    common.show(f"{number}, {about['parameters']} parameters, {size(about['bytes'])}, {where}")
    if about["metadata"]:
        common.show(f"metadata {common.printable(common.as_json(about['metadata']))}")
    print()
    keys = {"tensor": "name"} | {column.replace("_", " "): column for column in columns}
    common.table(keys, rows, left=list(keys).index("bytes"))
    return OK


# `inspect`: the contents of a checkpoint or of safetensors files, or the checkpoints in a directory.

OWN_EXTRA = frozenset({"batches", "batches_of_processes", "ended", "held", "hooks", "past", "stopped"})
"""The keys that `train` itself keeps in `extra`. The modules that define them import JAX, which is not needed here."""


def _add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint (run/model-1000), a directory of checkpoints, or safetensors")
    parser.add_argument("--verify", action="store_true", help="compare every byte with the checksums")
    parser.add_argument("--all", action="store_true", help="also show what jstep itself keeps in `extra`")
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")


def _run_inspect(arguments: argparse.Namespace) -> int:
    path = location(arguments.path, "path")
    if are_at(path):
        return show(path, arguments)
    folder, problem = None, None
    if not is_url(path) and os.path.isdir(path) and not os.path.lexists(os.path.join(path, MANIFEST)):
        try:
            folder = folder_of(path)
        except ValueError as error:  # this may be a directory of checkpoints of jstep
            problem = error
    if folder is not None:
        return show_orbax(folder, arguments)
    one = common.at(path)
    if one is not None:
        return _checkpoint(one, arguments)
    if not is_directory(path):
        raise FileNotFoundError(f"no checkpoint, directory of checkpoints or safetensors file: {path}")
    return _directory(path, arguments, problem)


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
    if arguments.json:
        verified = {"verified": True} if arguments.verify else {}
        left_out = {"left_out": absent} if absent else {}
        print(common.as_json({**about, "extra": one.manifest.extra, "leaves": rows, **left_out, **verified}))
        return OK
    print(cut_path(common.printable(one.path), common.terminal_width()))
    common.show(
        f"step {one.step}, saved {about['time']}, by jstep {common.printable(one.manifest.jstep)}, "
        f"{len(rows)} leaves, "
        f"{size(about['bytes'])}{', every byte as it was written' if arguments.verify else ''}"
    )
    _show_extra(one.manifest.extra, with_own=arguments.all)
    print()
    kinds = {"leaf": "path", "dtype": "dtype", "shape": "shape"}
    figures = {"bytes": "bytes", "min": "min", "max": "max", "mean": "mean", "non-finite": "nonfinite"}
    common.table(kinds | figures, rows, left=3)
    if absent:
        print("\nleft out by Saver(leave_out=…); restore takes them from the target\n")
        common.table(kinds | {"fingerprint": "fingerprint"}, absent, left=4)
    return OK


def _show_extra(extra: Any, *, with_own: bool) -> None:
    own = [] if with_own or not isinstance(extra, dict) else [key for key in extra if key in OWN_EXTRA]
    shown = {key: value for key, value in extra.items() if key not in own} if own else extra
    if shown or (shown is not None and not own):
        common.show(f"extra {common.printable(common.as_json(shown))}")
    if own:
        common.show(f"{len(own)} {'entry' if len(own) == 1 else 'entries'} of jstep in extra (--all shows them)")


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
        rows.append({"name": one.name, **_about(one), "leaves": len(one.manifest.leaves)})
        if arguments.verify:
            rows[-1]["verified"] = not wrong
    if arguments.json:
        print(common.as_json({"path": path, "checkpoints": rows, "problems": problems}))
    elif rows:
        keys = {"checkpoint": "name", "saved": "time", "step": "step", "leaves": "leaves", "size": "bytes"}
        if arguments.verify:
            keys["every byte"] = "verified"
        if not all(row["finite"] for row in rows):
            keys["parameters"] = "finite"
        if any(row["passing"] for row in rows):
            keys["kept"] = "passing"
        verdict = {True: "as written", False: "CORRUPTED", None: ""}
        shown = [
            {
                **row,
                "bytes": size(row["bytes"]),
                "verified": verdict[row.get("verified")],
                "finite": "finite" if row["finite"] else "NOT FINITE",
                "passing": "until the next" if row["passing"] else "",
            }
            for row in rows
        ]
        common.table(keys, shown, left=2)
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


INSPECT = Command(_add_inspect_arguments, _run_inspect)


# The command line `python -m jstep`; each command is a module, imported only when it is used.

COMMANDS = {
    "inspect": ("show a checkpoint, a directory of checkpoints, or safetensors", "cli.INSPECT"),
    "diff": ("find where two runs diverge: checkpoints, directories, logs", "cli_compare.DIFF"),
    "plot": ("plot the scalars of one or several runs to a file", "cli_events.PLOT"),
    "events": ("print the events of a file, one per line", "cli_events.EVENTS"),
    "cost": ("estimate the cost of a step: operations, memory, transfers", "cli.COST"),
    "goodput": ("account for the wall time of a run, over all its starts", "goodput.GOODPUT"),
    "stalls": ("show the processes that hang (exit code 1) and their waits", "cli_events.STALLS"),
}
"""Name → description, in the order and wording of `--help`, and where in `jstep.tools` the `Command` is."""

_EPILOG = """\
examples:
  python -m jstep inspect run/model-1000 --verify
  python -m jstep cost train.py:step_and_shapes --topology v5e:16x16
A path may be a URL (gs://, s3://). `python -m jstep COMMAND --help`: options.
Exit codes: 0 on success; 1 if `diff` found a difference or `stalls` a process
that hangs; 2 on an error: a missing path, a corrupted file, nothing to compare."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments; None for those of the process.

    Returns:
        The exit code: 0, also without a command, which shows the commands; 1 if `diff` found a difference or `stalls` a
        process that hangs; 2 after an error, which is reported on stderr.
    """
    given = sys.argv[1:] if argv is None else argv
    is_text = isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape")
    if argv is None and is_text:  # the stdout of the process is ours
        # Escape characters that the encoding of stdout lacks, as on stderr, unless PYTHONIOENCODING says otherwise.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    parser = _parser(given)
    arguments = parser.parse_args(given)
    if arguments.command is None:
        parser.print_help()
        return OK
    try:
        code: int = arguments.run(arguments)
        print(end="", flush=True)  # unlike sys.stdout.flush(), it works if stdout is closed
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; nothing must be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (OSError, ValueError, ImportError, RuntimeError, DataLossError) as error:
        return common.complain(arguments.command, error)
    except Exception:  # such as in the program of `cost`; Python's exit code would be that of a difference
        traceback.print_exc()
        return TROUBLE
    return code


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jstep",
        description="Inspect the files of a run, and estimate the cost of a training step.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jstep {sys.modules['jstep'].__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    # No option before the command takes a value, so the first argument that is not an option is the command.
    chosen = next((word for word in given if not word.startswith("-")), None)
    for name, (words, place) in COMMANDS.items():
        own = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        if name == chosen:
            module, _, command_name = place.partition(".")
            command: Command = getattr(importlib.import_module(f"jstep.tools.{module}"), command_name)
            command.add_arguments(own)
            own.set_defaults(run=command.run)
    return parser
