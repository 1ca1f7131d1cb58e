"""What a checkpoint of a run holds beside the state: the keys of its `extra`, and their types.

`contents.py` has the table of who writes a key and who restores it.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypedDict

from jstep.array_store.manifest import MANIFEST_FILE
from jstep.checkpoint.reading import OpenCheckpoint
from jstep.core.checks import format_value
from jstep.data.positions import POSITION, POSITIONS, are_positions, is_position
from jstep.stores.checked_json import Path, Seconds, Step, checked

HOOK_STATES: Final = "hooks"
"""The states of the hooks."""
STOPPED: Final = "stopped"
"""The name of the hook that stopped the run."""
SKIPPED_IN_A_ROW: Final = "skipped"
"""The number of updates skipped in a row."""
LAST_ITERATION: Final = "last_iteration"
"""The step at which the iterations were over, so that only the end follows."""
ENDED: Final = "ended"
"""The mark: the step at which all `end`s were made."""
LAST_BODY: Final = "last_body"
"""The step whose body ran only because the run ended there."""
BEFORE_END: Final = "before_end"
"""True in the checkpoint that is saved before the `end`s."""
HELD_VALUES: Final = "held"
"""The initial values of held hyperparameters."""
PAST: Final = "past"
"""What an observer saves, so that a restart can compare."""
START: Final = "start"
"""Within `PAST`: the number of the start, and when it began."""
CONFIG: Final = "config"
"""What the run was given as its config."""
CODE: Final = "code"
"""The commit of the program, and its edits."""

# Keys that the record of a start has as well; a checkpoint has the first two of them.

RUN_KEY: Final = "run"
"""The name of the run."""
PARENT: Final = "parent"
"""The checkpoint of another run that it began from."""
PARENT_RUN: Final = "parent_run"
"""The name of that run."""


class Parent(TypedDict):
    """The checkpoint of another run, as a checkpoint names it."""

    path: Path
    step: Step


class _Past(TypedDict):
    lanes: Step | None
    start: tuple[Step, Seconds] | None
    rows: str | None
    batches: dict[str, Any]


class _Code(TypedDict):
    commit: str
    edits: str | None


def _are_floats(values: dict[str, Any]) -> bool:
    return all(type(value) is float for value in values.values())


SCHEMA: Mapping[str, Any] = {
    POSITION: Annotated[Any, is_position],
    POSITIONS: Annotated[Any, are_positions],
    HOOK_STATES: Any,  # `set_states` checks it, as it may be of a later version
    STOPPED: str,
    SKIPPED_IN_A_ROW: Annotated[int, lambda value: 0 <= value < 2**31],
    LAST_ITERATION: Step,
    ENDED: Step,
    LAST_BODY: Step,
    BEFORE_END: bool,
    HELD_VALUES: Annotated[dict[str, Any], _are_floats],
    RUN_KEY: str,
    PARENT: Parent,
    PAST: _Past,
    CONFIG: dict[str, Any],
    CODE: _Code,
}
"""Key → its type, in the notation of `checked_json`."""


def run_extra(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """Return the `extra` of a checkpoint, checked; an empty one if no run has written it.

    A checkpoint that a user or `KeepBest` saved has no name of a run. Its keys are the user's, or
    metrics, even if they are called like a run's.

    Raises:
        CorruptedCheckpointError: It is not what a run writes.
    """
    extra = checkpoint.extra
    name = extra.get(RUN_KEY) if isinstance(extra, dict) else None
    if not isinstance(name, str) or not re.fullmatch(r"[0-9a-f]{8}", name):
        return {}
    for key, kind in SCHEMA.items():
        if key not in extra:
            continue
        try:
            checked(extra[key], kind)
        except (TypeError, ValueError):
            raise checkpoint.corrupted(
                f"{MANIFEST_FILE}: its extra has {key}={format_value(extra[key])}, which is not "
                "what a run writes"
            ) from None
    return extra
