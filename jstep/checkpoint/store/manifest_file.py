"""The manifest as a file of a checkpoint in a directory."""

import os

from jstep.checkpoint.format.manifest import NAME, CheckpointError, Manifest, decode, encode


def read(checkpoint: str) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: It is damaged (names its path).
        FileNotFoundError: There is none.
    """
    path = os.path.join(checkpoint, NAME)
    with open(path, "rb") as file:
        data = file.read()
    try:
        return decode(data)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def write(checkpoint: str, manifest: Manifest) -> None:
    """Puts the manifest into a checkpoint, and both onto the disk."""
    with open(os.path.join(checkpoint, NAME), "wb") as file:
        file.write(encode(manifest))
        file.flush()
        os.fsync(file.fileno())
