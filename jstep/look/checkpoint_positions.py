"""The positions in a checkpoint: of data loaders, and of the objects of `from_loop`, by name, with their numbers.

They are shown from the JSON that they are saved as: nothing is executed, and no class of the program is needed.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jstep.core.checks import array_type, format_list, in_own_digits, truncate
from jstep.look.arrays import is_inexact
from jstep.record.stall_files import format_ranges

_MAX_NAME, _MAX_TEXT, _MAX_ITEMS, _MAX_GROUPS = 200, 80, 8, 8
"""The characters of a name and of a value, the items of a list, and the groups of processes that are shown."""

ReadFile = Callable[[str], bytes]
"""Returns a file of the checkpoint by its name."""


class PositionValue(NamedTuple):
    """A value of a position: its name, a number or a text, and a hash of all its bits."""

    name: str
    value: Any
    bits: str

    @property
    def text(self) -> str:
        is_text = isinstance(self.value, str) and self.value.isprintable()
        return truncate(self.value if is_text else json.dumps(self.value), _MAX_TEXT)


class Position(NamedTuple):
    """The position of a process; `since` is the number of batches that were fetched after it."""

    entries: Sequence[PositionValue]
    since: Any


class Positions(NamedTuple):
    """The positions in a checkpoint by process; if those of all processes are equal, one with the key None."""

    processes: Any
    by_process: Mapping[int | None, Position]

    def of(self, process: int | None) -> Position | None:
        return self.by_process.get(process, self.by_process.get(None))

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {"process": process, "name": entry.name, "value": entry.value}
            for process, position in self.by_process.items()
            for entry in position.entries
        ]


def positions_in(extra: Any, read_file: ReadFile) -> Positions | None:
    """Return the positions in the `extra` of a checkpoint, or None if it has none."""
    if not isinstance(extra, dict):
        return None
    from jstep.stores.tagged_json import FilesOnce  # it imports JAX

    files = FilesOnce(read_file)
    every = extra.get("batches_of_processes")
    if not isinstance(every, dict):
        every = {"processes": 1, "positions": [extra.get("batches")]}
    positions = every.get("positions")
    if not isinstance(positions, list):
        return None
    known: dict[int | None, Position] = {}
    for process, saved in enumerate(positions):
        if saved == f"position.process_{process}":
            from jstep.data.positions import position_in_file  # it imports JAX

            saved = position_in_file(files(saved).read())
        if isinstance(saved, dict) and "value" in saved:
            known[None if len(positions) == 1 else process] = _position(saved, files)
    return Positions(every.get("processes"), known) if known else None


def lines_of_positions(positions: Positions) -> list[str]:
    """Describe each value in a line; processes with the same value are named together."""
    lines = list[str]()
    by_name = dict[str, dict[tuple[str, str], list[int]]]()
    for process, position in positions.by_process.items():
        for entry in position.entries:
            of_value = by_name.setdefault(entry.name, {}).setdefault((entry.bits, entry.text), [])
            of_value += [] if process is None else [process]
    for name, groups in by_name.items():
        count = sum(map(len, groups.values()))
        is_of_all = len(groups) == 1 and count in (0, positions.processes)
        texts = [f"{'' if is_of_all else _named(group)}{name} {text}" for (_, text), group in groups.items()]
        lines.append(format_list(texts, _MAX_GROUPS, "; "))
    return lines


def _named(processes: Sequence[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {format_list(format_ranges(processes), _MAX_GROUPS)}: "


def position_differences(a: Positions | None, b: Positions | None) -> list[tuple[str, str]]:
    """Return the names of the values that differ, and how; nothing if a checkpoint has no positions."""
    if a is None or b is None:
        return []
    keys = {*a.by_process, *b.by_process}
    if a.processes != b.processes and keys != {None}:
        return [("positions", f"of {a.processes} processes in A, of {b.processes} in B")]
    found = list[tuple[str, str]]()
    for process in [None] if keys == {None} else sorted(keys - {None}, key=int):  # type: ignore[arg-type]
        first, second, begins = a.of(process), b.of(process), "" if process is None else f"process {process}: "
        if first is None or second is None:
            found.append((f"{begins}position", f"only in {'B' if first is None else 'A'}"))
        elif first.since == second.since:  # else they were read after other batches, as time allowed
            found += [(f"{begins}{name}", how) for name, how in _differing(first.entries, second.entries)]
    return found


def _differing(a: Sequence[PositionValue], b: Sequence[PositionValue]) -> Iterator[tuple[str, str]]:
    values_a = {entry.name: entry for entry in a}
    values_b = {entry.name: entry for entry in b}
    for name in values_a | values_b:
        first = values_a.get(name)
        second = values_b.get(name)
        if first is None or second is None:
            yield name, f"only in {'B' if first is None else 'A'}"
        elif first.bits != second.bits and first.text == second.text:
            yield name, f"{first.text} in both, with other values"
        elif first.bits != second.bits:
            yield name, f"{first.text} in A, {second.text} in B"


# The values of a position, as tagged JSON, which is not trusted.


def _position(saved: Mapping[str, Any], files: Callable[[str], Any]) -> Position:
    from jstep.checkpoint.leaf_records import unique  # it imports JAX

    since = saved.get("after", 0)
    try:
        parts = list(_parts("", saved["value"]))
        entries = [_entry(name.removeprefix("."), part, files) for name, part in parts]
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        text = truncate(f"cannot be read: {error}", _MAX_TEXT)
        entries = [PositionValue("", text, text)]
    entries += [PositionValue("batches since", since, json.dumps(since))] if since else []
    names = unique(truncate(entry.name or "position", _MAX_NAME) for entry in entries)
    return Position([entry._replace(name=name) for name, entry in zip(names, entries, strict=True)], since)


def _parts(name: str, saved: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and the tagged JSON of the values in nested dicts and short lists."""
    tag, inner = _tag(saved)
    items = list[tuple[str, Any]]()
    if tag in ("$dict", "$ordered_dict"):
        items = [(f"[{truncate(str(_plain(key)), _MAX_TEXT)}]", item) for key, item in inner]
    elif tag in (None, "$tuple") and isinstance(inner, list) and len(inner) <= _MAX_ITEMS:
        items = [(f"[{number}]", item) for number, item in enumerate(inner)]
    elif tag is None and isinstance(inner, dict):
        items = [(f".{key}", item) for key, item in inner.items()]
    elif tag == "$jax":  # of a key, its data
        items = [("", inner["data"])]
    for key, item in items:
        yield from _parts(f"{name}{key}", item)
    if not items:
        yield name, {"$array": inner} if tag == "$tensor" else saved


