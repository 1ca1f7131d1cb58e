"""Positions of data loaders on each process: in checkpoints, and during a run."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jstep.core import processes
from jstep.core.checks import describe_type, format_list
from jstep.stores import tagged_json
from jstep.stores.tagged_json import AttachedFiles, LargeBytes
from jstep.stores.untrusted import decode_json

POSITION, POSITIONS = "batches", "batches_of_processes"
"""Keys of a checkpoint's `extra`: the position, if it is the same on all processes, and those of several processes.

The latter has the number of processes, and a list of one position if they are equal, or else of a file of the
checkpoint for each process, which that process has written: the manifest, which all read, does not grow with them.
"""
_PROCESSES = "processes"
_LIST = "positions"


OWN_STATE, STATE_DICT = ("get_state", "set_state"), ("state_dict", "load_state_dict")
"""The methods that return and restore a position."""


def has_methods(value: object, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)


def position_methods(owner: object) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    names = next((names for names in (OWN_STATE, STATE_DICT) if has_methods(owner, *names)), None)
    return None if names is None else (getattr(owner, names[0]), getattr(owner, names[1]))


class SavedPosition(NamedTuple):
    """The position of this process's loader in a checkpoint, or the reason why there is none."""

    value: Any
    error: str = ""
    warning: str = ""


def saved_position(extra: Mapping[str, Any]) -> SavedPosition | None:
    """Return the position of this process in a checkpoint's `extra`, or why it is not known; None without one.

    Args:
        extra: As `with_own_position` returns it.
    """
    every = extra.get(POSITIONS)
    first = extra.get(POSITION)
    count = jax.process_count()
    if every is None:
        only_one = (
            f"The checkpoint has one position of a loader for {count} processes. Every process resumes from it, which "
            "is wrong if their loaders do not advance together."
        )
        return None if first is None else SavedPosition(first, warning=only_one if count > 1 else "")
    before = every[_PROCESSES]
    positions = every[_LIST]
    if len(positions) > 1 and before != count:
        return SavedPosition(
            None,
            f"the checkpoint was saved by {before} processes, whose loaders had different positions, and this run has "
            f"{count}. Start the run with {before} processes",
        )
    position = positions[0 if len(positions) == 1 else jax.process_index()]
    return None if position is None else SavedPosition(position)


Files = dict[str, LargeBytes]
"""The files of a checkpoint that this process writes, by their names."""


def gather_positions(position: object, progress: Callable[[], str]) -> tuple[dict[str, Any], Files]:
    """Return what a checkpoint's `extra` has of the positions of all processes, and the files that this one writes.

    The processes exchange hashes alone: each would otherwise receive and decode all positions, at each save.

    Raises:
        RuntimeError: The processes are not alike: `progress()`, which describes where each is, differs.
    """
    index = jax.process_index()
    count = jax.process_count()
    attached = AttachedFiles(_file_stem(index))
    encoded = tagged_json.as_json(position, attached)
    if count == 1:
        return {} if encoded is None else {POSITION: encoded}, attached
    text = json.dumps(encoded)
    # Equal positions differ only in the names of their files.
    alike = [text.replace(_file_stem(index), ""), *[file.hash.hex() for file in attached.values()]]
    digest = hashlib.blake2b(json.dumps(alike).encode(), digest_size=20).hexdigest()
    rows = [json.loads(row) for row in processes.gather_texts(json.dumps([progress(), digest, encoded is not None]))]
    _require_alike([row[0] for row in rows])
    if not any(has_position for _, _, has_position in rows):
        return {}, {}
    if len({digest for _, digest, _ in rows}) == 1:
        every = {_PROCESSES: count, _LIST: [encoded]}
        return {POSITION: encoded, POSITIONS: every}, attached if index == 0 else {}
    files = {_file_name(index): LargeBytes(text.encode()), **attached}
    return {POSITIONS: {_PROCESSES: count, _LIST: [_file_name(process) for process in range(count)]}}, files


def with_own_position(extra: dict[str, Any], read_file: Callable[[str], bytes]) -> dict[str, Any]:
    """Return a checkpoint's `extra` with the position of this process in place of the name of its file.

    If more processes saved it than are running, each also reads some of the others, as `positions_elsewhere` may have
    to write them again.
    """
    every = extra.get(POSITIONS)
    if not isinstance(every, Mapping) or not isinstance(every.get(_LIST), list):
        return extra
    positions = list(every[_LIST])
    for process in range(jax.process_index(), len(positions), jax.process_count()):
        if positions[process] == _file_name(process):
            positions[process] = position_in_file(read_file(_file_name(process)))
    return {**extra, POSITIONS: {**every, _LIST: positions}}


