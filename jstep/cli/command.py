"""The common parts of commands: interface, exit codes, and output as text, strict JSON and tables."""

import argparse
import json
import math
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from jstep.core.checks import columns

OK = 0
DIFFERENT = 1
"""`diff` found a difference, or `stalls` a process that hangs."""
TROUBLE = 2
"""A missing path, corrupted data, nothing in common, or wrong usage."""


class Command(NamedTuple):
    """A command.

    Attributes:
        add_arguments: Adds its arguments to its parser.
        run: Runs the command and returns the exit code. An error is reported on stderr, with exit code `TROUBLE`.
    """

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def printable(text: Any) -> str:
    """Escape non-printable characters, because the input may come from an untrusted file."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def as_json(value: Any) -> str:
    """Return one line of strict JSON; non-finite numbers become the strings "NaN", "Infinity" and "-Infinity"."""
    return json.dumps(_plain(value), allow_nan=False)


def complain(command: str, what: object) -> None:
    """Print an error to stderr."""
    print(f"jstep {command}: {printable(what)}", file=sys.stderr)


def cell(value: Any) -> str:
    """Format a value for a table."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return printable(value)


def time_text(seconds: float, separator: str, precision: str) -> str:
    """Format a time in UTC, as `datetime.isoformat` does."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(separator, precision)
    except (OverflowError, ValueError, OSError):  # outside the range of datetime
        return f"{seconds:g} s"


def table(heads: Any, rows: list[list[str]], left: int) -> None:
    """Print a table whose first `left` columns are left-aligned and whose others are right-aligned."""
    print("\n".join(columns([heads, *rows], left)))


def _plain(x: Any) -> Any:
    if isinstance(x, float) and not math.isfinite(x):
        return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
    if isinstance(x, dict):
        return {str(key): _plain(y) for key, y in x.items()}
    return [_plain(y) for y in x] if isinstance(x, list | tuple) else x