def _tag(saved: Any) -> tuple[str | None, Any]:
    if isinstance(saved, dict) and len(saved) == 1 and next(iter(saved)).startswith("$"):
        ((tag, inner),) = saved.items()
        return tag, inner
    return None, saved


def _plain(saved: Any) -> Any:
    """Return the number or the tuple of a tag, or the value as it is."""
    from jstep.stores import tagged_json  # it imports JAX

    tag, inner = _tag(saved)
    if tag == "$tuple" and isinstance(inner, list):
        return tuple(map(_plain, inner))
    return tagged_json.decode(saved) if tag in ("$int", "$float") else saved


def _entry(name: str, saved: Any, files: Callable[[str], Any]) -> PositionValue:
    from jstep.stores import tagged_json  # it imports JAX

    whole = tagged_json.resolve_files(saved, files)
    hashed = json.dumps(whole, sort_keys=True, default=lambda large: large.hash.hex())
    bits = hashlib.blake2b(hashed.encode()).hexdigest()
    tag, inner = _tag(saved)
    if tag in ("$array", "$scalar"):
        return PositionValue(name, _number_or_text(np.asarray(tagged_json.decode(whole)), bits), bits)
    if tag in (None, "$tuple") and isinstance(inner, list) and inner:
        return PositionValue(name, f"{len(inner)} items {bits[:8]}", bits)
    if tag in (None, "$tuple", "$int", "$float"):
        return PositionValue(name, inner if tag == "$tuple" else _plain(saved), bits)
    return PositionValue(name, f"{tag[1:]} {bits[:8]}", bits)  # a random generator, or bytes


def _number_or_text(array: np.ndarray[Any, Any], bits: str) -> Any:
    kind = array_type(array.shape, str(array.dtype))
    is_number = is_inexact(array.dtype) or array.dtype == bool or np.issubdtype(array.dtype, np.integer)
    if np.iscomplexobj(array) or not (is_number and array.size):
        return f"{kind} {bits[:8]}"
    if not array.shape:
        return in_own_digits(array.item()) if is_inexact(array.dtype) else array.item()
    with np.errstate(all="ignore"):
        return f"{kind} mean {float(np.mean(array, dtype=np.float64)):.6g}"
