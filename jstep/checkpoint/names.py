"""Names of checkpoints: their directories and prefixes, the newest one, and the store that has them."""

import os
from typing import Any

from jstep.checkpoint import listing
from jstep.checkpoint.directory import DirectoryStore
from jstep.checkpoint.store import Store
from jstep.core.checks import as_int, as_text, shown
from jstep.stores.urls import absolute, is_url, location

_LONGEST = 180  # file names have at most 255 bytes; the step and temporary suffixes take some of them


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
    return listing.name(checked_prefix(prefix), as_int(step, "step", 0))


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
    prefix = None if prefix is None else checked_prefix(prefix)
    return next((path for _, path in open_store(checked_directory(directory)).newest_first(prefix)), None)


def open_store(directory: str, prefix: str | None = None) -> Store:
    """Return the store of a directory.

    Args:
        directory: An absolute path or a URL, as `checked_directory` returns it.
        prefix: The prefix of the checkpoints to write, which distinguishes barriers of processes; None only to read.
    """
    if not is_url(directory):
        return DirectoryStore(directory, prefix)
    from jstep.checkpoint.object_store import ObjectStore  # not at the top: it imports JAX

    return ObjectStore(directory, prefix)


def checked_directory(directory: Any) -> str:
    """Return an absolute path, or the URL of an object store."""
    path = absolute(location(directory, "directory"))
    if not is_utf8(path):
        raise ValueError(
            f"directory={path!r}: must be encodable as UTF-8, or tensorstore cannot write there; give another one"
        )
    if "\\" in path and os.sep != "\\":
        raise ValueError(
            f"directory={path!r}: must not contain a backslash, which tensorstore reads as a slash; give another one"
        )
    if not is_url(path) and os.path.lexists(path) and not os.path.isdir(path):
        raise NotADirectoryError(f"directory={path!r}: must be a directory, but there is a file of that name")
    return path


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can encode a string: it has no half of a surrogate pair."""
    return text.encode(errors="replace").decode() == text


def checked_prefix(prefix: Any) -> str:
    """Return a valid prefix of checkpoint names."""
    hint = "the beginning of a file name, such as 'model'"
    text = as_text(prefix, "prefix", hint)
    if text in (".", "..") or any(c in text for c in ("/", "\\", os.sep, "\0")):
        raise ValueError(f"prefix={text!r}: must be {hint}; pass directories as `directory`")
    if not is_utf8(text):
        raise ValueError(f"prefix={text!r}: must be encodable as UTF-8")
    if (length := len(text.encode())) > _LONGEST:
        raise ValueError(
            f"prefix={shown(text)}: must be at most {_LONGEST} bytes, got {length}; file systems refuse it"
        )
    return text
