"""The command line, `jstep`: its interface, and commands, whose modules are imported when used."""

import argparse
import fnmatch
import io
import json
import logging
import math
import os
import pkgutil
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from jstep.core.checks import format_list
from jstep.core.tables import columns, fold, printable
from jstep.stores.event_files import DataLossError

# What the commands have in common: interface, exit codes, output as text, strict JSON and tables.

OK = 0
DIFFERENT = 1
"""`diff` found a difference, `stalls` a stalled process, or `runs` an unreadable run."""
TROUBLE = 2
"""A missing path, corrupted data, nothing in common, or wrong usage."""
SHOWN = 40
"""How many lines of a long list are shown."""


class Command(NamedTuple):
    """A command; `main` reports errors of `run`; with `has_json`, `answer` prints the results."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    has_json: bool = True


def as_strict_json(value: object) -> str:
    """Return one line of strict JSON.

    Non-finite numbers become the strings "NaN", "Infinity" and "-Infinity".
    """
    # `json.dumps` escapes all other characters that a terminal obeys.
    return json.dumps(_as_plain_json(value), allow_nan=False).replace("\x7f", "\\u007f")


JSON_VERSION = 1
"""The number of the fields of `--json`: raised if one changes its meaning, or is removed."""


def as_json_answer(fields: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
    """Return the line of a `--json`: an object that begins with its version, or a list of them."""
    if isinstance(fields, Mapping):
        return as_strict_json({"version": JSON_VERSION, **fields})
    return as_strict_json([{"version": JSON_VERSION, **item} for item in fields])


def _as_plain_json(x: object) -> Any:
    if isinstance(x, float) and not math.isfinite(x):
        if math.isnan(x):
            return "NaN"
        return "Infinity" if x > 0 else "-Infinity"
    if hasattr(x, "_asdict"):
        # A NamedTuple is an object with its fields, not a list.
        x = x._asdict()
    if isinstance(x, Mapping):
        return {str(key): _as_plain_json(item) for key, item in x.items()}
    if isinstance(x, list | tuple):
        return [_as_plain_json(item) for item in x]
    return x


def answer(
    arguments: argparse.Namespace,
    fields: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    lines: Iterable[str],
    code: int = OK,
) -> int:
    """Print the fields with `--json`, else the lines, folded to the terminal; return the code."""
    if arguments.json:
        print(as_json_answer(fields))
        return code
    width = terminal_width()
    for text in lines:
        for line in text.split("\n"):
            line = printable(line)
            indent = len(line) - len(line.lstrip())
            print("\n".join(fold(line, width, indent + 4)))
    return code


def complain(command: str, *problems: object) -> int:
    for problem in problems:
        print(f"jstep {command}: {printable(problem)}", file=sys.stderr)
    return TROUBLE if problems else OK


def terminal_width() -> int:
    return shutil.get_terminal_size((80, 24)).columns


def table(keys: Mapping[str, str], rows: Iterable[Mapping[str, Any]], left: int) -> list[str]:
    """Return the lines of a table that fits the terminal; `keys` maps heads to the keys of rows."""
    cells = [list(keys)]
    for row in rows:
        cells.append([cell(row.get(key)) for key in keys.values()])
    return columns(cells, left, terminal_width())


def cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else printable(value)


def first_lines(
    lines: Sequence[str], shown: Sequence[str] | None = None, indent: str = "  "
) -> list[str]:
    """Return the first lines of a long list, and how many there are besides.

    Args:
        lines: All lines, of which the first `SHOWN` are shown.
        shown: The same first lines if they are formatted otherwise, such as in columns.
    """
    first = [f"{indent}{line}" for line in shown or lines[:SHOWN]]
    others = len(lines) - SHOWN
    if others > 0:
        first.append(f"{indent}and {others} more (--json lists all)")
    return first


def choose(names: Iterable[str], patterns: Iterable[str], option: str, what: str) -> list[str]:
    """Return the names that some patterns match; a pattern that matches none is a ValueError.

    A pattern that is a name means this name alone, as names may have brackets.
    """
    names = list(names)
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matches = [pattern]
        if pattern not in names:
            matches = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            choices = format_list(names, 30) or "none"
            raise ValueError(
                f"{option} {pattern}: must be {what}, or a pattern that matches some; there are "
                f"{choices}"
            )
        chosen |= dict.fromkeys(matches)
    return list(chosen)


def utc_text(seconds: float, precision: str = "seconds") -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(" ", precision).removesuffix("+00:00")
    except (OverflowError, ValueError, OSError):
        # Outside the range of datetime.
        return f"{seconds:g} s"


def local_text(seconds: float, precision: str = "seconds") -> str:
    local = datetime.fromtimestamp(seconds, datetime.now().astimezone().tzinfo)
    return local.isoformat(" ", precision)[:-6]


def local_zone() -> str:
    offset = f"UTC{datetime.now().astimezone().isoformat()[-6:]}"
    return offset.removesuffix("+00:00")


# The commands.

COMMANDS = {
    "runs": ("show all runs below directories: status, metrics, parents", "look.runs:RUNS"),
    "report": (
        "show runs on one page of HTML: setup, curves, time, warnings",
        "look.report:REPORT",
    ),
    "inspect": ("show a checkpoint, or a directory of checkpoints", "look.checkpoints:INSPECT"),
    "diff": ("find where two runs diverge: checkpoints, directories, logs", "look.diff:DIFF"),
    "events": ("print the scalars of runs and of event files by step", "look.events:EVENTS"),
    "stalls": (
        "show the processes that hang (exit code 1), and why",
        "look.stalled_processes:STALLS",
    ),
    "goodput": (
        "show where the wall time of a run went, over all its starts",
        "look.goodput_command:GOODPUT",
    ),
    "cost": ("estimate the cost of a step: operations and memory", "planning.cost_command:COST"),
}
"""Name → description, in order and wording of `--help`, and where its `Command` is in `jstep`."""

_EPILOG = """\
examples:
  jstep runs runs/
  jstep inspect run/model-1000 --verify
  jstep cost train.py:step_and_shapes --topology v5e:16x16