def position_in_file(data: bytes) -> Any:
    """Return the position in a file of its own, encoded; what is not one, which nobody can resume from, as text."""
    loaded = decode_json(data)
    return loaded if loaded is not None or data == b"null" else repr(data[:50])


def _require_alike(progress: Sequence[str]) -> None:
    """Raise an error if the processes, which all save, have not iterated alike."""
    if len(set(progress)) == 1:
        return
    groups = {text: [str(i) for i, other in enumerate(progress) if other == text] for text in progress}
    found = [f"{text} on process{'es' if len(on) > 1 else ''} {format_list(on, 8)}" for text, on in groups.items()]
    raise RuntimeError(
        f"the processes of this run must iterate alike, got at this save: {format_list(found, 8, '; ')}. Nothing is "
        "saved; decide from numbers that all processes have, such as the step or metrics, not from local ones"
    )


def positions_elsewhere(extra: Mapping[str, Any]) -> tuple[dict[str, Any], Files]:
    """Return the positions in another checkpoint's `extra`, and the files of them that this process writes.

    Args:
        extra: As `with_own_position` and `with_files` return it.
    """
    kept: dict[str, Any] = {}
    first = AttachedFiles(_file_stem(0))
    if POSITION in extra:
        kept[POSITION] = tagged_json.as_json(extra[POSITION], first)
    files: Files = dict(first) if jax.process_index() == 0 else {}
    every = extra.get(POSITIONS)
    if every is None:
        return kept, files
    positions = every[_LIST]
    if len(positions) == 1:
        return kept | {POSITIONS: {**every, _LIST: [kept[POSITION]]}}, files
    for process, position in enumerate(positions):
        if isinstance(position, str):  # the file of another process, which writes it
            continue
        attached = AttachedFiles(_file_stem(process))
        text = json.dumps(tagged_json.as_json(position, attached))
        files |= {_file_name(process): LargeBytes(text.encode()), **attached}
    return kept | {POSITIONS: {**every, _LIST: [_file_name(process) for process in range(len(positions))]}}, files


def decode_position(kept: object, owner: str) -> Any:
    what = f"batches: the checkpoint's position for the {owner}"
    if not isinstance(kept, Mapping):
        raise ValueError(f"{what} must be a position, got {describe_type(kept)}")
    try:
        return tagged_json.decode(kept["value"])
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{what} cannot be decoded ({error}); restore the state by Saver.restore and use another checkpoint_dir"
        ) from None


def _file_name(process: int) -> str:
    return f"position.process_{process}"


def _file_stem(process: int) -> str:
    """Return the beginning of the names of files with the large arrays of a position."""
    return f"{_file_name(process)}."


_SHARE = 0.02
"""The maximum share of the time that reading the position of a loader may take."""
_QUICK = 5e-5
"""A position that is read faster than this, in seconds, is read after each batch."""
_AFTER = "after"
"""The key of the number of batches since a position was read; absent for none."""


class RarePosition:
    """The position of a loader after each batch, read rarely because reading may be slow.

    In between it is the last one, with the number of batches since. `next_due(number)` is the next number at which a
    save is due.
    """

    def __init__(
        self, ask: Callable[[], Any], next_due: Callable[[int], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._next_due = next_due
        self._clock = clock
        self._due = next_due(0)
        self._last: Any = None
        self._number = self._since = 0
        self._took = math.inf, math.inf
        self._next = -math.inf

    def __call__(self) -> Any:
        self._number += 1
        if self._number >= self._due or self._last is None or self._clock() >= self._next:
            self._last = self.read()
            self._since = 0
            self._due = self._next_due(self._number)
            return self._last
        self._since += 1
        return {**self._last, _AFTER: self._since}

    def read(self) -> Any:
        began = self._clock()
        position = self._ask()
        ended = self._clock()
        self._took = ended - began, self._took[0]  # one of two may have been interrupted by another process
        self._next = -math.inf if min(self._took) < _QUICK else ended + self._took[0] * (1 / _SHARE - 1)
        return position


def batches_since(position: Any) -> int:
    return position.get(_AFTER, 0) if isinstance(position, Mapping) else 0
