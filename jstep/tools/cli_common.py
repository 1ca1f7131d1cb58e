"""Common parts of the commands: interface, exit codes, output, and the checkpoints that they are given."""

import argparse
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from jstep.checkpoint.listing import has_data, misnamed, missing
from jstep.checkpoint.manifest import NAME as MANIFEST
from jstep.checkpoint.manifest import CheckpointError, Leaf, LeftOut, Manifest
from jstep.checkpoint.names import open_store
from jstep.checkpoint.store import Store
from jstep.core.report import breadth, columns, folded
from jstep.stores.files import is_directory, names_in
from jstep.stores.urls import absolute, is_url, split
from jstep.weights.tensors import in_groups

# The common parts of commands: interface, exit codes, and output as text, strict JSON and tables.

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
        has_json: Whether it has the option `--json`, to be obeyed by `answer`.
    """

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    has_json: bool = True


def printable(text: Any) -> str:
    """Escape non-printable characters, because the input may come from an untrusted file."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def as_json(value: Any) -> str:
    """Return one line of strict JSON; non-finite numbers become the strings "NaN", "Infinity" and "-Infinity"."""
    return json.dumps(_plain(value), allow_nan=False)


def complain(command: str, *problems: object) -> int:
    """Print the problems to stderr, if any, and return the exit code."""
    for problem in problems:
        print(f"jstep {command}: {printable(problem)}", file=sys.stderr)
    return TROUBLE if problems else OK


def cell(value: Any, digits: int = 6) -> str:
    """Format a value for a table, a float with so many digits."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return printable(value)


def time_text(seconds: float, separator: str, precision: str) -> str:
    """Format a time in UTC, as `datetime.isoformat` does."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(separator, precision)
    except (OverflowError, ValueError, OSError):  # outside the range of datetime
        return f"{seconds:g} s"


def terminal_width() -> int:
    """Return the width of the terminal, or $COLUMNS; 80 without a terminal."""
    return shutil.get_terminal_size((80, 24)).columns


def table(keys: Mapping[str, str], rows: Iterable[Mapping[str, Any]], left: int) -> list[str]:
    """Return the lines of a table that fits the terminal.

    Args:
        keys: The head of each column → the key of its values.
        rows: The rows; a missing value is a dash.
        left: The number of columns that are left-aligned; the others are right-aligned.
    """
    most, rows = terminal_width(), list(rows)
    tables = [[list(keys), *([cell(row.get(key), n) for key in keys.values()] for row in rows)] for n in (6, 4, 3)]
    # The first column may have lines of its own, above the others.
    cells = next((one for one in tables if breadth([row[1:] for row in one]) + 2 <= most), tables[0])
    return columns(cells, left, most)


def answer(arguments: argparse.Namespace, fields: Mapping[str, Any], lines: Iterable[str], code: int = OK) -> int:
    """Print what a command found, with `--json` its fields, else lines; return the exit code."""
    if arguments.json:
        print(as_json(fields))
    else:
        show(lines)
    return code


def show(lines: Iterable[str]) -> None:
    """Print lines, each of which continues with an indent where the terminal ends."""
    most = terminal_width()
    for line in (line for text in lines for line in text.split("\n")):
        print("\n".join(folded(line, most, len(line) - len(line.lstrip()) + 4)))


def _plain(x: Any) -> Any:
    if isinstance(x, float) and not math.isfinite(x):
        return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
    x = x._asdict() if hasattr(x, "_asdict") else x
    if isinstance(x, Mapping):
        return {str(key): _plain(y) for key, y in x.items()}
    return [_plain(y) for y in x] if isinstance(x, list | tuple) else x


# Finding and reading checkpoints for the command line, leaf by leaf.