A path may be a URL (gs://, s3://). `jstep COMMAND --help`: options.
Exit codes: 0 on success; 1 if `diff` found a difference, `stalls` a process
that hangs, or `runs` a run that cannot be read; 2 on an error: a missing path,
a corrupted file, nothing to compare."""


def main(argv: Sequence[str] | None = None) -> int:
    command_line = sys.argv[1:] if argv is None else argv
    by_default = ("strict", "surrogateescape")
    is_text = isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in by_default
    # Only without `argv`: the stdout of a program that calls `main` is not ours.
    if argv is None and is_text:
        # Escape characters that the encoding of stdout lacks, as on stderr, unless PYTHONIOENCODING
        # says otherwise.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    parser = _parser(command_line)
    arguments = parser.parse_args(command_line)
    if arguments.command is None:
        parser.print_help()
        return OK
    if logging.lastResort is not None:
        # It prints warnings of jstep if there is no handler.
        logging.lastResort.setFormatter(_PrintableFormatter())
    try:
        code: int = arguments.run(arguments)
        # Not sys.stdout.flush(), which fails if stdout is closed.
        print(end="", flush=True)
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; nothing must be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (OSError, ValueError, ImportError, RuntimeError, DataLossError) as error:
        return complain(arguments.command, error)
    except Exception:
        # Such as in the program of `cost`. Python would exit with 1, which means a difference.
        print(
            "\n".join(map(printable, traceback.format_exc().rstrip().split("\n"))), file=sys.stderr
        )
        return TROUBLE
    return code


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


def _parser(command_line: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jstep",
        description="Inspect the files of a run, and estimate the cost of a train step.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"jstep {sys.modules['jstep'].__version__}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    # No option before the command takes a value, so the first argument that is not an option is the
    # command.
    chosen = next((word for word in command_line if not word.startswith("-")), None)
    for name, (words, place) in COMMANDS.items():
        subparser = commands.add_parser(
            name, help=words, description=f"{words[0].upper()}{words[1:]}."
        )
        if name == chosen:
            command: Command = pkgutil.resolve_name(f"jstep.{place}")
            command.add_arguments(subparser)
            if command.has_json:
                subparser.add_argument(
                    "--json", action="store_true", help="print one JSON object on one line"
                )
            subparser.set_defaults(run=command.run)
    return parser
