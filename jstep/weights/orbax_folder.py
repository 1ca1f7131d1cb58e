"""Finding of the arrays of an Orbax checkpoint among its files, without importing Orbax."""

import json
import os
import re

from jstep.checkpoint.listing import OF_ORBAX, TEMPORARY, listed
from jstep.checkpoint.manifest import NAME as MANIFEST

METADATA = "_METADATA"
_ARRAYS = "manifest.ocdbt"
_DEFAULT = "default"  # the item of a CheckpointManager that was given only one
_STEP = re.compile(r"(?:.*[_-])?[0-9]+")
_SHOWN = 10  # folders listed in a message


def folder_of(path: str) -> str | None:
    """Return the folder with the arrays of a checkpoint: the folder itself, or an item of a CheckpointManager's step.

    Args:
        path: The path of a folder.

    Returns:
        The folder; None if Orbax did not write any.

    Raises:
        ValueError: The checkpoint is incomplete, or the folder has several checkpoints or items.
    """
    if TEMPORARY in os.path.basename(os.path.abspath(path)):
        raise ValueError(
            f"path={path!r}: this checkpoint of Orbax is incomplete: its save was interrupted, or still runs"
        )
    entries = set(listed(path))
    if METADATA in entries:
        return _with_arrays(path)
    folders = sorted(name for name in entries if os.path.isdir(os.path.join(path, name)))
    if _ARRAYS in entries:
        raise _without_metadata(path)
    checkpoints = sorted((name for name in folders if _is_checkpoint(path, name)), key=_step)
    if checkpoints:
        raise ValueError(
            f"path={path!r}: is a directory of checkpoints ({', '.join(checkpoints[-_SHOWN:])}); pass the path of one, "
            f"such as {os.path.join(path, checkpoints[-1])!r}"
        )
    items = [name for name in folders if METADATA in listed(os.path.join(path, name)) and TEMPORARY not in name]
    if _DEFAULT in items or len(items) == 1:
        return _with_arrays(os.path.join(path, _DEFAULT if _DEFAULT in items else items[0]))
    if items:
        raise ValueError(
            f"path={path!r}: has several items or checkpoints ({', '.join(items[:_SHOWN])}); pass the path of one, "
            f"such as {os.path.join(path, items[0])!r}"
        )
    unfinished = [name for name in folders if TEMPORARY in name]
    if unfinished:
        raise ValueError(
            f"path={path!r}: has only {unfinished[0]}, an incomplete checkpoint of Orbax: its save was interrupted, or "
            "still runs"
        )
    if entries & OF_ORBAX:
        raise _without_metadata(path)
    return None


def _with_arrays(folder: str) -> str:
    """Return the folder if the file that lists its arrays exists: without it, Orbax prints errors of its threads."""
    with open(os.path.join(folder, METADATA), "rb") as file:
        try:
            metadata = json.load(file)
        except ValueError:
            return folder  # for Orbax to describe
    if isinstance(metadata, dict) and metadata.get("use_ocdbt") and _ARRAYS not in listed(folder):
        raise ValueError(f"{folder}: a checkpoint of Orbax without {_ARRAYS}: its copy is incomplete; copy it again")
    return folder


def _without_metadata(path: str) -> ValueError:
    return ValueError(
        f"path={path!r}: a checkpoint of Orbax without {METADATA}: its copy is incomplete, or an old version wrote it; "
        "in the latter case, restore it with Orbax and save it again with ocp.StandardCheckpointer"
    )


def _is_checkpoint(above: str, name: str) -> bool:
    """Return whether a folder is a checkpoint of Orbax or jstep that is named by its step."""
    path = os.path.join(above, name)
    entries = set(listed(path))
    is_one = bool(entries & {MANIFEST, *OF_ORBAX}) or any(
        METADATA in listed(os.path.join(path, one)) for one in entries
    )
    return _STEP.fullmatch(name) is not None and is_one


def _step(name: str) -> int:
    return int(re.split("[_-]", name)[-1])
