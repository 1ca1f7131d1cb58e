"""The index of the database of a checkpoint's arrays: what is stored under which key, and where.

It is read here before tensorstore reads it, because tensorstore trusts an index. A malicious one
may name one child many times, or one chunk under many keys, so that a few kilobytes become an
endless list. Keys that share a long prefix may expand to thousands of times the bytes of their node
(`tensorstore.ocdbt.dump` writes them all out: 200 kB take 2.3 GB). Here, time and memory are
proportional to the bytes of the nodes.

An OCDBT database is a tree of nodes. The manifest names its root, an interior node its children,
and a leaf the values, which lie in files, or in the node itself if they are small:

    manifest, node   magic number | length | version 0 | compression 0 | body | CRC-32C
    body of a node   height | paths of files | keys | children, or values

Lists are stored by column: all file IDs, then all offsets, and so on. Source:
https://google.github.io/tensorstore/kvstore/ocdbt/index.html#on-disk-format
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from jstep.array_store.listing import ROOT
from jstep.stores.untrusted import Extents, UntrustedError, is_database_file

ReadRange: TypeAlias = Callable[[str, int, int | None], bytes | None]
"""`read(path, start, stop)` returns bytes of a file of the database, or None if it is missing or
shorter."""

_MANIFEST_MAGIC = b"\x0c\xdb\x3a\x2a"
_NODE_MAGIC = b"\x0c\xdb\x20\xde"
_HEAD_BYTES = 12
_CHECKSUM_BYTES = 4
_UUID_BYTES = 16
_TIME_BYTES = 8
# The kinds of values.
_INLINE_VALUE = 0
_FILE_VALUE = 1
_MAX_NUMBER_BYTES = 10
MAX_PATH_BYTES = 2**10
"""The maximum bytes of the path of an array that is saved."""
# The keys of a node may have `_KEY_ROOM` bytes, and `_MAX_KEY_RATIO` times the bytes of the node.
# For a chunk, a node has at least nine bytes, and the key is the path of the array and up to 128
# bytes with the number of the chunk.
_MAX_KEY_RATIO = (MAX_PATH_BYTES + 128) // 9
_KEY_ROOM = 2**12


class Extent(NamedTuple):
    """A range of bytes of a file, whose path is below the directory of the database."""

    path: str
    start: int
    length: int


class ArrayIndex(NamedTuple):
    """The content of a database.

    Attributes:
        values: Key → where its value is, or the value itself. No two values share a byte.
        damaged: Why some nodes could not be read. Nothing is known about the keys below them.
    """

    values: dict[str, Extent | bytes]
    damaged: list[str]

    def chunk_bytes(self) -> dict[str, int]:
        """Return array → the bytes of its chunks: `NAME/c`, or `NAME/c/0/1`."""
        sizes: dict[str, int] = {}
        for key, value in self.values.items():
            # At the last `/c/`: the name of an array may contain others.
            name, separator, _ = f"{key}/".rpartition("/c/")
            if separator:
                nbytes = len(value) if isinstance(value, bytes) else value.length
                sizes[name] = sizes.get(name, 0) + nbytes
        return sizes


class _Node(NamedTuple):
    """A reference to a node, which stores its keys without the prefix that they all have."""

    extent: Extent
    height: int
    prefix: bytes


class _DamagedError(Exception):
    """Some bytes are not those that were written."""


def read_index(read: ReadRange) -> ArrayIndex | None:
    """Read the index of a database; None if it has no manifest.

    Raises:
        UntrustedError: It is not an index that jstep writes.
    """
    manifest = read(ROOT, 0, None)
    if manifest is None:
        return None
    index = ArrayIndex({}, [])
    level: list[_Node] = []
    try:
        level = _root_of(manifest)
    except _DamagedError as error:
        index.damaged.append(f"{ROOT} {error}")
    extents = Extents()
    while level:
        for node in level:
            extents.add(*node.extent)
        # Before they are read: a tree that names each node twice has twice as many on each level.
        extents.check()
        next_level: list[_Node] = []
        for node in level:
            path, start, length = node.extent
            try:
                body = _body(read(path, start, start + length), _NODE_MAGIC)
            except _DamagedError as error:
                index.damaged.append(f"{path} {error}")
                continue
            children, values = _content_of(body, node)
            next_level += children
            for key, value in values:
                index.values[key.decode(errors="surrogateescape")] = value
                if isinstance(value, Extent):
                    extents.add(*value)
        level = next_level
    extents.check()
    return index


def _root_of(manifest: bytes) -> list[_Node]:
    body = _body(manifest, _MANIFEST_MAGIC)
    body.take(_UUID_BYTES)
    # The kind of the manifest, and the maximum bytes of a value in a node, and of a node.
    body.numbers(3)
    body.take(1)  # the arity of the tree of versions
    if body.number() != 0:
        raise UntrustedError("its nodes are compressed")
    paths = body.paths()
    count = body.number()
    body.numbers(count)  # the numbers of the versions
    heights = body.take(count)
    roots = body.extents(paths, count)
    body.numbers(3 * count)  # statistics
    body.take(_TIME_BYTES * count)
    if body.number() != 0:
        raise UntrustedError("its versions are a tree")
    body.check_end()
    # An empty database has a version with a root that is not stored, whose path is empty.
    if not roots or not roots[-1].path:
        return []
    newest = roots[-1]
    _check_database_files([newest.path])
    return [_Node(newest, heights[-1], b"")]


def _content_of(
    body: "_Body", node: _Node
) -> tuple[list[_Node], Iterable[tuple[bytes, Extent | bytes]]]:
    """Return the children of an interior node, or the keys and values of a leaf."""
    (height,) = body.take(1)
    if height != node.height:
        raise UntrustedError(f"a node at the height {node.height} says that it is at {height}")
    paths = body.paths()
    _check_database_files(paths)
    count = body.number()
    if not count:
        raise UntrustedError("a node has no keys")
    # A key has the first bytes of the one before, as many as are shared, and then its own.
    shared_bytes = [0, *body.numbers(max(0, count - 1))]
    own_bytes = body.numbers(count)
    # How many bytes of a child's key all keys below the child begin with. They become its `prefix`.
    prefix_bytes = body.numbers(count) if height else ()
    key_bytes = sum(shared_bytes) + sum(own_bytes) + count * len(node.prefix)
    if key_bytes > _KEY_ROOM + _MAX_KEY_RATIO * node.extent.length:
        raise UntrustedError(f"a node of {node.extent.length} bytes has keys of {key_bytes}")
    keys = [node.prefix + key for key in _keys(body, shared_bytes, own_bytes)]
    if height:
        extents = body.extents(paths, count)
        body.numbers(3 * count)  # statistics
        children = [
            _Node(extent, height - 1, key[: len(node.prefix) + length])
            for key, length, extent in zip(keys, prefix_bytes, extents, strict=True)
        ]
        body.check_end()
        return children, ()
    return [], zip(keys, _values(body, paths, count), strict=True)


def _keys(body: "_Body", shared_bytes: Sequence[int], own_bytes: Sequence[int]) -> Iterator[bytes]:
    key = b""
    for shared_length, own_length in zip(shared_bytes, own_bytes, strict=True):
        if shared_length > len(key):
            raise UntrustedError("a key shares more bytes with the one before than that has")
        key = key[:shared_length] + body.take(own_length)
        yield key


def _values(body: "_Body", paths: Sequence[str], count: int) -> list[Extent | bytes]:
    lengths = body.numbers(count)
    kinds = body.take(count)
    # First the places of all values in files, and then the bytes of all others.
    lengths_in_files = [
        length for length, kind in zip(lengths, kinds, strict=True) if kind == _FILE_VALUE
    ]
    ids = body.numbers(len(lengths_in_files))
    starts = body.numbers(len(lengths_in_files))
    extents = iter(_extents(paths, ids, starts, lengths_in_files))
    values: list[Extent | bytes] = []
    for length, kind in zip(lengths, kinds, strict=True):
        if kind == _INLINE_VALUE:
            values.append(body.take(length))
        elif kind == _FILE_VALUE:
            values.append(next(extents))
        else:
            raise UntrustedError(f"a value is of the kind {kind}")
    body.check_end()
    return values


def _check_database_files(paths: Iterable[str]) -> None:
    for path in paths:
        if not is_database_file(path):
            raise UntrustedError(f"it names {path!r:.80}, which is not a file of a database")


def _extents(
    paths: Sequence[str], ids: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
) -> list[Extent]:
    """Return extents, whose files are given as numbers in a table of paths."""
    if ids and max(ids) >= len(paths):
        raise UntrustedError("it names a file that is not in its table")
    return [
        Extent(paths[i], start, length)
        for i, start, length in zip(ids, starts, lengths, strict=True)
    ]


# The bytes of a manifest or node.


def _body(data: bytes | None, magic: bytes) -> "_Body":
    if data is None:
        raise _DamagedError("is missing, or truncated")
    checksum = _checksum()
    stored = int.from_bytes(data[-_CHECKSUM_BYTES:], "little")
    if checksum is not None and checksum(data[:-_CHECKSUM_BYTES]) != stored:
        raise _DamagedError("has another checksum")
    nbytes = int.from_bytes(data[len(magic) : _HEAD_BYTES], "little")
    if data[: len(magic)] != magic or nbytes != len(data):
        raise UntrustedError("it is not an index, or has another length")
    body = _Body(data[_HEAD_BYTES:-_CHECKSUM_BYTES])
    if list(body.numbers(2)) != [0, 0]:
        raise UntrustedError("it is compressed, or of another version")
    return body


def _checksum() -> Callable[[bytes], int] | None:
    # An installation without dependencies lacks the package. Then tensorstore finds damaged nodes
    # when it reads them.
    try:
        import google_crc32c
    except ImportError:
        return None
    value: Callable[[bytes], int] = google_crc32c.value
    return value


class _Body:
    """The body of a manifest or node, from which values are taken one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._bytes = np.frombuffer(data, np.uint8)
        self._position = 0

    def take(self, count: int) -> bytes:
        start = self._position
        self._position += count
        if self._position > len(self._data):
            raise UntrustedError("it is shorter than it says")
        return self._data[start : self._position]

    def number(self) -> int:
        (number,) = self.numbers(1)
        return number

    def numbers(self, count: int) -> Sequence[int]:
        """Take varints: seven bits a byte, lowest first; the eighth says that another follows."""
        if count > len(self._data) - self._position:  # before memory for them is allocated
            raise UntrustedError("it is shorter than it says")
        if count == 0:
            return ()
        part = self._bytes[self._position : self._position + _MAX_NUMBER_BYTES * count]
        stops = np.flatnonzero(part < 128)[:count] + 1
        if len(stops) < count:
            raise UntrustedError("it is shorter than it says")
        starts = np.concatenate([[0], stops[:-1]])
        lengths = stops - starts
        if lengths.max() > _MAX_NUMBER_BYTES:
            raise UntrustedError("a number has too many bytes")
        values = np.zeros(count, np.uint64)
        # All numbers at once: the first byte of each, then the second byte of those that have one.
        for i in range(int(lengths.max())):
            has_byte = lengths > i
            bits = part[starts[has_byte] + i] & np.uint64(127)
            values[has_byte] |= bits << np.uint64(7 * i)
        self._position += int(stops[-1])
        found: Sequence[int] = values.tolist()
        return found

    def paths(self) -> list[str]:
        """Take the table of files: their paths, stored like keys."""
        count = self.number()
        shared_bytes = [0, *self.numbers(max(0, count - 1))]
        own_bytes = self.numbers(count)
        # How much of each path is that of a database which was merged into this one.
        self.numbers(count)
        if sum(shared_bytes) + sum(own_bytes) > _KEY_ROOM + _MAX_KEY_RATIO * len(self._data):
            raise UntrustedError("the paths of its files are longer than it is")
        paths = _keys(self, shared_bytes[:count], own_bytes)
        return [path.decode(errors="surrogateescape") for path in paths]

    def extents(self, paths: Sequence[str], count: int) -> list[Extent]:
        ids = self.numbers(count)
        starts = self.numbers(count)
        lengths = self.numbers(count)
        return _extents(paths, ids, starts, lengths)

    def check_end(self) -> None:
        if self._position != len(self._data):
            raise UntrustedError("it is longer than it says")
