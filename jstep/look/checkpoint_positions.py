"""The positions in a checkpoint, of data loaders and `from_loop` objects, by name, with numbers.

They are shown from the JSON that they are saved as: nothing is executed, and no class of the
program is needed.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jstep.core.checks import array_type, format_list, shortest_digits, truncate
from jstep.look.arrays import is_inexact
from jstep.record.stall_files import format_ranges

_MAX_NAME = 200
"""The characters of a name that are shown."""
_MAX_TEXT = 80
"""The characters of a value that are shown."""
_MAX_ITEMS = 8
"""The items up to which a list is shown item by item."""
_MAX_GROUPS = 8
"""The groups of processes that are shown."""

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
    """The position of a process, and the number of batches that were fetched after it."""

    entries: Sequence[PositionValue]
    later_batches: Any


class Positions(NamedTuple):
    """The positions in a checkpoint.

    Attributes:
        process_count: The number of processes, as the checkpoint names it.
        positions: Process → its position; None → that of all processes, if it is the same.
    """

    process_count: Any
    positions: Mapping[int | None, Position]

    def position(self, process: int | None) -> Position | None:
        return self.positions.get(process, self.positions.get(None))

    def as_json(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for process, position in self.positions.items():
            for entry in position.entries:
                items.append({"process": process, "name": entry.name, "value": entry.value})
        return items


def positions_in(extra: Any, read_file: ReadFile) -> Positions | None:
    """Return the positions in the `extra` of a checkpoint, or None if it has none."""
    if not isinstance(extra, dict):
        return None
    # Imported here and below, not at the head: these modules import JAX.
    from jstep.stores.tagged_json import FilesOnce

    files = FilesOnce(read_file)
    saved_positions = extra.get("batches_of_processes")
    if not isinstance(saved_positions, dict):
        saved_positions = {"processes": 1, "positions": [extra.get("batches")]}
    every = saved_positions.get("positions")
    if not isinstance(every, list):
        return None
    positions: dict[int | None, Position] = {}
    for process, saved in enumerate(every):
        if saved == f"position.process_{process}":
            # A large position is in a file of its own.
            from jstep.data.positions import position_in_file

            saved = position_in_file(files(saved).read())
        if isinstance(saved, dict) and "value" in saved:
            positions[None if len(every) == 1 else process] = _position(saved, files)
    return Positions(saved_positions.get("processes"), positions) if positions else None


def lines_of_positions(positions: Positions) -> list[str]:
    """Describe each value in a line; processes with the same value are named together."""
    # Name → bits and text of a value → the processes that have it, none for that of all.
    groups_by_name: dict[str, dict[tuple[str, str], list[int]]] = {}
    for process, position in positions.positions.items():
        for entry in position.entries:
            groups = groups_by_name.setdefault(entry.name, {})
            processes = groups.setdefault((entry.bits, entry.text), [])
            if process is not None:
                processes.append(process)
    lines: list[str] = []
    for name, groups in groups_by_name.items():
        count = sum(len(processes) for processes in groups.values())
        is_common = len(groups) == 1 and count in (0, positions.process_count)
        texts = [
            f"{'' if is_common else _lead_of(processes)}{name} {text}"
            for (_, text), processes in groups.items()
        ]
        lines.append(format_list(texts, _MAX_GROUPS, "; "))
    return lines


def _lead_of(processes: Sequence[int]) -> str:
    return (
        f"process{'es' if len(processes) > 1 else ''} "
        f"{format_list(format_ranges(processes), _MAX_GROUPS)}: "
    )


def position_differences(a: Positions | None, b: Positions | None) -> list[tuple[str, str]]:
    """Return the names of differing values, and how; nothing if a checkpoint has no positions."""
    if a is None or b is None:
        return []
    processes = sorted(process for process in {*a.positions, *b.positions} if process is not None)
    if not processes:
        return _differences_of_process(a, b, None)
    if a.process_count != b.process_count:
        return [("positions", f"of {a.process_count} processes in A, of {b.process_count} in B")]
    found: list[tuple[str, str]] = []
    for process in processes:
        found += _differences_of_process(a, b, process)
    return found


def _differences_of_process(
    a: Positions, b: Positions, process: int | None
) -> list[tuple[str, str]]:
    first = a.position(process)
    second = b.position(process)
    lead = "" if process is None else f"process {process}: "
    if first is None or second is None:
        return [(f"{lead}position", f"only in {'B' if first is None else 'A'}")]
    if first.later_batches != second.later_batches:
        # They were read after other batches, as time allowed, and may differ for that alone.
        return []
    return [(f"{lead}{name}", how) for name, how in _differing(first.entries, second.entries)]


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


# The values of a position, as tagged JSON, which is not trusted. These tags are shown otherwise
# than as a name and a hash, which generators and bytes are; `stores/tagged_json` has them all:
#
#     $dict, $ordered_dict    pairs of a key and an item
#     $tuple                  its items
#     $int, $float            a number that is no key or value of JSON, as text
#     $array, $scalar         of NumPy
#     $jax                    an array of JAX: its `data`, an array of NumPy
#     $tensor                 of PyTorch, saved as an array is


def _position(saved: Mapping[str, Any], files: Callable[[str], Any]) -> Position:
    from jstep.array_store.leaf_records import unique

    later_batches = saved.get("after", 0)
    try:
        parts = list(_parts("", saved["value"]))
        entries = [_entry(name.removeprefix("."), part, files) for name, part in parts]
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        # What a malicious or corrupted file raises; the rest of the checkpoint is shown.
        text = truncate(f"cannot be read: {error}", _MAX_TEXT)
        entries = [PositionValue("", text, text)]
    if later_batches:
        entries.append(PositionValue("batches since", later_batches, json.dumps(later_batches)))
    names = unique(truncate(entry.name or "position", _MAX_NAME) for entry in entries)
    named = [entry._replace(name=name) for name, entry in zip(names, entries, strict=True)]
    return Position(named, later_batches)


def _parts(name: str, saved: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and the tagged JSON of the values in nested dicts and short lists."""
    tag, inner = _tag(saved)
    items: list[tuple[str, Any]] = []
    if tag in ("$dict", "$ordered_dict"):
        items = [(f"[{truncate(str(_plain(key)), _MAX_TEXT)}]", item) for key, item in inner]
    elif tag in (None, "$tuple") and isinstance(inner, list) and len(inner) <= _MAX_ITEMS:
        items = [(f"[{number}]", item) for number, item in enumerate(inner)]
    elif tag is None and isinstance(inner, dict):
        items = [(f".{key}", item) for key, item in inner.items()]
    elif tag == "$jax":
        # Of a PRNG key, its data.
        items = [("", inner["data"])]
    for key, item in items:
        yield from _parts(f"{name}{key}", item)
    if not items:
        # A tensor of PyTorch is saved as an array is, and shown as one.
        yield name, {"$array": inner} if tag == "$tensor" else saved


