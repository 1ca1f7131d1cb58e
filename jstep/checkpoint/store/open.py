"""From what a user gives as a directory to the store that keeps checkpoints there."""

from jstep.checkpoint.store.directory import Directory
from jstep.checkpoint.store.protocol import Store


def open_store(directory: str, prefix: str | None = None) -> Store:
    """The store of a place.

    Args:
        directory: An absolute path, as `arguments.directory` returns it.
        prefix: Of the checkpoints that will be written, to tell apart what processes agree on; None only to read.
    """
    return Directory(directory, prefix)
