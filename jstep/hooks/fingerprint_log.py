"""Logs of fingerprints, one JSON object per line: `{"step": N, "state": hex, "leaves": {path: hex}}`."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jstep.core import trees
from jstep.core.checks import format_list, format_value
from jstep.state.fingerprints import Fingerprints, all_as_hexadecimal, as_hexadecimal, stacked_words
from jstep.stores.line_logs import TAIL, read_log_files, read_tail

FINGERPRINTS_FILE = "fingerprints.jsonl"
_HEX = re.compile("[0-9a-f]{16}")
_STEP = re.compile(rb'\{"step": ([0-9]{1,18}),')


class Entry(NamedTuple):
    step: int
    state: str
    leaves: Mapping[str, str] | None = None

    def line(self) -> str:
        leaves = {} if self.leaves is None else {"leaves": dict(self.leaves)}
        return json.dumps({"step": self.step, "state": self.state, **leaves}, allow_nan=False) + "\n"


class Log(NamedTuple):
    entries: dict[int, Entry]
    corrupted: list[str]

    def add(self, lines: Iterable[bytes], where: str, after: int = -1) -> None:
        for number, raw in enumerate(lines, 1):
            begins = _STEP.match(raw)
            if begins is not None and int(begins[1]) <= after:
                continue
            entry = parse_line(raw)
            if entry is not None:
                self.entries[entry.step] = entry
            elif raw.strip(b"\0\r\n ") and raw.endswith(b"\n"):  # the last line may be an interrupted write
                text = format_value(raw.decode(errors="replace").strip(), 60)
                self.corrupted.append(f"line {number}{where} is not a fingerprint: {text}")


def read_log(path: str) -> Log:
    log = Log({}, [])
    for part, lines in read_log_files(path):
        log.add(lines, "" if part == path else f" of {part}")
    return log


def read_later(path: str, step: int) -> Log:
    log = Log({}, [])
    for tail in read_tail(path):
        part = "" if tail.part == path else f" of {tail.part}"
        log.add(tail.lines, part if tail.is_whole else f"{part} from its last {TAIL} bytes on", step)
    return log


def parse_lines(data: bytes) -> dict[int, Entry]:
    log = Log({}, [])
    log.add(data.splitlines(keepends=True), "")
    return log.entries


def parse_line(raw: bytes) -> Entry | None:
    try:
        record = json.loads(raw)
        step = record["step"]
        state = record["state"]
        leaves = record.get("leaves")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    texts = [state, *(leaves.values() if isinstance(leaves, dict) else [])]
    if type(step) is not int or step < 0 or not isinstance(leaves, dict | None):
        return None
    if not all(isinstance(text, str) and _HEX.fullmatch(text) for text in texts):
        return None
    return Entry(step, state, leaves)


def is_line(raw: bytes) -> bool:
    return parse_line(raw) is not None


def make_entry(step: int, fingerprints: Fingerprints, per_leaf: bool) -> Entry:
    words = stacked_words(fingerprints.groups)
    leaves = dict(zip(fingerprints.paths, all_as_hexadecimal(words), strict=True)) if per_leaf else None
    return Entry(step, as_hexadecimal(np.sum(words, axis=0, dtype=np.uint32)), leaves)


class Difference(NamedTuple):
    """The paths that differ between two entries; `leaves` is None if a log has none."""

    step: int
    leaves: tuple[str, ...] | None
    first_only: tuple[str, ...] = ()
    second_only: tuple[str, ...] = ()

    def text(self) -> str:
        if self.leaves is None:
            return "which leaves differ is not known (a log without leaves)"
        other = len(self.first_only) + len(self.second_only)
        model = f"; {other} of them in only one of the two: fingerprints of another model" if other else ""
        differ = "leaf differs" if len(self.leaves) == 1 else "leaves differ"
        return f"{len(self.leaves)} {differ}: {format_list(self.leaves, 8)}{model}"


def compare_logs(first: Entry, second: Entry) -> Difference | None:
    if first.state == second.state:
        return None
    if first.leaves is None or second.leaves is None:
        return Difference(first.step, None)
    a, b = first.leaves, second.leaves
    leaves = tuple(path for path in dict.fromkeys([*a, *b]) if a.get(path) != b.get(path))
    return Difference(first.step, leaves, tuple(trees.only_in(a, b)), tuple(trees.only_in(b, a)))
