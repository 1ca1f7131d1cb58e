"""`goodput` of the command line: of runs, or of all runs below directories."""

import argparse

from jstep.look.cli import Command, answer, complain
from jstep.look.goodput import Goodput, goodput, sum_of_all
from jstep.look.runs import run_names, runs
from jstep.record.starts import read_starts
from jstep.stores.urls import absolute, location


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = (
        "the checkpoint_dir of a run, or its logdir if it has none, or a directory with runs below "
        "it (a line of JSON for each run, and for a directory of runs one with their total)"
    )
    parser.add_argument("paths", metavar="PATH", nargs="+", help=what)
    parser.add_argument(
        "--prefix", help="the prefix of the run's checkpoints (default: model; of runs below: any)"
    )


def _print_goodput(arguments: argparse.Namespace) -> int:
    return max(_print_path(path, arguments) for path in arguments.paths)


def _print_path(path: str, arguments: argparse.Namespace) -> int:
    where = absolute(location(path, "path"))
    below = [] if read_starts(where) else runs(where, prefix=arguments.prefix)
    if not below:
        name = path if len(arguments.paths) > 1 else ""
        return _print_one(name, goodput(path, arguments.prefix or "model"), arguments)
    found: list[Goodput] = []
    problems: list[str] = []
    for name, run in zip(run_names(below), below, strict=True):
        if run.error is not None:
            problems.append(f"{name}: {run.error}")
            continue
        result = goodput(run.path, run.prefix)
        found.append(result)
        _print_one(name, result, arguments, path=run.path, prefix=run.prefix)
    _print_one(
        f"all runs ({len(found)})", sum_of_all(found), arguments, path=where, runs=len(found)
    )
    return complain("goodput", *problems)


def _print_one(name: str, result: Goodput, arguments: argparse.Namespace, **about: object) -> int:
    values = {**about, **vars(result), "total": result.total, "fraction": result.fraction}
    # Without empty lists and dicts, but with the numbers that are 0.
    fields = {name: value for name, value in values.items() if value or value == 0}
    return answer(arguments, fields, [f"{name}:", str(result)] if name else [str(result)])


GOODPUT = Command(_add_arguments, _print_goodput)
