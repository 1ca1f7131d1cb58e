"""The manifest as a file of a checkpoint in a directory."""

import functools
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
        return _decoded(data)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


# One that is listed is found, opened and read: the same bytes, three times in a row. Nobody may change what comes back.
_decoded = functools.lru_cache(maxsize=4)(decode)


def write(checkpoint: str, manifest: Manifest) -> None:
    """Puts the manifest into a checkpoint, and both onto the disk."""
    with open(os.path.join(checkpoint, NAME), "wb") as file:
        file.write(encode(manifest))
        file.flush()
        os.fsync(file.fileno())
