"""`goodput`: the breakdown of the wall time of a run."""

import argparse
import dataclasses

from jstep.cli.command import OK, Command, as_json
from jstep.hooks.timeline import goodput


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="the checkpoint_dir of a run, or its logdir if it has none")
    parser.add_argument("--prefix", default="model", help="the prefix of the run's checkpoints (default: model)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")


def _run(arguments: argparse.Namespace) -> int:
    found = goodput(arguments.path, arguments.prefix)
    fields = {**dataclasses.asdict(found), "total": found.total, "fraction": found.fraction}
    fields = {name: value for name, value in fields.items() if value != {}}
    print(as_json(fields) if arguments.json else found)
    return OK


COMMAND = Command(_add_arguments, _run)
