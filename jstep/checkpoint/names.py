"""The names of checkpoints, and the newest of a directory."""

import os

from jstep.checkpoint import arguments as checked
from jstep.checkpoint.store import listing
from jstep.checkpoint.store.open import open_store


def checkpoint_name(prefix: str, step: int) -> str:
    """The name of the checkpoint of a step: `prefix-step`.

    Raises:
        TypeError: `prefix` is no string, or `step` no integer.
        ValueError: `step` is negative, or `prefix` cannot be the beginning of a file name.

    Example:
        >>> import jstep
        >>> jstep.checkpoint_name("my-model", 1000)
        'my-model-1000'
    """
    return listing.name(checked.prefix(prefix), checked.step(step))


def latest_checkpoint(directory: str | os.PathLike[str], prefix: str | None = None) -> str | None:
    """The path of the newest whole checkpoint, that of the highest step; None where there is none.

    Args:
        directory: Where the checkpoints are, a path or a URL; it may be missing.
        prefix: Of their names; any where None.

    Example:
        >>> import jstep
        >>> print(jstep.latest_checkpoint("/no/such/directory"))
        None
    """
    prefix = None if prefix is None else checked.prefix(prefix)
    found = next(open_store(checked.directory(directory)).newest_first(prefix), None)
    return None if found is None else found[1]
