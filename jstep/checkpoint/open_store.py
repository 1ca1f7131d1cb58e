"""The store of a directory or URL."""

from jstep.checkpoint.directory_store import DirectoryStore
from jstep.checkpoint.store import Store
from jstep.stores.urls import is_url


def open_store(directory: str, prefix: str | None = None) -> Store:
    """Return the store of a path or URL from `check_directory`.

    Args:
        prefix: The prefix of the checkpoints to write, which distinguishes barriers of processes; None only to read.
    """
    if not is_url(directory):
        return DirectoryStore(directory, prefix)
    from jstep.checkpoint.object_store import ObjectStore  # not at the top: it imports JAX

    return ObjectStore(directory, prefix)
