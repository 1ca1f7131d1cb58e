"""Reading files, be they of this machine or objects: what logs and the command line need."""

import io
import os
from typing import BinaryIO

from jstep.stores.directory import Directory
from jstep.stores.objects import Objects
from jstep.stores.urls import is_url, join, split


def opened(path: str) -> BinaryIO:
    """A file to read; an object is read whole, now.

    Raises:
        FileNotFoundError: There is none.
        OSError: It cannot be read.
    """
    if not is_url(path):
        return open(path, "rb")
    above, name = split(path)
    data = Objects(above).read(name).data if name else None
    if data is None:
        raise FileNotFoundError(f"{path}: there is no such object")
    return io.BytesIO(data)


def is_directory(path: str) -> bool:
    """Whether it is a directory, or anything lies below the URL.

    Raises:
        OSError: The store cannot be listed.
    """
    return bool(Directory(path).listing()) if is_url(path) else os.path.isdir(path)


def names_in(path: str) -> list[str]:
    """The names of the files in a directory itself, sorted.

    Raises:
        OSError: It cannot be listed.
    """
    names = Directory(path).listing() if is_url(path) else os.listdir(path)
    return sorted(name for name in names if "/" not in name) if is_url(path) else sorted(names)


def walked(path: str) -> list[tuple[str, list[str]]]:
    """Every directory at and below one, with the names of its files: what `os.walk` finds, sorted.

    Raises:
        OSError: It cannot be listed.
    """
    if not is_url(path):
        return sorted((folder, names) for folder, _, names in os.walk(path))
    found: dict[str, list[str]] = {}
    for key in Directory(path).listing():
        folder, _, name = key.rpartition("/")
        found.setdefault(join(path, folder) if folder else path, []).append(name)
    return sorted(found.items())
