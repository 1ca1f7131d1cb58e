"""The command line `python -m jstep`; each command is a module, imported only when it is used."""

import argparse
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from jstep.cli.command import OK, TROUBLE, Command, complain
from jstep.summary.read import DataLossError

COMMANDS = {
    "inspect": "show a checkpoint, a directory of checkpoints, or safetensors",
    "diff": "find where two runs diverge: checkpoints, directories, logs",
    "plot": "plot the scalars of one or several runs to a file",
    "events": "print the events of a file, one per line",
    "cost": "estimate the cost of a step: operations, memory, transfers",
    "goodput": "account for the wall time of a run, over all its starts",
    "stalls": "show the processes that hang (exit code 1) and their waits",
}
"""Name → description, in the order and wording of `--help`. To add a command, add a module of its name to this package
and a line here."""

_EPILOG = """\
examples:
  python -m jstep inspect run/model-1000 --verify
  python -m jstep plot runs -o loss.png --tags 'loss*'
  python -m jstep cost train.py:step_and_shapes --topology v5e:16x16
A path may also be a URL (gs://, s3://). `python -m jstep COMMAND --help` lists the options.
Exit codes: 0 on success; 1 if `diff` found a difference; 2 on an error: a missing path, a corrupted file, or \
nothing to compare."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments; None for those of the process.

    Returns:
        The exit code: 0, 1 if `diff` found a difference or `stalls` a process that hangs, or 2 after an error, which
        is reported on stderr.
    """
    given = sys.argv[1:] if argv is None else argv
    if argv is None:  # the stdout of the process is ours
        _escape_what_the_locale_lacks()
    arguments = _parser(given).parse_args(given)
    try:
        code: int = arguments.run(arguments)
        print(end="", flush=True)  # unlike sys.stdout.flush(), it works if stdout is closed
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; nothing must be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (OSError, ValueError, ImportError, RuntimeError, DataLossError) as error:
        complain(arguments.command, error)
        return TROUBLE
    except Exception:  # such as in the program of `cost`; Python's exit code would be that of a difference
        traceback.print_exc()
        return TROUBLE
    return code


def _escape_what_the_locale_lacks() -> None:
    """Escape characters that the encoding of stdout lacks, as on stderr, unless PYTHONIOENCODING says otherwise."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jstep",
        description="Inspect the files of a run, and estimate the cost of a training step.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jstep {sys.modules['jstep'].__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    # No option before the command takes a value, so the first argument that is not an option is the command.
    chosen = next((word for word in given if not word.startswith("-")), None)
    for name, words in COMMANDS.items():
        own = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        if name == chosen:
            command: Command = importlib.import_module(f"jstep.cli.{name}").COMMAND
            command.add_arguments(own)
            own.set_defaults(run=command.run)
    return parser
