"""Listing of a directory's checkpoints: names, and which are complete. It does not load JAX."""

import logging
import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from jstep.array_store.manifest import (
    MANIFEST_FILE,
    CheckpointError,
    CorruptedCheckpointError,
    Manifest,
    decode,
)
from jstep.core.logs import log_once
from jstep.core.tables import printable
from jstep.stores.files import is_absent, may_be_file, read_small
from jstep.stores.untrusted import MAX_MANIFEST_BYTES, step_in

# On a disk, each checkpoint is a directory. Below a URL, checkpoints are objects with these keys:
#
#     model-7/manifest.json                         the checkpoint exists when this does
#     model-7/data.1795172888-1f0e2d3c/             the objects of one attempt to save it
#     ~attempts/model-7/data.1795172888-1f0e2d3c    the index: a small object, from the beginning
#                                                   of this attempt on
#     ~claims/model                                 the writer of model-*
#     ~jstep.2                                      the mark: a list without it is incomplete


def read_manifest(checkpoint: str) -> Manifest:
    path = os.path.join(checkpoint, MANIFEST_FILE)
    try:
        data = read_small(path, MAX_MANIFEST_BYTES, follow_link=False)
    except ValueError as error:
        raise CorruptedCheckpointError(str(error)) from None
    return decode_manifest(data, path)


def decode_manifest(data: bytes, path: str) -> Manifest:
    """Decode the manifest at a path, which callers must not modify."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{printable(path)}: has more than {MAX_MANIFEST_BYTES} bytes")
    try:
        return decode(data)
    except CheckpointError as error:
        raise type(error)(f"{printable(path)}: {error}") from None


TEMPORARY = ".orbax-checkpoint-tmp"
"""Orbax's suffix for unfinished checkpoints."""
REPLACED = ".jstep-replaced"
"""The suffix of the old checkpoint of a step, while the new one replaces it."""
DELETED = ".jstep-deleted"
ASIDE = ".aside."
"""The suffix of a checkpoint that was set aside by a command from an error; a number follows."""
SUFFIXES = TEMPORARY, REPLACED, DELETED, ASIDE
_SUFFIX = re.compile("|".join(map(re.escape, SUFFIXES)))

ORBAX_COMMIT_FILE = "commit_success.txt"
"""The file by which Orbax knows that a checkpoint in a bucket is complete."""
ORBAX_ONLY = frozenset({"_METADATA", "_CHECKPOINT_METADATA", ORBAX_COMMIT_FILE})
"""Files in which Orbax describes a checkpoint. The manifest does that here, so a checkpoint is
intact without them."""
ROOT = "manifest.ocdbt"
"""The root of the database of arrays."""
ORBAX_FILES = ORBAX_ONLY | {ROOT}
_STEP = "0|[1-9][0-9]*"
FOUND_NAME = re.compile(rf"(?P<prefix>.+)-(?P<step>{_STEP})(?:{re.escape(REPLACED)})?", re.DOTALL)
"""The name of a complete checkpoint that a reader may find. The old checkpoint of a step has the
suffix if a kill came between the two renames by which a new one takes its place."""


def directory_spec(path: str) -> dict[str, Any]:
    """Return tensorstore's JSON for the files in a directory."""
    return {"driver": "file", "path": path.rstrip("/") + "/"}


def format_name(prefix: str, step: int) -> str:
    return f"{prefix}-{step}"


def misnaming_text(prefix: str, step: int, found: int) -> str:
    return (
        f"its name says step {step}, and it holds step {found}: it was copied or renamed; rename "
        f"it to {prefix}-{found}"
    )


class PossibleCheckpoint(NamedTuple):
    """An entry of a directory that may be a complete checkpoint. They are sorted by these fields.

    Attributes:
        is_final: Whether it has the name of a checkpoint; otherwise it is the old one of its step,
            with `REPLACED`.
    """

    step: int
    is_final: bool
    entry: str


def possible_checkpoints(directory: str, prefix: str | None) -> list[PossibleCheckpoint]:
    """Return every possible checkpoint, highest step first; of one step, the final name first.

    The old one counts only if its successor has never taken its place.
    """
    found: list[PossibleCheckpoint] = []
    for entry in checkpoint_entries(directory, prefix):
        if entry.suffix in ("", REPLACED):
            found.append(
                PossibleCheckpoint(entry.step, not entry.suffix, entry.name + entry.suffix)
            )
    return sorted(found, reverse=True)


def possible_by_prefix(directory: str) -> dict[str, list[PossibleCheckpoint]]:
    """Return `possible_checkpoints` of each prefix, by one list of the directory."""
    found: dict[str, list[PossibleCheckpoint]] = {}
    for possible in possible_checkpoints(directory, None):
        prefix = possible.entry.removesuffix(REPLACED).rpartition("-")[0]
        found.setdefault(prefix, []).append(possible)
    return found


class CheckpointEntry(NamedTuple):
    """A directory's entry that belongs to a checkpoint: the checkpoint's name, and what follows."""

    name: str
    step: int
    suffix: str


