"""Positions of data loaders on each process: in checkpoints, and during a run."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jstep.core import processes
from jstep.core.checks import format_list, format_value
from jstep.core.logs import logger
from jstep.stores import tagged_json
from jstep.stores.tagged_arrays import UnknownPartError
from jstep.stores.tagged_json import AttachedFiles, ExternalBytes
from jstep.stores.untrusted import decode_json, is_step

POSITION = "batches"
"""Key of a checkpoint's `extra`: the position, if it is the same on all processes."""
POSITIONS = "batches_of_processes"
"""Key of a checkpoint's `extra`: the positions of several processes.

Its value has the number of processes, and a list of one position if they are equal, or else of a
file of the checkpoint for each process, which that process has written: the manifest, which all
read, does not grow with them.
"""
_PROCESSES = "processes"
_LIST = "positions"


OWN_STATE = ("get_state", "set_state")
"""The methods that return and restore a position, of jstep and of Grain."""
STATE_DICT = ("state_dict", "load_state_dict")
"""The same in loaders that follow PyTorch, such as torchdata's."""


def has_methods(value: object, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)


class PositionMethods(NamedTuple):
    read: Callable[[], Any]
    restore: Callable[[Any], Any]


def position_methods(owner: object) -> PositionMethods | None:
    """Return the methods that return and restore an object's position; None if it lacks them."""
    for read, restore in (OWN_STATE, STATE_DICT):
        if has_methods(owner, read, restore):
            return PositionMethods(getattr(owner, read), getattr(owner, restore))
    return None


def is_position(value: object) -> bool:
    """Whether JSON may be a position; what it tells the loader is known only once it is decoded."""
    return isinstance(value, dict) and "value" in value and is_step(value.get(_BATCHES_SINCE, 0))


def are_positions(value: object) -> bool:
    """Whether JSON is what `POSITIONS` describes: one position, or all processes' file names."""
    if (
        not isinstance(value, dict)
        or not is_step(value.get(_PROCESSES))
        or not isinstance(value.get(_LIST), list)
    ):
        return False
    count = value[_PROCESSES]
    positions = value[_LIST]
    if len(positions) == 1:
        return is_position(positions[0])
    return len(positions) == count and positions == _file_names(count)


class SavedPosition(NamedTuple):
    """The position of this process's loader in a checkpoint, or the reason why there is none."""

    value: Any
    error: str = ""
    warning: str = ""
    source: str = "the checkpoint"


def saved_position(
    extra: Mapping[str, Any], source: str = "the checkpoint"
) -> SavedPosition | None:
    """Return this process's position in a checkpoint's `extra`, or why it is unknown, or None.

    Args:
        extra: As `load_own_position` returns it.
        source: What messages call the checkpoint.
    """
    count = jax.process_count()
    entry = extra.get(POSITIONS)
    if entry is None:
        position = extra.get(POSITION)
        if position is None:
            return None
        if count == 1:
            return SavedPosition(position, source=source)
        return SavedPosition(
            position,
            source=source,
            warning=f"The checkpoint has one position of a loader for {count} processes. Every "
            "process resumes from it, which is wrong if their loaders do not advance together.",
        )

    positions = entry[_LIST]
    if len(positions) == 1:  # they were equal, and stay so for any number of processes
        position = extra.get(POSITION)
    else:
        saved_count = entry[_PROCESSES]
        if saved_count != count:
            return SavedPosition(
                None,
                f"the checkpoint was saved by {saved_count} processes, whose loaders had different "
                f"positions, and this run has {count}. Start the run with {saved_count} processes",
                source=source,
            )
        position = positions[jax.process_index()]
    return None if position is None else SavedPosition(position, source=source)


Files = dict[str, ExternalBytes]
"""The files of a checkpoint that this process writes, by their names."""


class _Summary(NamedTuple):
    """What processes exchange instead of positions, which each would have to decode at a save."""

    progress: str
    digest: str
    has_position: bool


