"""The schema of the files of a run, as types, and their only check, `checked`.

None means unknown or not applicable. Optional fields, lists and dicts may be absent.
"""

import contextlib
import functools
import itertools
import os
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeAlias, TypedDict

from jstep.core.checks import format_value
from jstep.core.stopwatch import PHASES
from jstep.stores.urls import is_url

LARGE_CONFIG = "in the card"
"""In place of a large config, which is in the file of the setup."""


def is_seconds(value: float) -> bool:
    return 0 <= value < 3e10  # as a time, before the year 2921


def _is_step(value: int) -> bool:
    return 0 <= value < 2**63


def _is_path(value: str) -> bool:
    # A relative path would be another one in each directory from which it is read.
    is_absolute = os.path.isabs(value) or is_url(value)
    return is_absolute and len(value) < 2**15 and "\0" not in value


def _are_phases(value: dict[str, Any]) -> bool:
    if not value.keys() <= {*PHASES}:
        return False
    return all(type(seconds) in (int, float) and is_seconds(seconds) for seconds in value.values())


def _is_span(value: tuple[int, int]) -> bool:
    return value[0] <= value[1]


def _is_config(value: Any) -> bool:
    return type(value) is dict or value == LARGE_CONFIG


Seconds: TypeAlias = Annotated[float, is_seconds]
Step: TypeAlias = Annotated[int, _is_step]
Path: TypeAlias = Annotated[str, _is_path]
PhaseSeconds: TypeAlias = Annotated[dict[str, Any], _are_phases]
Span: TypeAlias = Annotated[tuple[Step, Step], _is_span]
"""The step that a start began from, and the newest that it finished."""
BatchEntries: TypeAlias = dict[str, tuple[str, str, str]]
"""Step → hashes of the layout and content of the next batch, of the config, and of the definition."""


class Process(TypedDict):
    host: str | None
    pid: Annotated[int, lambda value: 0 < value < 2**31] | None


class Parent(TypedDict):
    path: Path
    step: Step


class Stall(TypedDict):
    time: Seconds | None
    step: Step | None
    part: str | None
    stalled: Seconds | None
    what: str | None
    process: Step | None


class KeepBestRecord(TypedDict):
    """How a `KeepBest` keeps the best of a metric."""

    mode: str | None  # "max" or "min"
    data: str | None  # a hash of the data of the evaluation


class StateChange(TypedDict):
    """When code of the user replaced some leaves of the state."""

    by: str  # "the body" of the loop, or a method of a hook
    leaves: list[str]  # their paths, or those of subtrees of which each leaf changed
    leaves_left_out: Step | None  # the number of further paths
    count: Step
    steps: list[Step]  # the first and the newest ten


class Start(TypedDict):
    """A start of a run; a start that cannot be read has only `prefix`, `number` and `problem`."""

    version: int
    prefix: str
    number: int  # as in the name of the file
    problem: str | None  # why it cannot be read, as the end of a sentence
    run: str  # the ID of the run
    parent_run: str | None  # the ID of the parent's run
    parent: Parent | None  # the checkpoint that the run branched from
    copied: bool | None  # whether this is the first start in a copy of another run's directory
    process: Process  # process 0
    processes: Step | None  # their number; None if it is the only one
    began: Seconds  # since 1970: when its process began, or its call if that is not the first of the process
    now: Seconds  # when this was written, about began + sum(seconds)
    directory: Path | None  # where the record is, absolute
    logdir: Path | None  # where the event files are
    last_step: Step | None
    argv: list[str]
    config: Annotated[Any, _is_config] | None
    commit: str | None
    edits: str | None
    devices: str | None  # such as "8×cpu"
    parameters: Step | None
    step: Span | None
    seconds: PhaseSeconds
    phase: str | None  # the one in which it was when this was written, if that had lasted for a while
    examples: Step | None
    values: dict[str, float]  # the latest scalar metrics of the run; a start inherits them
    values_left_out: Step | None  # the number of further scalar metrics
    best: dict[str, tuple[float, Step, Path]]  # those of the run
    kept: dict[str, KeepBestRecord]  # by the names of `best`
    peak_bytes: Step | None  # of a device
    host_bytes: Step | None  # the current resident memory of process 0
    host_peak_bytes: Step | None
    computing: Seconds | None  # the sampled seconds of hooks in which the device computed steps
    mfu: Seconds | None
    saved: list[tuple[Step, Seconds, Step | None, float | None]]  # step, seconds of stepping, examples, learning rate
    stalls: list[Stall]
    batches: BatchEntries  # those after its latest checkpoints
    state_changes: list[StateChange]
    compared_batch: bool | None  # whether the first batch of the start was compared; None in older records
    other_batch: Step | None  # the first batch of the start, if it differs from the one read before
    end: tuple[str, str] | None  # status and reason; None while it lives, and after a SIGKILL
    exception: str | None  # its class
    setup: dict[str, Any]  # {} until `load_setup` reads it, from a file of its own