def _tag(saved: Any) -> tuple[str | None, Any]:
    if isinstance(saved, dict) and len(saved) == 1 and next(iter(saved)).startswith("$"):
        ((tag, inner),) = saved.items()
        return tag, inner
    return None, saved


def _plain(saved: Any) -> Any:
    """Return the number or the tuple of a tag, or the value as it is."""
    from jstep.stores import tagged_json

    tag, inner = _tag(saved)
    if tag == "$tuple" and isinstance(inner, list):
        return tuple(map(_plain, inner))
    return tagged_json.decode(saved) if tag in ("$int", "$float") else saved


def _entry(name: str, saved: Any, files: Callable[[str], Any]) -> PositionValue:
    from jstep.stores import tagged_json

    whole = tagged_json.resolve_files(saved, files)
    # For bytes in a file of their own, their hash stands.
    hashed = json.dumps(whole, sort_keys=True, default=lambda external: external.hash.hex())
    bits = hashlib.blake2b(hashed.encode()).hexdigest()
    tag, inner = _tag(saved)
    if tag in ("$array", "$scalar"):
        return PositionValue(
            name, _number_or_text(np.asarray(tagged_json.decode(whole)), bits), bits
        )
    if tag in (None, "$tuple") and isinstance(inner, list) and inner:
        return PositionValue(name, f"{len(inner)} items {bits[:8]}", bits)
    if tag in (None, "$tuple", "$int", "$float"):
        return PositionValue(name, inner if tag == "$tuple" else _plain(saved), bits)
    # A random generator, or bytes.
    return PositionValue(name, f"{tag[1:]} {bits[:8]}", bits)


def _number_or_text(array: np.ndarray[Any, Any], bits: str) -> Any:
    kind = array_type(array.shape, str(array.dtype))
    is_number = (
        is_inexact(array.dtype) or array.dtype == bool or np.issubdtype(array.dtype, np.integer)
    )
    if np.iscomplexobj(array) or not (is_number and array.size):
        return f"{kind} {bits[:8]}"
    if not array.shape:
        return shortest_digits(array.item()) if is_inexact(array.dtype) else array.item()
    with np.errstate(all="ignore"):
        return f"{kind} mean {float(np.mean(array, dtype=np.float64)):.6g}"