def gather_positions(position: object, progress: Callable[[], str]) -> tuple[dict[str, Any], Files]:
    """Return the positions of all processes for a checkpoint's `extra`, and this one's files.

    All processes must call it.

    Raises:
        RuntimeError: The processes are not alike: `progress()`, which describes where each is,
            differs.
    """
    index = jax.process_index()
    count = jax.process_count()
    attached = AttachedFiles(_file_stem(index))
    encoded = tagged_json.as_json(position, attached)
    if count == 1:
        return {} if encoded is None else {POSITION: encoded}, attached

    text = json.dumps(encoded)
    own_summary = _Summary(progress(), _digest(text, attached), encoded is not None)
    summaries = [
        _Summary(*json.loads(row)) for row in processes.gather_texts(json.dumps(own_summary))
    ]
    _require_alike([summary.progress for summary in summaries])
    if not any(summary.has_position for summary in summaries):
        return {}, {}
    are_equal = len({summary.digest for summary in summaries}) == 1
    if are_equal:
        positions = {_PROCESSES: count, _LIST: [encoded]}
        return {POSITION: encoded, POSITIONS: positions}, attached if index == 0 else {}
    file = ExternalBytes(text.encode())
    extra = {POSITIONS: {_PROCESSES: count, _LIST: _file_names(count)}}
    return extra, {_file_name(index): file, **attached}


def _digest(text: str, attached: AttachedFiles) -> str:
    """Hash an encoded position and its files: equal positions of processes have equal hashes."""
    # Equal positions differ only in the names of their files.
    parts = [text.replace(_file_stem(jax.process_index()), "")]
    parts += [file.hash.hex() for file in attached.values()]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()


def load_own_position(extra: dict[str, Any], read_file: Callable[[str], bytes]) -> dict[str, Any]:
    """Return a checkpoint's `extra` with this process's position in place of its file's name.

    If more processes saved it than are running, each also reads some of the others, as
    `positions_elsewhere` may have to write them again.
    """
    entry = extra.get(POSITIONS)
    if not isinstance(entry, Mapping) or not isinstance(entry.get(_LIST), list):
        return extra
    positions = list(entry[_LIST])
    if len(positions) == 1:
        # This position is under `POSITION`, too. Its files would be loaded twice.
        return {**extra, POSITIONS: {**entry, _LIST: [None]}}
    for process in range(jax.process_index(), len(positions), jax.process_count()):
        name = _file_name(process)
        if positions[process] == name:
            positions[process] = position_in_file(read_file(name))
    return {**extra, POSITIONS: {**entry, _LIST: positions}}


def position_in_file(data: bytes) -> Any:
    """Return the position in a file of its own, still encoded.

    Data that is not JSON is returned as a string, which only `decode_position` rejects, if a run
    resumes from it: the checkpoint may be good for everything else.
    """
    loaded = decode_json(data)
    if loaded is None and data != b"null":
        return repr(data[:50])
    return loaded


def _require_alike(progress: Sequence[str]) -> None:
    """Raise an error if the processes, which all save, have not iterated alike."""
    if len(set(progress)) == 1:
        return
    indices_by_text: dict[str, list[str]] = {}
    for index, text in enumerate(progress):
        indices_by_text.setdefault(text, []).append(str(index))
    groups = []
    for text, indices in indices_by_text.items():
        noun = "processes" if len(indices) > 1 else "process"
        groups.append(f"{text} on {noun} {format_list(indices, 8)}")
    raise RuntimeError(
        "the processes of this run must run the same iterations, got at this save: "
        f"{format_list(groups, 8, '; ')}. Nothing is saved; branch only on values that are equal "
        "on all processes, such as the step or metrics"
    )


def positions_elsewhere(extra: Mapping[str, Any]) -> tuple[dict[str, Any], Files]:
    """Return the positions in another checkpoint's `extra`, and those files this process writes.

    Args:
        extra: As `load_own_position` and `resolve_files` return it.
    """
    copied: dict[str, Any] = {}
    first_files = AttachedFiles(_file_stem(0))
    if POSITION in extra:
        copied[POSITION] = tagged_json.as_json(extra[POSITION], first_files)
    files: Files = dict(first_files) if processes.is_process_0() else {}
    entry = extra.get(POSITIONS)
    if entry is None:
        return copied, files

    positions = entry[_LIST]
    if len(positions) == 1:
        if POSITION in copied:
            copied[POSITIONS] = {**entry, _LIST: [copied[POSITION]]}
        return copied, files
    for process, position in enumerate(positions):
        if isinstance(position, str):  # the file of another process, which writes it
            continue
        attached = AttachedFiles(_file_stem(process))
        text = json.dumps(tagged_json.as_json(position, attached))
        files |= {_file_name(process): ExternalBytes(text.encode()), **attached}
    copied[POSITIONS] = {**entry, _LIST: _file_names(len(positions))}
    return copied, files