def checkpoint_entries(directory: str, prefix: str | None) -> list[CheckpointEntry]:
    start = ".+" if prefix is None else re.escape(prefix)
    suffixes = rf"|{re.escape(TEMPORARY)}(?:-[0-9]+)?|{re.escape(REPLACED)}|{re.escape(DELETED)}"
    pattern = re.compile(rf"(?P<name>{start}-(?P<step>{_STEP}))(?P<suffix>{suffixes})", re.DOTALL)
    found: list[CheckpointEntry] = []
    for entry in list_names(directory):
        match = pattern.fullmatch(entry)
        if match is None or has_suffix(match["name"]):
            continue
        step = step_in(match["step"])
        if step is not None:
            found.append(CheckpointEntry(match["name"], step, match["suffix"]))
    return found


def has_suffix(name: str) -> bool:
    """Return whether a name only reads like a checkpoint's: `model-3.orbax-checkpoint-tmp-7`."""
    return _SUFFIX.search(name) is not None


def list_names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def find_complete(final: str) -> str | None:
    """Return the path of a complete checkpoint; warn once of one that lacks a file."""
    path, lacks = find_complete_or_missing(final)
    if lacks not in (None, MANIFEST_FILE):
        log_once(logging.WARNING, f"{final} is ignored: it is incomplete, {lacks} is missing")
    return path


def find_complete_or_missing(final: str) -> tuple[str | None, str | None]:
    """Return the path of a complete checkpoint, or None and its first missing file."""
    # Saving a step again renames its old checkpoint, gives the new one its name, and deletes the
    # old one. If all this happens between the first two checks, both find nothing, and the third
    # finds the new checkpoint.
    lacks: str | None = MANIFEST_FILE
    for path in (final, final + REPLACED, final):
        lacks = first_missing_file(path)
        if lacks is None:
            return path, None
    return None, lacks


def first_missing_file(path: str) -> str | None:
    """Return the first missing file that a restore reads; None if the checkpoint is complete."""
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        # A corrupted manifest counts as present: restoring raises an error, while skipping it would
        # silently return to an older step. If the directory has no data of a checkpoint, the file
        # is another program's.
        return None if has_data(path) else MANIFEST_FILE
    except OSError as error:
        # An unreadable file (permissions) counts as present, too: it may be intact, and a restore
        # raises the reason.
        return MANIFEST_FILE if is_absent(error) else None
    files = manifest.files.keys() - ORBAX_ONLY
    if manifest.data is not None:  # a copy of what was written below a URL
        files |= {f"{manifest.data}/{ROOT}"}
    return next((file for file in sorted(files) if not may_be_file(os.path.join(path, file))), None)


def has_data(path: str) -> bool:
    """Return whether a directory holds arrays, written here or copied from a bucket."""
    for entry in list_names(path):
        if entry in ORBAX_FILES or (is_attempt(entry) and os.path.isdir(os.path.join(path, entry))):
            return True
    return False


_KEY = re.compile(rf"(?P<name>(?P<prefix>[^/]+)-(?P<step>{_STEP}))/(?P<rest>.+)", re.DOTALL)
_ATTEMPT = re.compile(r"data\.(?:([0-9]{1,15})-)?[^/]+", re.DOTALL)
COPIED = "data.copied"
"""What the index has for a checkpoint that was copied from a disk."""
OBJECT_BYTES = 2**28
"""The bytes of an object with chunks, which is uploaded in one request."""
_ATTEMPT_SECS = 3600
"""Seconds after its beginning in which an attempt may still be written or read."""


def is_attempt(name: str | None) -> bool:
    return name is not None and _ATTEMPT.fullmatch(name) is not None


def is_old(attempt: str, time_now: float) -> bool:
    """Return whether an attempt began so long ago that nothing uses it any more."""
    match = _ATTEMPT.fullmatch(attempt)
    if match is None or match[1] is None:
        return False
    return time_now - int(match[1]) > _ATTEMPT_SECS


def keys_by_prefix(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return the keys of checkpoints by the prefix of their names."""
    found: dict[str, list[str]] = {}
    for key in keys:
        match = _KEY.fullmatch(key)
        if match is not None:
            found.setdefault(match["prefix"], []).append(key)
    return found


class ListedCheckpoints:
    """The checkpoints among the keys of objects, or of an index of them.

    Attributes:
        steps: Name of a checkpoint, complete or not → its step.
        attempts: Name of a checkpoint → its attempts.
    """

    def __init__(self, keys: Iterable[str], prefix: str | None) -> None:
        self.steps: dict[str, int] = {}
        self.attempts: dict[str, list[str]] = {}
        for key in keys:
            match = _KEY.fullmatch(key)
            if match is None or has_suffix(match["name"]):
                continue
            if prefix is not None and match["prefix"] != prefix:
                continue
            step = step_in(match["step"])
            if step is None:
                continue
            name = match["name"]
            part = match["rest"].partition("/")[0]
            if part != MANIFEST_FILE and not is_attempt(part):
                continue
            self.steps[name] = step
            attempts = self.attempts.setdefault(name, [])
            # An attempt has many keys, one after the other, since keys are sorted.
            if is_attempt(part) and attempts[-1:] != [part]:
                attempts.append(part)
