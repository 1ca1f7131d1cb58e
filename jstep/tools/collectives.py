"""What a compiled program moves between devices, read from its text."""

import re
from collections import Counter
from typing import NamedTuple

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?)([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_LISTED = re.compile(r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SHAPE = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]")
_GROUP = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])")


class Collective(NamedTuple):
    """Exchanges of one kind.

    Attributes:
        number: How many a step makes, those in loops as often as they run.
        bytes: What they give or take on each device, the larger of the two, summed over all.
    """

    number: int
    bytes: int


def collectives_of(text: str) -> dict[str, Collective]:
    """Kind → how many and how much, from the text of a compiled program."""
    programs, entry = _programs(text)
    often = _runs(programs, entry)
    numbers: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for name, lines in programs.items():
        for line in lines:
            found = _INSTRUCTION.match(line)
            if found is None:
                continue
            opcode = found[2].removesuffix("-start")
            if opcode in KINDS and often[name]:
                numbers[opcode] += often[name]
                moved[opcode] += often[name] * _moved(opcode, found[1], found[2] != opcode, line)
    return {kind: Collective(numbers[kind], moved[kind]) for kind in KINDS if numbers[kind]}


def _programs(text: str) -> tuple[dict[str, list[str]], str]:
    programs: dict[str, list[str]] = {}
    entry = current = ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head and not line.startswith((" ", "HloModule")):
            current = head[2]
            programs[current] = []
            entry = current if head[1] else entry
        elif current:
            programs[current].append(line)
    return programs, entry


def _runs(programs: dict[str, list[str]], entry: str) -> Counter[str]:
    """How often each program runs in a step; a loop of unknown length counts once."""
    often: Counter[str] = Counter()

    def visit(name: str, times: int) -> None:
        if name not in programs:
            return
        often[name] += times
        for line in programs[name]:
            if "=%" not in line and "={%" not in line and "calls=" not in line and "to_apply=" not in line:
                continue
            trips = _TRIPS.search(line)
            for role, called in _CALLED.findall(line):
                visit(called, times * (int(trips[1]) if trips and role == "body" else 1))
            for group in _LISTED.findall(line):
                for called in re.findall(r"[\w.\-]+", group):
                    visit(called, times)

    visit(entry, 1)
    return often


def _moved(opcode: str, result: str, started: bool, line: str) -> int:
    sizes = [_size(kind, shape) for kind, shape in _SHAPE.findall(result)]
    total = sum(sizes)
    if started and opcode in ("all-gather", "collective-permute") and len(sizes) > 1:
        total = max(sizes) if len(sizes) <= 4 else total // 2  # operands and results side by side
    if opcode == "reduce-scatter":
        group = _GROUP.search(line)
        count = 1 if group is None else len(group[1].split(",")) if group[1] else int(group[2])
        total *= count
    return total


def _size(kind: str, shape: str) -> int:
    digits = re.search(r"\d+", kind)
    bits = 8 if kind == "pred" else int(digits[0]) if digits else 0
    count = 1
    for length in shape.replace("<=", "").split(","):
        count *= int(length) if length else 1
    return count * bits // 8
