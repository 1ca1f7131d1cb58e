"""Listing of checkpoints: their names and manifests, and which of them are complete.

In a directory each is a folder. Below a URL they are objects with these keys:

    model-7/manifest.json               the checkpoint exists when this does
    model-7/data.1795172888-1f0e2d3c/   the objects of one attempt to save it
    ~claims/model                       the writer of model-*
    ~jstep                              the mark: a list without it is incomplete
"""

import functools
import logging
import os
import re
import secrets
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from jstep.checkpoint.format.manifest import NAME, CheckpointError, Manifest, decode, encode
from jstep.stores.files import is_absent, may_be_file, new_file


def read_manifest(checkpoint: str) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: The manifest is corrupted (names its path).
        FileNotFoundError: There is no manifest.
    """
    path = os.path.join(checkpoint, NAME)
    with open(path, "rb") as file:
        data = file.read()
    try:
        return _decoded(data)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from None


# A manifest is decoded three times in a row when a checkpoint is listed, found and read. Callers must not modify it.
_decoded = functools.lru_cache(maxsize=4)(decode)


def write_manifest(checkpoint: str, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, and flush it to disk."""
    with new_file(os.path.join(checkpoint, NAME)) as file:
        file.write(encode(manifest))


TEMPORARY = ".orbax-checkpoint-tmp"  # Orbax's suffix for unfinished checkpoints
IN_FLIGHT: dict[str, Any] = {}
"""Path of a temporary folder → the checkpointer that writes it."""
REPLACED = ".jstep-replaced"  # the old checkpoint of a step, while the new one replaces it
DELETED = ".jstep-deleted"
ASIDE = ".aside."  # what the user sets aside, by the command that an error shows; a number follows

UNUSED = frozenset({"_METADATA", "_CHECKPOINT_METADATA"})
"""Files in which Orbax describes a checkpoint. The manifest does that here, so a checkpoint is intact without them."""
OF_ORBAX = UNUSED | {"manifest.ocdbt"}
_LOOKS = 10  # a writer evicts one checkpoint per save
_STEP = "(0|[1-9][0-9]*)"
_logger = logging.getLogger("jstep")


def name(prefix: str, step: int) -> str:
    """Return the name of a checkpoint, `prefix-step`."""
    return f"{prefix}-{step}"


def misnamed(prefix: str, step: int, held: int) -> str:
    """Return the problem of a checkpoint whose name has another step than its content."""
    return (
        f"its name says step {step}, and it holds step {held}: it was copied or renamed; rename it to {prefix}-{held}"
    )


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
    given: set[int] = set()
    for _ in range(_LOOKS):
        for step, _, entry in _entries(directory, prefix):
            if step in given:
                continue
            path = os.path.join(directory, entry)
            found = path if step in trusted else _found(path.removesuffix(REPLACED))
            if found is not None:
                given.add(step)
                yield step, found
            elif not given and not os.path.lexists(path):
                break  # it was evicted, so there is a newer one, which is not in this list
        else:
            return


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
    return _found(os.path.join(directory, name(prefix, step)))


def _found(final: str) -> str | None:
    """Return where the checkpoint of a final path is complete, or None."""
    found, lacks = _look(final)
    _warn(final, lacks)
    return found


def _look(final: str) -> tuple[str | None, str | None]:
    """Return where the checkpoint of a final path is complete, or None and what it lacks.

    Saving a step again renames its old checkpoint before the new one gets the name.
    """
    lacks: str | None = NAME
    for path in (final, final + REPLACED, final):
        lacks = missing(path)
        if lacks is None:
            return path, None
    return None, lacks


def is_whole(path: str) -> bool:
    """Return whether a checkpoint has its manifest and every file that the manifest names.

    A corrupted manifest counts as present: restoring raises an error, while skipping it would silently return to an
    older step.
    """
    lacks = missing(path)
    _warn(path, lacks)
    return lacks is None


def _warn(path: str, lacks: str | None) -> None:
    if lacks not in (None, NAME):
        _logger.warning("%s is ignored: it is incomplete, %s is missing", path, lacks)


