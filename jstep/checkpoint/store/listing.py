"""Listing of the checkpoints in a directory: their names, and which of them are complete."""

import logging
import os
import re
from collections.abc import Collection, Iterator

from jstep.checkpoint.format.manifest import NAME, CheckpointError
from jstep.checkpoint.store import manifest_file

TEMPORARY = ".orbax-checkpoint-tmp"  # Orbax's suffix for unfinished checkpoints
REPLACED = ".jstep-replaced"  # the old checkpoint of a step, while the new one replaces it
DELETED = ".jstep-deleted"

_OF_ORBAX = {"_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"}
_STEP = "(0|[1-9][0-9]*)"
_logger = logging.getLogger("jstep")


def name(prefix: str, step: int) -> str:
    """Return the name of a checkpoint, `prefix-step`."""
    return f"{prefix}-{step}"


def newest_first(
    directory: str, prefix: str | None, trusted: Collection[int] = frozenset()
) -> Iterator[tuple[int, str]]:
    """Yield step and path of every complete checkpoint, highest step first; folders are checked lazily.

    Incomplete and foreign folders are skipped. Only the existence of files is checked, not their content.

    Args:
        directory: The directory of the checkpoints, which may be missing.
        prefix: The prefix of the names; None for any prefix.
        trusted: Steps whose folders are not checked at all.
    """
    given = set()
    for step, _, entry in _entries(directory, prefix):
        path = os.path.join(directory, entry)
        if step not in given and (step in trusted or is_whole(path)):
            given.add(step)
            yield step, path


def _entries(directory: str, prefix: str | None) -> list[tuple[int, bool, str]]:
    start = ".+" if prefix is None else re.escape(prefix)
    pattern = re.compile(rf"({start})-{_STEP}({re.escape(REPLACED)})?", re.DOTALL)
    matches = [match for entry in listed(directory) if (match := pattern.fullmatch(entry))]
    # A replaced checkpoint counts only if its successor never took its place.
    return sorted(((int(match[2]), match[3] is None, match[0]) for match in matches), reverse=True)


def listed(directory: str) -> list[str]:
    """Return the names in a directory; an empty list if it is missing."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def at(directory: str, prefix: str, step: int) -> str | None:
    """Return the path of the complete checkpoint of a step, or None."""
    final = os.path.join(directory, name(prefix, step))
    return next((path for path in (final, final + REPLACED) if is_whole(path)), None)


def is_whole(path: str) -> bool:
    """Return whether a checkpoint has its manifest and every file that the manifest names.

    A corrupted manifest counts as present: restoring raises an error, while skipping it would silently return to an
    older step.
    """
    lacks = missing(path)
    if lacks not in (None, NAME):
        _logger.warning("%s is ignored: it is incomplete, %s is missing", path, lacks)
    return lacks is None


def missing(path: str) -> str | None:
    """Return the first missing file of a checkpoint; None if it is complete."""
    try:
        manifest = manifest_file.read(path)
    except CheckpointError:
        # An unreadable manifest without any other file of ours belongs to another program.
        return None if os.path.isfile(os.path.join(path, "_METADATA")) else NAME
    except OSError:
        return NAME
    return next((file for file in manifest.files if not os.path.isfile(os.path.join(path, file))), None)


def broken(directory: str, prefix: str, above: int) -> list[str]:
    """Return problems of our checkpoints at higher steps that lack files.

    No crash leaves such a checkpoint: a folder gets its name when it is complete, and loses it before it is deleted.
    """
    problems = []
    for step, is_final, entry in _entries(directory, prefix):
        path = os.path.join(directory, entry)
        if step > above and is_final and _OF_ORBAX & set(listed(path)) and (lacks := missing(path)):
            problems.append(f"{path}: {lacks} is missing")
    return problems


def is_remains(path: str) -> bool:
    """Return whether a folder is a checkpoint or the remains of one, and not data of another program."""
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    entries = set(listed(path))
    return not entries or bool(entries & {NAME, *_OF_ORBAX})
