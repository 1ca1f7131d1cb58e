"""A directory of checkpoints: their names, and which of them are whole."""

import logging
import os
import re
from collections.abc import Collection, Iterator

from jstep.checkpoint.format.manifest import NAME, CheckpointError
from jstep.checkpoint.store import manifest_file

TEMPORARY = ".orbax-checkpoint-tmp"  # orbax's name for what it has not finished
REPLACED = ".jstep-replaced"  # the old checkpoint of a step, while the new one takes its place
DELETED = ".jstep-deleted"

_OF_ORBAX = {"_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"}
_STEP = "(0|[1-9][0-9]*)"
_logger = logging.getLogger("jstep")


def name(prefix: str, step: int) -> str:
    """`prefix-step`."""
    return f"{prefix}-{step}"


def newest_first(
    directory: str, prefix: str | None, trusted: Collection[int] = frozenset()
) -> Iterator[tuple[int, str]]:
    """Step and path of every whole checkpoint, highest step first, looked into one by one.

    Half-written, half-deleted and foreign folders are passed over. Files are looked for and not into.

    Args:
        directory: May be missing.
        prefix: Of the names; any where None.
        trusted: Steps whose folders are not looked into at all.
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
    # A replaced checkpoint counts only where its successor never took its place.
    return sorted(((int(match[2]), match[3] is None, match[0]) for match in matches), reverse=True)


def listed(directory: str) -> list[str]:
    """The names in a directory; none where it is missing."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def at(directory: str, prefix: str, step: int) -> str | None:
    """The path of the whole checkpoint of a step, or None."""
    final = os.path.join(directory, name(prefix, step))
    return next((path for path in (final, final + REPLACED) if is_whole(path)), None)


def is_whole(path: str) -> bool:
    """Whether a checkpoint has its manifest and every file the manifest names.

    A damaged manifest counts as there: restoring says what is wrong, where passing it over would silently
    go back to an older step.
    """
    lacks = missing(path)
    if lacks not in (None, NAME):
        _logger.warning("%s is ignored: it is incomplete, %s is missing", path, lacks)
    return lacks is None


def missing(path: str) -> str | None:
    """The first file that a folder lacks to be a whole checkpoint; None where it is one."""
    try:
        manifest = manifest_file.read(path)
    except CheckpointError:
        # One that is no JSON of ours at all, beside nothing of ours, is somebody else's.
        return None if os.path.isfile(os.path.join(path, "_METADATA")) else NAME
    except OSError:
        return NAME
    return next((file for file in manifest.files if not os.path.isfile(os.path.join(path, file))), None)


def broken(directory: str, prefix: str, above: int) -> list[str]:
    """What has a checkpoint's name at a higher step, is one of ours by its files, and lacks some of them.

    No crash leaves such a one: a folder gets that name when it is whole, and loses it before it is deleted.
    """
    problems = []
    for step, is_final, entry in _entries(directory, prefix):
        path = os.path.join(directory, entry)
        if step > above and is_final and _OF_ORBAX & set(listed(path)) and (lacks := missing(path)):
            problems.append(f"{path}: {lacks} is missing")
    return problems


def is_remains(path: str) -> bool:
    """Whether a folder is a checkpoint, or what was left of one: nobody else's data."""
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    entries = set(listed(path))
    return not entries or bool(entries & {NAME, *_OF_ORBAX})