class ProcessRecord(TypedDict):
    """What a process other than the first has recorded of a start."""

    version: int
    prefix: str
    index: Step
    start: Step  # the number of the start
    process: Process
    written: Seconds
    step: Span | None
    seconds: PhaseSeconds
    batches: BatchEntries
    signal: tuple[str, Seconds] | None  # the one that this process received, and when


class SetupProgram(TypedDict):
    hash: str | None  # of the whole step; below, of its two parts
    gradients: str | None
    update: str | None
    optimizer: str | None
    hyperparameters: dict[str, Any]


class Setup(TypedDict):
    """What a start was given, and what it compiled."""

    step: Step | None
    versions: dict[str, Any]
    settings: dict[str, Any]
    environment: dict[str, Any]
    devices: dict[str, Any]
    state: dict[str, Any]
    batches: dict[str, Any]
    stages: dict[str, Any]
    arguments: dict[str, Any]
    programs: list[SetupProgram]


class SetupFile(TypedDict):
    """The setup of a start, with its config if that is large."""

    version: int
    card: Setup
    config: dict[str, Any]


class StallFile(TypedDict):
    """What a process of a stalled run is waiting for."""

    version: Annotated[int, lambda value: value == 1]
    process: Step
    processes: Step
    pid: Annotated[int, lambda value: 0 <= value < 2**31]
    host: str
    since: Seconds
    renewed: Seconds
    stall: bool
    step: Step | None
    kind: str | None
    what: str | None
    line: str | None


def checked(value: Any, kind: Any) -> Any:
    """Return JSON as a value of a type, or raise a ValueError that says what is not valid.

    Invalid entries of a `dict[str, T]` are left out. A float may be given as an int, a bool, "nan", "inf" or "-inf".

    Example:
        >>> checked({"loss": True, "accuracy": "nan", "x": [1]}, dict[str, float])
        {'loss': 1.0, 'accuracy': nan}
    """
    origin, kinds = _parts_of(kind)
    if origin in (typing.Union, types.UnionType):  # `T | None`
        return None if value is None else checked(value, kinds[0])
    if origin is Annotated:
        value = checked(value, kinds[0])
        is_valid = kinds[1]
        return value if is_valid(value) else _refuse(value)
    if typing.is_typeddict(kind):
        return value | _fields_of(value, kind) if type(value) is dict else _refuse(value)
    if origin is dict:
        return _entries_of({} if value is None else value, kinds[1])
    if origin is list:
        return _items_of([] if value is None else value, itertools.repeat(kinds[0]))
    if origin is tuple:
        fits = isinstance(value, list | tuple) and len(value) == len(kinds)
        return _items_of(value, kinds) if fits else _refuse(value)
    if kind is float:
        return _as_float(value)
    return value if kind is Any or type(value) is kind else _refuse(value)


def valid_fields(fields: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return those fields that a kind has, without invalid ones."""
    found = {}
    for name, hint in _hints(kind).items():
        with contextlib.suppress(ValueError, TypeError):
            found[name] = checked(fields.get(name), hint)
    return found


@functools.cache
def _parts_of(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _refuse(value: object) -> Any:
    raise ValueError(f"holds {format_value(value)}, which is not valid")


def _as_float(value: Any) -> Any:
    is_number = type(value) in (bool, float) or value in ("nan", "inf", "-inf")
    # Of a larger int, `float` would raise an OverflowError.
    is_int = type(value) is int and abs(value) < 2**1000
    return float(value) if is_number or is_int else _refuse(value)


def _fields_of(value: dict[str, Any], kind: Any) -> dict[str, Any]:
    found = {}
    for name, hint in _hints(kind).items():
        try:
            found[name] = checked(value.get(name), hint)
        except (ValueError, TypeError):
            raise ValueError(f"has {name}={format_value(value.get(name))}, which is not valid") from None
    return found


def _entries_of(value: Any, kind: Any) -> dict[str, Any]:
    if type(value) is not dict:
        _refuse(value)
    found = {}
    for name, entry in value.items():
        with contextlib.suppress(ValueError, TypeError):
            found[name] = checked(entry, kind)
    return found


def _items_of(value: Any, kinds: Iterable[Any]) -> list[Any]:
    if not isinstance(value, list | tuple):
        _refuse(value)
    return [checked(item, kind) for item, kind in zip(value, kinds, strict=False)]
