"""Logs of fingerprints, one JSON object per line: `{"step": N, "state": hex, "leaves": {path: hex}}`."""

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jstep.core import trees
from jstep.core.checks import listed, shown
from jstep.state.fingerprints import ByDevice, U, as_text, words_of
from jstep.stores.files import opened

NAME = "fingerprints.jsonl"
_HEX = re.compile("[0-9a-f]{16}")


class Entry(NamedTuple):
    """An entry (line) of a log.

    Attributes:
        step: The global step.
        state: The fingerprint of the state as a string.
        leaves: Path → fingerprint of the leaf; None if they were not recorded.
    """

    step: int
    state: str
    leaves: Mapping[str, str] | None = None

    def line(self) -> str:
        """Format the entry as a line of the file."""
        leaves = {} if self.leaves is None else {"leaves": dict(self.leaves)}
        return json.dumps({"step": self.step, "state": self.state, **leaves}, allow_nan=False) + "\n"


class Log(NamedTuple):
    """The contents of a log.

    Attributes:
        entries: Step → its last entry.
        corrupted: A description of the problem for each invalid line.
    """

    entries: Mapping[int, Entry]
    corrupted: tuple[str, ...]


def read(path: str) -> Log:
    """Read a log from a file or an object store; the last line of a step takes precedence.

    Raises:
        OSError: The log cannot be read.
    """
    with opened(path) as file:
        return parsed(file.read())


def parsed(data: bytes) -> Log:
    """Parse the bytes of a log."""
    entries, corrupted = {}, []
    for number, raw in enumerate(data.splitlines(keepends=True), 1):
        entry = _entry(raw)
        if entry is not None:
            entries[entry.step] = entry
        elif raw.strip() and raw.endswith((b"\n", b"\r")):  # the last line may be an interrupted write
            corrupted.append(f"line {number} is not a fingerprint: {shown(raw.decode(errors='replace').strip(), 60)}")
    return Log(entries, tuple(corrupted))


def _entry(raw: bytes) -> Entry | None:
    try:
        found = json.loads(raw)
        step, state, leaves = found["step"], found["state"], found.get("leaves")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    texts = [state, *(leaves.values() if isinstance(leaves, dict) else [])]
    if type(step) is not int or step < 0 or not isinstance(leaves, dict | None):
        return None
    if not all(isinstance(text, str) and _HEX.fullmatch(text) for text in texts):
        return None
    return Entry(step, state, leaves)


def entry_of(step: int, found: ByDevice, per_leaf: bool) -> Entry:
    """Create the entry of a step. Blocks.

    Args:
        step: The step.
        found: The fingerprints of the leaves.
        per_leaf: Whether to record them.
    """
    words = words_of(found.parts)
    leaves = dict(zip(found.paths, map(as_text, words), strict=True)) if per_leaf else None
    return Entry(step, as_text(np.sum(words, axis=0, dtype=U)), leaves)


class Difference(NamedTuple):
    """Difference between two fingerprints of one step.

    Attributes:
        step: The step.
        leaves: The paths whose fingerprints differ, or that only one of the two has; None if leaves were not recorded.
        first_only: The paths that only the first has.
        second_only: The paths that only the second has.
    """

    step: int
    leaves: tuple[str, ...] | None
    first_only: tuple[str, ...] = ()
    second_only: tuple[str, ...] = ()

    def text(self) -> str:
        """Describe which leaves differ."""
        if self.leaves is None:
            return "which leaves differ is not known (a log without leaves)"
        other = len(self.first_only) + len(self.second_only)
        model = f"; {other} of them in only one of the two: fingerprints of another model" if other else ""
        differ = "leaf differs" if len(self.leaves) == 1 else "leaves differ"
        return f"{len(self.leaves)} {differ}: {listed(self.leaves, 8)}{model}"


def difference(first: Entry, second: Entry) -> Difference | None:
    """Compare two entries of one step; None if they are equal."""
    if first.state == second.state:
        return None
    if first.leaves is None or second.leaves is None:
        return Difference(first.step, None)
    a, b = first.leaves, second.leaves
    leaves = tuple(path for path in dict.fromkeys([*a, *b]) if a.get(path) != b.get(path))
    return Difference(first.step, leaves, tuple(trees.only_in(a, b)), tuple(trees.only_in(b, a)))
