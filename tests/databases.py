"""Databases that jstep does not write, with right checksums: nodes and manifests of OCDBT, byte by
byte."""

import itertools
import pathlib
import struct

import google_crc32c

NAME = "d/" + "0" * 32
"""A file of the database, for nodes of a stranger."""
_MANIFEST, _NODE = 0x0CDB3A2A, 0x0CDB20DE


def number(value):
    """A varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def numbers(values):
    return b"".join(map(number, values))


def sealed(magic, body):
    """Magic number, length, body and checksum."""
    head = struct.pack(">IQ", magic, 0)[:4] + struct.pack("<Q", 4 + 8 + len(body) + 4)
    return head + body + struct.pack("<I", google_crc32c.value(head + body))


def file_table(*paths):
    """Paths without a beginning in common."""
    names = [path.encode() for path in paths]
    lengths = [number(0)] * max(0, len(names) - 1), numbers(map(len, names)), number(0) * len(names)
    return number(len(names)) + b"".join(lengths[0]) + lengths[1] + lengths[2] + b"".join(names)


def keys_part(keys, common=None):
    shared = [0]
    for before, key in itertools.pairwise(keys):
        same = (a == b for a, b in zip(before, key, strict=False))
        shared.append(
            next((i for i, is_same in enumerate(same) if not is_same), min(len(before), len(key)))
        )
    rest = [key[begin:] for key, begin in zip(keys, shared, strict=True)]
    columns = numbers(shared[1:]) + numbers(map(len, rest)) + numbers(common or ())
    return number(len(keys)) + columns + b"".join(rest)


def leaf(values, path=NAME):
    """A leaf: key → bytes, or (start, length) in a file."""
    sizes = [value[1] if isinstance(value, tuple) else len(value) for value in values.values()]
    outside = [value for value in values.values() if isinstance(value, tuple)]
    body = b"\0\0\0" + file_table(path) + keys_part(list(values)) + numbers(sizes)
    body += bytes(isinstance(value, tuple) for value in values.values())
    body += number(0) * len(outside) + numbers(start for start, _ in outside)
    return sealed(
        _NODE, body + b"".join(value for value in values.values() if isinstance(value, bytes))
    )


def interior(height, children, path=NAME):
    """An interior node: (key, length of the beginning of all keys below, start, length of the
    node)."""
    body = b"\0\0" + bytes([height]) + file_table(path)
    body += keys_part([key for key, *_ in children], [common for _, common, *_ in children])
    body += number(0) * len(children) + numbers(child[2] for child in children)
    body += numbers(child[3] for child in children) + number(1) * (3 * len(children))
    return sealed(_NODE, body)


def put(checkpoint, make):
    """Replace the database of a checkpoint: `make(put_node)` returns the height of the root, its
    start and its length.

    `put_node(bytes)` returns the start and the length of what it has written.
    """
    directory = pathlib.Path(checkpoint)
    data = bytearray()

    def put_node(node):
        data.extend(node)
        return len(data) - len(node), len(node)

    height, start, length = make(put_node)
    (directory / NAME).write_bytes(data)
    # The settings are those of the database that was there: its UUID, five numbers and a byte.
    old = (directory / "manifest.ocdbt").read_bytes()
    end = 14 + 16
    for _ in range(3):
        while old[end] & 128:
            end += 1
        end += 1
    body = (
        old[12 : end + 2] + file_table(NAME) + number(1) + number(2) + bytes([height]) + number(0)
    )
    body += number(start) + number(length) + number(1) * 3 + bytes(8) + number(0)
    (directory / "manifest.ocdbt").write_bytes(sealed(_MANIFEST, body))
