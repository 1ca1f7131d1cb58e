"""The index of a checkpoint on a disk."""

import pathlib

from jstep.array_store.array_index import read_index


def read_index_of(path):
    def read(name, start, stop):
        file = pathlib.Path(path, name)
        return file.read_bytes()[start:stop] if file.exists() else None

    return read_index(read)
