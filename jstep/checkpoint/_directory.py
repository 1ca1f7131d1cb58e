"""A directory of checkpoints: names, which are whole, and putting one in its place or away.

Whatever happens in between, a name stands for a whole checkpoint or for none. A checkpoint is written under a
temporary name, its manifest last, and renamed. One that is deleted is renamed first.
"""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence

from jstep.checkpoint import manifest as _manifest

TEMPORARY = ".orbax-checkpoint-tmp"  # orbax's name for what it has not finished
REPLACED = ".jstep-replaced"  # the old checkpoint of a step, while the new one takes its place
DELETED = ".jstep-deleted"

_logger = logging.getLogger("jstep")


def name(prefix: str, step: int) -> str:
    """`prefix-step`."""
    return f"{prefix}-{step}"


def checkpoints(directory: str, prefix: str | None = None, trusted: Collection[int] = frozenset()) -> dict[int, str]:
    """Step → path of every whole checkpoint, highest step first.

    Half-written, half-deleted and foreign folders are passed over. Files are looked for and not into.

    Args:
        directory: May be missing.
        prefix: Of the names; any where None.
        trusted: Steps whose folders are not looked into at all.
    """
    return dict(newest_first(directory, prefix, trusted))


def newest(directory: str, prefix: str | None = None) -> tuple[int, str] | None:
    """The step and path of the whole checkpoint of the highest step."""
    return next(newest_first(directory, prefix), None)


def at(directory: str, prefix: str, step: int) -> str | None:
    """The path of the whole checkpoint of a step, or None."""
    final = os.path.join(directory, name(prefix, step))
    return next((path for path in (final, final + REPLACED) if is_whole(path)), None)


def damaged(path: str, problems: Sequence[str], directory: str, prefix: str) -> _manifest.CheckpointError:
    """The error for a damaged checkpoint: says what is wrong, and which one to take instead."""
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    rest = f"No other checkpoint {prefix}-* in {directory} is whole."
    for step, other in newest_first(directory, prefix):
        if other != path and _manifest.is_intact(other):
            rest = f"The newest step that is whole is {step} ({other}); restore it with step={step}."
            break
    return _manifest.CheckpointError(f"{path} is damaged: {'; '.join(problems[:3])}{more}. {rest}")


def newest_first(
    directory: str, prefix: str | None, trusted: Collection[int] = frozenset()
) -> Iterator[tuple[int, str]]:
    """What `checkpoints` gives, looked into one by one."""
    pattern = re.compile(
        rf"({'.+' if prefix is None else re.escape(prefix)})-(0|[1-9][0-9]*)({re.escape(REPLACED)})?", re.DOTALL
    )
    found = []
    for entry in _listed(directory):
        if match := pattern.fullmatch(entry):
            # A replaced checkpoint counts only where its successor never took its place.
            found.append((int(match[2]), match[3] is None, entry))
    given = set()
    for step, _, entry in sorted(found, reverse=True):
        path = os.path.join(directory, entry)
        if step not in given and (step in trusted or is_whole(path)):
            given.add(step)
            yield step, path


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def is_whole(path: str) -> bool:
    """Whether a checkpoint has its manifest and every file the manifest names.

    A damaged manifest counts as there: restoring says what is wrong, where passing it over would silently
    go back to an older step.
    """
    try:
        manifest = _manifest.read(path)
    except _manifest.CheckpointError:
        return os.path.isfile(os.path.join(path, "_METADATA"))  # else it is somebody else's
    except OSError:
        return False
    missing = [file for file in manifest.files if not os.path.isfile(os.path.join(path, file))]
    if missing:
        _logger.warning("%s is ignored: it is incomplete, %s is missing", path, missing[0])
    return not missing


def saved_at(path: str) -> float:
    """When a checkpoint was saved, in seconds since 1970."""
    try:
        return _manifest.read(path).saved_at
    except _manifest.CheckpointError:
        return os.path.getmtime(path)


def publish(temporary: str, final: str) -> None:
    """Gives a finished checkpoint its name. One of the same name goes only once the new one is there."""
    replaced = final + REPLACED
    if os.path.lexists(final):
        if is_remains(final):
            remove(replaced)
            os.rename(final, replaced)
        else:
            _set_aside(final)
    sync(temporary)
    os.rename(temporary, final)
    sync(os.path.dirname(final))
    remove(replaced)


def is_remains(path: str) -> bool:
    """Whether a folder is a checkpoint, or what was left of one: nobody else's data."""
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    entries = set(os.listdir(path))
    return not entries or bool(entries & {_manifest.NAME, "_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"})


def _set_aside(path: str) -> None:
    number = 0
    while os.path.lexists(aside := f"{path}.set-aside-{number}"):
        number += 1
    os.rename(path, aside)
    _logger.warning("%s is no checkpoint, and a checkpoint is to have its name: moved to %s", path, aside)


def evict(path: str) -> None:
    """Deletes a checkpoint; at no moment is half of one there under its name."""
    deleted = path + DELETED
    try:
        remove(deleted)
        os.rename(path, deleted)
    except FileNotFoundError:
        return
    except OSError as error:
        _logger.warning("%s could not be deleted: %s", path, error)
        return
    remove(deleted)


def remove(path: str) -> None:
    """Deletes a folder of ours, as far as that is possible."""
    shutil.rmtree(path, ignore_errors=True)


def sweep(directory: str, prefix: str, in_use: Callable[[str], bool]) -> None:
    """Clears away what saves and deletions of this prefix left behind when they were cut short.

    Args:
        directory: Of the checkpoints.
        prefix: Of the names; others' are not touched.
        in_use: Whether a temporary folder is being written right now.
    """
    step = rf"({re.escape(prefix)}-(?:0|[1-9][0-9]*))"
    pattern = re.compile(
        rf"{step}({re.escape(TEMPORARY)}(?:-[0-9]+)?|{re.escape(REPLACED)}|{re.escape(DELETED)})", re.DOTALL
    )
    for entry in _listed(directory):
        if match := pattern.fullmatch(entry):
            path, final = os.path.join(directory, entry), os.path.join(directory, match[1])
            if match[2] == REPLACED and is_whole(path) and not is_whole(final):
                _put_back(path, final)
            elif not in_use(path):
                remove(path)


def _put_back(replaced: str, final: str) -> None:
    if os.path.lexists(final):
        if is_remains(final):
            evict(final)
        else:
            _set_aside(final)
    os.rename(replaced, final)


def sync(folder: str) -> None:
    """Puts the entries of a folder onto the disk, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
