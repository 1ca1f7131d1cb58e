"""Opening the store of a directory or URL."""

from jstep.checkpoint.store.directory import Directory
from jstep.checkpoint.store.protocol import Store
from jstep.stores import is_url


def leave(store: Store) -> None:
    """Mark the store of a Saver that was not closed and is no longer referenced: the next writer finishes its save."""
    if isinstance(store, Directory):
        store.is_left = True


def open_store(directory: str, prefix: str | None = None) -> Store:
    """Return the store of a directory.

    Args:
        directory: An absolute path or a URL, as `arguments.directory` returns it.
        prefix: The prefix of the checkpoints to write, which distinguishes barriers of processes; None only to read.
    """
    if not is_url(directory):
        return Directory(directory, prefix)
    from jstep.checkpoint.store.object_store import ObjectStore  # not at the top: it imports JAX

    return ObjectStore(directory)