_NAME = re.compile(r"(.+)-(0|[1-9][0-9]*)", re.DOTALL)
_AT_ONCE = 2**28
"""The number of bytes of leaves to read together."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint.

    Attributes:
        path: The path of the checkpoint.
        prefix: The prefix of its name; the whole name if that has no step.
        step: The step of its name; that of its content if the name has none.
        manifest: Its manifest.
        store: The store that reads it.
    """

    path: str
    prefix: str
    step: int
    manifest: Manifest
    store: Store

    @functools.cached_property
    def named(self) -> dict[str, Leaf]:
        """Name → leaf, in order: the name is its path, followed by a number if several leaves share the path."""
        from jstep.checkpoint.leaf_records import unique

        return dict(zip(unique(leaf.path for leaf in self.manifest.leaves), self.manifest.leaves, strict=True))

    @property
    def left_out(self) -> dict[str, LeftOut]:
        """The records of the leaves that were left out, by path."""
        return {leaf.path: leaf for leaf in self.manifest.left_out}

    def leaves(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Leaf, np.ndarray[Any, Any]]]:
        """Iterate over leaves with their names and values; PRNG keys are returned as their data.

        Args:
            names: The names of those to read, in this order; by default all.

        Raises:
            CheckpointError: The checkpoint cannot be read.
        """
        chosen = ((name, self.named[name]) for name in (self.named if names is None else names))
        for group in in_groups(((name, leaf.nbytes, leaf) for name, leaf in chosen), _AT_ONCE):
            yield from self._read(group)

    def _read(self, leaves: dict[str, Leaf]) -> Iterator[tuple[str, Leaf, np.ndarray[Any, Any]]]:
        # Imported here so that a directory is listed without JAX.
        from jstep.checkpoint.leaf_records import value_of

        wanted: dict[str, Any] = {leaf.array: None for leaf in leaves.values() if leaf.array is not None}
        try:
            arrays = self.store.restore(self.path, self.manifest, wanted) if wanted else {}
        except (CheckpointError, OSError):
            raise
        except Exception as error:
            raise CheckpointError(f"{self.path} could not be read: {type(error).__name__}: {error}"[:500]) from error
        for name, leaf in leaves.items():
            yield name, leaf, np.asarray(value_of(leaf, None, arrays))

    def problems(self, *, every: bool = False) -> list[str]:
        """Return descriptions of the problems of its files; with `every`, also of those that nothing reads."""
        return self.store.find_corruption(self.path, self.manifest, every=every)


def at(path: str) -> Checkpoint | None:
    """Return the checkpoint at a path, or None.

    Raises:
        CheckpointError: The checkpoint is corrupted.
    """
    path = absolute(path)
    above, last = split(path.rstrip("/"))
    match = _NAME.fullmatch(last)
    if match is None:
        return None if is_url(path) else _renamed(path)
    store, step = open_store(above), int(match[2])
    found = store.at(match[1], step)
    if found is None:
        problem = dict(store.broken(match[1], step - 1)).get(path)
        if problem is not None:
            raise CheckpointError(f"{path}: {problem}: the checkpoint is corrupted")
        return None
    try:
        manifest = store.manifest(found)
    except FileNotFoundError:  # evicted meanwhile
        return None
    if manifest.step != step:
        raise CheckpointError(f"{path}: {misnamed(match[1], step, manifest.step)}")
    return Checkpoint(found, match[1], step, manifest, store)


def _renamed(path: str) -> Checkpoint | None:
    """Return the checkpoint in a folder whose name has no step, such as a copy called "pretrained"; or None."""
    if not os.path.lexists(os.path.join(path, MANIFEST)) or not has_data(path):
        return None
    above, last = split(path)
    store = open_store(above)
    manifest = store.manifest(path)
    if lacks := missing(path):
        raise CheckpointError(f"{path}: {lacks} is missing: the checkpoint is corrupted")
    return Checkpoint(path, last, manifest.step, manifest, store)


def below(directory: str) -> tuple[list[Checkpoint], list[str]]:
    """Return the checkpoints in a directory, by prefix and step, and descriptions of the problems of others."""
    directory = absolute(directory)
    store = open_store(directory)
    paths: list[str] = []
    problems: list[str] = []
    names = [split(path)[1] for _, path in store.newest_first(None)]
    if not is_url(directory) and is_directory(directory):
        names += names_in(directory)
    for prefix in sorted({match[1] for name in names if (match := _NAME.fullmatch(name))}):
        paths += [path for _, path in store.newest_first(prefix)]
        problems += [f"{path}: {problem}" for path, problem in store.broken(prefix, -1)]
    checkpoints = []
    for path in paths:
        try:
            checkpoints.append(at(path))
        except (CheckpointError, OSError) as error:
            problems.append(str(error))
    return sorted(filter(None, checkpoints), key=lambda one: (one.prefix, one.step)), problems
