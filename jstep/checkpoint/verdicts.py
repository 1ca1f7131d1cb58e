"""Whether a checkpoint is intact, and the error that says what to do about one that is not."""

from collections.abc import Sequence
from typing import NamedTuple

from jstep.array_store.manifest import CheckpointError, CorruptedCheckpointError
from jstep.array_store.store import Store
from jstep.core.checks import format_list

IS_CORRUPTED = "is corrupted"
"""What an error says of a checkpoint whose bytes have changed."""
IS_UNREADABLE = "cannot be restored"
"""What an error says of a checkpoint whose bytes are intact."""
SHOWN = 3
"""The maximum number of problems in a message."""
MAX_VERIFIED_BYTES = 2**28
"""The maximum bytes of other checkpoints that are verified for an error message: 1 TB would delay
it by an hour."""


class Verdict(NamedTuple):
    """What is known of a checkpoint.

    Attributes:
        is_intact: Whether it seems intact; None if it was deleted.
        nbytes: The bytes that were read to find out.
    """

    is_intact: bool | None
    nbytes: int = 0


def verify(store: Store, path: str, step: int, max_bytes: int) -> Verdict:
    """Verify a checkpoint; one of more than `max_bytes` bytes seems intact if its manifest is."""
    try:
        manifest = store.manifest(path)
        if manifest.step != step:
            return Verdict(False)
        nbytes = sum(leaf.nbytes for leaf in manifest.leaves)
        if nbytes > max_bytes:
            return Verdict(True)
        return Verdict(not store.find_corruption(path, manifest), nbytes)
    except FileNotFoundError:
        return Verdict(None)
    except (CheckpointError, OSError):
        # An unreadable one may be intact, but it is not one to recommend.
        return Verdict(False)


def unusable(
    store: Store, prefix: str, path: str, problems: Sequence[str], *, is_corrupted: bool
) -> CheckpointError:
    """Return an error that says what is wrong with a checkpoint, and which other one is intact."""
    try:
        advice = _advice(store, prefix, path)
    except OSError as error:
        advice = f"The other checkpoints cannot be listed now ({error})"
    phrase = IS_CORRUPTED if is_corrupted else IS_UNREADABLE
    text = f"{path} {phrase}: {format_list(problems, SHOWN, '; ')}. {advice}."
    return CorruptedCheckpointError(text) if is_corrupted else CheckpointError(text)


def _advice(store: Store, prefix: str, path: str) -> str:
    """Name the newest intact checkpoint beside an unusable one, and a command to resume from it."""
    conflicting: list[str] = []
    max_bytes = MAX_VERIFIED_BYTES
    for step, other in store.newest_first(prefix):
        if other == path:
            conflicting.append(other)
            continue
        verdict = verify(store, other, step, max_bytes)
        max_bytes -= verdict.nbytes
        if verdict.is_intact:
            restore = f"Saver.restore(target, step={step}) verifies and restores it"
            command = _command_to_resume(store, prefix, conflicting, step, "resume from it")
            return f"The newest intact checkpoint is step {step} ({other}): {restore}{command}"
        if verdict.is_intact is not None:
            conflicting.append(other)
    lack = f"No other checkpoint {prefix}-* in {store.directory} is intact"
    return lack + _command_to_resume(store, prefix, conflicting, -1, "start from scratch")


def _command_to_resume(
    store: Store, prefix: str, conflicting: list[str], step: int, purpose: str
) -> str:
    """Return the command that lets `train` resume from a step; -1 for none.

    It deletes nothing: this may be the last copy.
    """
    broken = [path for path, _ in store.find_broken(prefix, step)]
    commands = [store.command_to_set_aside(path) for path in dict.fromkeys([*conflicting, *broken])]
    if not commands:
        return ""
    return f"; to {purpose}, set aside what cannot be used: `{' && '.join(commands)}`"