def decode_position(encoded: Any, owner: str, source: str = "the checkpoint") -> Any:
    """Decode a position without running code from the checkpoint.

    Args:
        encoded: The position.
        owner: What messages call the loader.
        source: What messages call the checkpoint.

    Raises:
        ValueError: It is not a position.
    """
    what = f"batches: in {source}, the position for the {owner}"
    if not is_position(encoded):  # it may be from a file of its own
        raise ValueError(f"{what} must be a position, got {format_value(encoded)}")
    try:
        return tagged_json.decode(encoded["value"])
    except UnknownPartError as error:
        raise ValueError(
            f"{what} has {error.part}, which this version of jstep does not know. The checkpoint "
            "is intact: install the version that wrote it, which `jstep inspect` shows, or a later "
            "one"
        ) from None
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{what} cannot be decoded ({error}); restore the state by Saver.restore and use "
            "another checkpoint_dir"
        ) from None


def _file_name(process: int) -> str:
    return f"position.process_{process}"


def _file_names(count: int) -> list[str]:
    return [_file_name(process) for process in range(count)]


def _file_stem(process: int) -> str:
    """Return the beginning of the names of files with the large arrays of a position."""
    return f"{_file_name(process)}."


_SHARE = 0.02
"""The maximum share of the time that reading the position of a loader may take."""
_QUICK = 5e-5
"""A position that is read faster than this, in seconds, is read after each batch, however short
batches are."""
_END = object()
_SILENT_SECS = 1.0
"""The seconds after which fetching batches again logs a line."""
_BATCHES_SINCE = "after"
"""The key of the number of batches since a position was read; absent for none."""


class ThrottledPosition:
    """The position of a loader after each batch, read rarely because reading may be slow.

    In between it is the position that was read last, with the number of batches since, which a
    restart fetches again. Before a save is due it is read, so that a restart has nothing to fetch
    again.

    Args:
        read: Reads the position.
        next_due: `next_due(number)` returns the next number of batches at which a save is due.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        read: Callable[[], Any],
        next_due: Callable[[int], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._next_due = next_due
        self._clock = clock
        self._number = 0  # of batches
        self._due = next_due(0)
        # The position as of `_since` batches ago.
        self._last: Any = None
        self._since = 0
        self._read_secs = math.inf
        self._next_read = -math.inf

    def __call__(self) -> Any:
        """Return the position; must be called once after each batch."""
        self._number += 1
        if self._number >= self._due or self._last is None or self._clock() >= self._next_read:
            self._last = self.read()
            self._since = 0
            self._due = self._next_due(self._number)
            return self._last
        self._since += 1
        return {**self._last, _BATCHES_SINCE: self._since}

    def read(self) -> Any:
        """Read the current position, and schedule the next read by the duration of this one."""
        began = self._clock()
        position = self._read()
        ended = self._clock()
        read_secs = ended - began
        # The shorter of two, as one may have been interrupted by another process.
        is_quick = min(read_secs, self._read_secs) < _QUICK
        self._read_secs = read_secs
        self._next_read = -math.inf if is_quick else ended + read_secs * (1 / _SHARE - 1)
        return position


def batches_since(position: Any) -> int:
    """Return how many batches were fetched after a position was read; 0 if it is not a position."""
    return position.get(_BATCHES_SINCE, 0) if is_position(position) else 0


def fetch_again(batches: Iterator[Any], count: int) -> None:
    """Fetch the batches that were fetched after a position was read; log it if that takes long."""
    began = time.monotonic()
    has_logged = False
    for _ in range(count):
        if next(batches, _END) is _END:
            return
        if not has_logged and time.monotonic() - began > _SILENT_SECS:
            has_logged = True
            logger.info(
                "batches: fetches %d batches again, which came after the saved position of the "
                "loader",
                count,
            )
