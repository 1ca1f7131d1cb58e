"""`python -m jstep`: plots and event files at the command line."""

import argparse
import os
import sys
from collections.abc import Sequence

from jstep.cli.events import print_events
from jstep.cli.plot import plot_scalars
from jstep.summary import DataLossError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: The arguments; those of the process where None.

    Returns:
        The exit code: 0, or 1 after an error, which is told on stderr.
    """
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "plot":
            tags = plot_scalars(
                arguments.logdir,
                arguments.output,
                tags=arguments.tags or ("*",),
                x_axis=arguments.x,
                smoothing=arguments.smoothing,
                log_y=arguments.log_y,
            )
            print(f"{arguments.output}: {', '.join(tags)}")
        else:
            print_events(arguments.file, as_json=arguments.format == "json", tags=arguments.tags or ("*",))
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader, `head` for instance, has seen enough; nothing is to be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, ImportError, DataLossError) as error:
        print(f"jstep {arguments.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jstep", description="Looks at what a run has written.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{plot,events}")

    plot = commands.add_parser("plot", help="draw the scalars of one or several runs to a file")
    plot.add_argument("logdir", nargs="+", help="a directory; every one below it with event files is a run")
    plot.add_argument("-o", "--output", required=True, help="the picture: loss.png, loss.svg or loss.pdf")
    plot.add_argument("-t", "--tags", action="append", metavar="GLOB", help="tags to draw (repeatable)")
    plot.add_argument("-x", choices=("step", "time"), default="step", help="the horizontal axis")
    plot.add_argument("-s", "--smoothing", type=float, default=0.0, metavar="DECAY", help="0 (none) to below 1")
    plot.add_argument("--log-y", action="store_true", help="logarithmic vertical axes")

    events = commands.add_parser("events", help="print the events of a file, one a line")
    events.add_argument("file", help="an event file, or the directory of a run")
    events.add_argument("-f", "--format", choices=("text", "json"), default="text")
    events.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")
    events.add_argument("-t", "--tags", action="append", metavar="GLOB", help="tags to print (repeatable)")
    return parser
