"""`stalls`: the processes of a run that hang, and what each of them waits for."""

import argparse
import time

from jstep.cli.command import DIFFERENT, OK, Command, as_json, complain, printable, table
from jstep.hooks.stall_files import read_stalls, silent, waited_for
from jstep.stores.files import is_directory
from jstep.stores.objects import absolute, location


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", help="the checkpoint_dir of a run, or its logdir if it has none")
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line")


def _run(arguments: argparse.Namespace) -> int:
    where, now = absolute(location(arguments.path, "path")), time.time()
    if not is_directory(where):
        raise FileNotFoundError(f"{where}: no such directory")
    found, problems = read_stalls(where)
    for problem in problems:
        complain("stalls", problem)
    hangs = any(one["stall"] for one in found)
    found = found if hangs else []
    missing = silent(found, max((one["processes"] for one in found), default=0))
    odd = waited_for(found) if len(found) + len(missing) > 1 else []
    if arguments.json:
        print(as_json({"stalls": found, "silent": missing}))
    elif hangs:
        names = ["process", "host", "pid", "for", "what", "line"]
        shown = [{**one, "for": f"{now - one['since']:.0f} s", "": "*" if one in odd else ""} for one in found]
        shown += [{"process": process, "what": "nothing is heard of it", "": "*"} for process in missing]
        table(["", *names], [[printable(one.get(name, "–")) for name in ["", *names]] for one in shown], left=7)
    else:
        print("no process hangs")
    return DIFFERENT if hangs else OK


COMMAND = Command(_add_arguments, _run)