def missing(path: str) -> str | None:
    """Return the first missing file of a checkpoint, of those that are read; None if it is complete.

    What cannot be read, such as without permission, counts as present: it may be intact, and reading it raises why.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        # An unreadable manifest without any other file of ours belongs to another program.
        return None if has_data(path) else NAME
    except OSError as error:
        return NAME if is_absent(error) else None
    files = manifest.files.keys() - UNUSED
    return next((file for file in sorted(files) if not may_be_file(os.path.join(path, file))), None)


def broken(directory: str, prefix: str, above: int) -> list[tuple[str, str]]:
    """Return path and problem of our checkpoints at higher steps that lack files.

    No crash leaves such a checkpoint: a folder gets its name when it is complete, and loses it before it is deleted.
    Only in a copy from a bucket, data without a manifest may come from an interrupted save.
    """
    problems = []
    for step, is_final, entry in _entries(directory, prefix):
        path = os.path.join(directory, entry)
        if step <= above or not is_final:
            continue
        found, lacks = _look(path)
        if found is not None or (lacks == NAME and not has_data(path)) or not os.path.lexists(path):
            continue
        if lacks == NAME and not OF_ORBAX & set(listed(path)):
            _logger.warning(
                "%s is ignored: it has no %s, so its save to a bucket was interrupted, or its copy was; in the latter "
                "case, copy it again",
                path,
                NAME,
            )
        else:
            problems.append((path, f"{lacks} is missing"))
    return problems


def has_data(path: str) -> bool:
    """Return whether a folder holds arrays of a checkpoint, written here or copied from a bucket."""
    return any(
        entry in OF_ORBAX or (is_attempt(entry) and os.path.isdir(os.path.join(path, entry))) for entry in listed(path)
    )


def is_remains(path: str) -> bool:
    """Return whether a folder is a checkpoint or the remains of one, and not data of another program."""
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    entries = set(listed(path))
    return not entries or bool(entries & {NAME, *OF_ORBAX})


_KEY = re.compile(r"(?P<name>(?P<prefix>[^/]+)-(?P<step>0|[1-9][0-9]*))/(?P<rest>.+)", re.DOTALL)
_ATTEMPT = re.compile(r"data\.(?:([0-9]{1,15})-)?[^/]+", re.DOTALL)
HOUR = 3600


def attempt_of(time: int, number: int) -> str:
    """Return the name of an attempt, which contains its time."""
    return f"data.{time}-{number:08x}"


def new_attempt(now: float) -> tuple[int, int]:
    """Return a unique time and number for an attempt."""
    return max(0, int(now)), secrets.randbits(31)


def is_attempt(name: str | None) -> bool:
    """Return whether it is the name of an attempt."""
    return name is not None and _ATTEMPT.fullmatch(name) is not None


def is_old(attempt: str, now: float) -> bool:
    """Return whether an attempt began more than an hour ago, so that it is no longer written or read."""
    match = _ATTEMPT.fullmatch(attempt)
    return match is not None and match[1] is not None and now - int(match[1]) > HOUR


class Checkpoints:
    """The checkpoints of a prefix, or of any prefix, in a list of keys."""

    def __init__(self, keys: Iterable[str], prefix: str | None) -> None:
        self.committed: dict[str, int] = {}
        self.attempts: dict[str, dict[str, list[str]]] = {}
        """Name of the checkpoint → attempt → its keys."""
        for key in keys:
            match = _KEY.fullmatch(key)
            if match is None or (prefix is not None and match["prefix"] != prefix):
                continue
            attempt, _, below = match["rest"].partition("/")
            if match["rest"] == NAME:
                self.committed[match["name"]] = int(match["step"])
            elif below and is_attempt(attempt):
                self.attempts.setdefault(match["name"], {}).setdefault(attempt, []).append(key)

    def newest_first(self) -> list[tuple[int, str]]:
        """Return step and name of the checkpoints, highest step first."""
        return sorted(((step, name) for name, step in self.committed.items()), reverse=True)
