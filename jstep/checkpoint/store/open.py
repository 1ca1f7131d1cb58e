"""From what a user gives as a directory to the store that keeps checkpoints there."""

from jstep.checkpoint.store.directory import Directory
from jstep.checkpoint.store.protocol import Store
from jstep.stores import is_url


def leave(store: Store) -> None:
    """Nobody holds the Saver of a store any more, which was not closed: whoever comes next may end what it began."""
    if isinstance(store, Directory):
        store.is_left = True


def open_store(directory: str, prefix: str | None = None) -> Store:
    """The store of a place.

    Args:
        directory: An absolute path or a URL, as `arguments.directory` returns it.
        prefix: Of the checkpoints that will be written, to tell apart what processes agree on; None only to read.
    """
    if not is_url(directory):
        return Directory(directory, prefix)
    from jstep.checkpoint.store.object_store import ObjectStore  # not at the top: it imports JAX

    return ObjectStore(directory)
