"""Names of checkpoints, the newest checkpoint of a directory, and its store."""

import os

from jstep.checkpoint import arguments as checked
from jstep.checkpoint.store import listing
from jstep.checkpoint.store.directory import Directory
from jstep.checkpoint.store.protocol import Store
from jstep.stores import is_url


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


def checkpoint_name(prefix: str, step: int) -> str:
    """Return the name of the checkpoint of a step: `prefix-step`.

    Raises:
        TypeError: `prefix` is not a string, or `step` is not an integer.
        ValueError: `step` is negative, or `prefix` cannot be the beginning of a file name.

    Example:
        >>> import jstep
        >>> jstep.checkpoint_name("my-model", 1000)
        'my-model-1000'
    """
    return listing.name(checked.prefix(prefix), checked.step(step))


def latest_checkpoint(directory: str | os.PathLike[str], prefix: str | None = None) -> str | None:
    """Return the path of the newest complete checkpoint (highest step), or None if the directory has none.

    Args:
        directory: The directory of the checkpoints, a path or a URL; it may be missing.
        prefix: The prefix of the checkpoint names; None for any prefix.

    Example:
        >>> import jstep
        >>> print(jstep.latest_checkpoint("/no/such/directory"))
        None
    """
    prefix = None if prefix is None else checked.prefix(prefix)
    found = next(open_store(checked.directory(directory)).newest_first(prefix), None)
    return None if found is None else found[1]
