"""`python -m jstep`: one command a module, which is imported when the command is given."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from jstep.cli.command import OK, TROUBLE, Command
from jstep.cli.output import complain
from jstep.summary import DataLossError

COMMANDS = {
    "inspect": "show what a checkpoint, a directory of them, or safetensors hold",
    "diff": "find where two runs part: checkpoints, directories of them, logs",
    "plot": "draw the scalars of one or several runs to a file",
    "events": "print the events of a file, one a line",
    "cost": "say what a training step takes: operations, memory, transfers",
    "goodput": "account for the wall time of a run, over all its starts",
}
"""Name → what it does, in the order and the words of `--help`. A new command is a module beside this one, of that name,
and a line here."""

_EPILOG = """\
examples:
  python -m jstep inspect run/model-1000 --verify
  python -m jstep diff run-on-one-host run-on-two
  python -m jstep plot runs -o loss.png --tags 'loss*'
  python -m jstep cost train.py:step_and_shapes --topology v5e:16x16
A URL (gs://, s3://) will do wherever a path is taken. `python -m jstep COMMAND --help` lists a command's options.
Exit codes: 0; 1 where diff found a difference; 2 for trouble: a missing path, damage, nothing in common."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: The arguments; those of the process where None.

    Returns:
        The exit code: 0, 1 where `diff` found a difference, or 2 after an error, which is told on stderr.
    """
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser(given).parse_args(given)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, `head` for instance, has seen enough; nothing is to be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (OSError, ValueError, ImportError, RuntimeError, DataLossError) as error:
        complain(arguments.command, error)
        return TROUBLE
    return code


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jstep",
        description="Looks at what a run has written, and at what a step will take.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jstep {sys.modules['jstep'].__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    # No option before the command takes a value, so that the first word that is not an option is the command.
    chosen = next((word for word in given if not word.startswith("-")), None)
    for name, words in COMMANDS.items():
        own = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        if name == chosen:
            command: Command = importlib.import_module(f"jstep.cli.{name}").COMMAND
            command.add_arguments(own)
            own.set_defaults(run=command.run)
    return parser
