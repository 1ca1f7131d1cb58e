"""The manifest as a file of a checkpoint in a directory."""

import functools
import os

from jstep.checkpoint.format.manifest import NAME, CheckpointError, Manifest, decode, encode
from jstep.stores import new_file


def read(checkpoint: str) -> Manifest:
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


def write(checkpoint: str, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, and flush it to disk."""
    with new_file(os.path.join(checkpoint, NAME)) as file:
        file.write(encode(manifest))
