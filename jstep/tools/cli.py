"""The command line, `python -m jstep`: its commands, each in a module that is imported only when it is used."""

import argparse
import io
import os
import pkgutil
import sys
import traceback
from collections.abc import Sequence

from jstep.stores.event_files import DataLossError
from jstep.tools import cli_common as common
from jstep.tools.cli_common import OK, TROUBLE, Command

COMMANDS = {
    "inspect": ("show a checkpoint, a directory of checkpoints, or safetensors", "cli_inspect:INSPECT"),
    "diff": ("find where two runs diverge: checkpoints, directories, logs", "cli_compare:DIFF"),
    "plot": ("plot the scalars of one or several runs to a file", "cli_events:PLOT"),
    "events": ("print the events of a file, one per line", "cli_events:EVENTS"),
    "cost": ("estimate the cost of a step: operations, memory, transfers", "cli_cost:COST"),
    "goodput": ("account for the wall time of a run, over all its starts", "goodput:GOODPUT"),
    "stalls": ("show the processes that hang (exit code 1) and their waits", "cli_events:STALLS"),
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
            command: Command = pkgutil.resolve_name(f"jstep.tools.{place}")
            command.add_arguments(own)
            if command.has_json:
                own.add_argument("--json", action="store_true", help="print one JSON object on one line")
            own.set_defaults(run=command.run)
    return parser
