"""The schema of the files of a run, as types, which `checked` checks.

None means unknown or not applicable. Optional fields, lists and dicts may be absent.
"""

from typing import Annotated, Any, TypeAlias, TypedDict

from jstep.core.stopwatch import PHASES
from jstep.stores.checked_json import Path, Seconds, Step
from jstep.stores.untrusted import is_seconds

LARGE_CONFIG = "in the card"
"""What stands for a large config, which is in the file of the setup."""


def _are_phases(value: dict[str, Any]) -> bool:
    if not value.keys() <= {*PHASES}:
        return False
    return all(type(seconds) in (int, float) and is_seconds(seconds) for seconds in value.values())


def _is_span(value: tuple[int, int]) -> bool:
    return value[0] <= value[1]


def _is_config(value: Any) -> bool:
    return type(value) is dict or value == LARGE_CONFIG


PhaseSeconds: TypeAlias = Annotated[dict[str, Any], _are_phases]
Span: TypeAlias = Annotated[tuple[Step, Step], _is_span]
"""The step at which a start began, and the newest that it finished."""
BatchEntries: TypeAlias = dict[str, tuple[str, str, str]]
"""Step → hashes of the layout and content of the next batch, of the config, and of the
definition."""


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
    """A start of a run. One that cannot be read has only `prefix`, `number` and `problem`."""

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
    # Since 1970: when its process began, or its call if that is not the first of the process.
    began: Seconds
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
    # The phase when this was written, if it had lasted for a while.
    phase: str | None
    examples: Step | None
    values: dict[str, float]  # the latest scalar metrics of the run; a start inherits them
    values_left_out: Step | None  # the number of further scalar metrics
    best: dict[str, tuple[float, Step, Path]]  # of the run, not only of this start
    kept: dict[str, KeepBestRecord]  # by the names of `best`
    peak_bytes: Step | None  # of a device
    host_bytes: Step | None  # the current resident memory of process 0
    host_peak_bytes: Step | None
    computing: Seconds | None  # the sampled seconds of hooks in which the device computed steps
    mfu: Seconds | None
    # Step, seconds of stepping, examples, learning rate.
    saved: list[tuple[Step, Seconds, Step | None, float | None]]
    stalls: list[Stall]
    batches: BatchEntries  # the next batches after its latest checkpoints
    state_changes: list[StateChange]
    # Whether the first batch of the start was compared; None in older records.
    compared_batch: bool | None
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
    signal: tuple[str, Seconds] | None  # the signal that this process received, and when


class SetupProgram(TypedDict):
    hash: str | None  # of the whole step; below, of its two parts
    gradients: str | None
    update: str | None
    optimizer: str | None
    hyperparameters: dict[str, Any]


class Setup(TypedDict):
    """The setup of a start: its environment, its arguments, and the programs that it compiled."""

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
    """The file of a setup, which also has the config if that is large."""

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
