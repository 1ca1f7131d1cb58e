"""From what a user gives as a directory to the store that keeps checkpoints there."""

from jstep.checkpoint.store.directory import Directory
from jstep.checkpoint.store.object_store import ObjectStore
from jstep.checkpoint.store.protocol import Store
from jstep.stores import is_url


def open_store(directory: str, prefix: str | None = None) -> Store:
    """The store of a place.

    Args:
        directory: An absolute path or a URL, as `arguments.directory` returns it.
        prefix: Of the checkpoints that will be written, to tell apart what processes agree on; None only to read.
    """
    return ObjectStore(directory) if is_url(directory) else Directory(directory, prefix)
