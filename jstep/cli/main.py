"""`python -m jstep`: one command a module."""

import argparse
import os
import sys
from collections.abc import Sequence

from jstep.cli import cost, diff, events, goodput, inspect, plot
from jstep.cli.command import OK, TROUBLE, Command
from jstep.cli.output import complain
from jstep.summary import DataLossError

COMMANDS: tuple[Command, ...] = (
    inspect.COMMAND,
    diff.COMMAND,
    plot.COMMAND,
    events.COMMAND,
    cost.COMMAND,
    goodput.COMMAND,
)
"""In the order of `--help`. A new command is a module beside this one, and a line here."""

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
    arguments = _parser().parse_args(argv)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jstep",
        description="Looks at what a run has written, and at what a step will take.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for command in COMMANDS:
        own = commands.add_parser(
            command.name, help=command.help, description=f"{command.help[0].upper()}{command.help[1:]}."
        )
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    return parser
