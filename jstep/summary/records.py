"""The record format of event files (TFRecord).

    uint64 length | uint32 masked CRC-32C of the length | length bytes | uint32 masked CRC-32C of them

all little-endian. Checksums are masked (rotated and shifted by a constant), since a checksum of checksums is weak.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO

from jstep.summary.proto import crc32c

HEADER = 12
FOOTER = 4
_MASK_DELTA = 0xA282EAD8


class DataLossError(Exception):
    """A record of an event file is corrupted.

    Attributes:
        path: The file.
        offset: The start of the record, in bytes from the beginning of the file.
    """

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"{path}: corrupted record at offset {offset}: {reason}")
        self.path = path
        self.offset = offset


MAX_LENGTH = 2**31
"""The size limit of a protobuf message; messages are smaller."""


def masked_crc(data: bytes) -> int:
    """Return the masked CRC-32C of the data."""
    crc = crc32c()(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """Encode the data as one record.

    Raises:
        ValueError: The data is longer than readers accept.
    """
    if len(data) >= MAX_LENGTH:
        raise ValueError(f"an event of {len(data)} bytes: must be less than 2³¹ bytes, the limit of a proto")
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", masked_crc(length)), data, struct.pack("<I", masked_crc(data))))


def read_records(file: BinaryIO, path: str) -> Iterator[bytes]:
    """Iterate over the data of the records; an incomplete record at the end of the file ends the iteration.

    Raises:
        DataLossError: A checksum does not match; the message has the offset of the record.
    """
    offset = 0
    while True:
        header = file.read(HEADER)
        if len(header) < HEADER:
            return
        length, crc = struct.unpack("<QI", header)
        if crc != masked_crc(header[:8]):
            raise DataLossError(path, offset, "the checksum of its length does not match")
        if length >= MAX_LENGTH:
            raise DataLossError(path, offset, f"it claims {length} bytes, more than an event can have")
        data = _read(file, length)
        footer = file.read(FOOTER) if len(data) == length else b""
        if len(footer) < FOOTER:
            return
        if struct.unpack("<I", footer)[0] != masked_crc(data):
            raise DataLossError(path, offset, f"the checksum of its {length} bytes does not match")
        yield data
        offset += HEADER + length + FOOTER


def _read(file: BinaryIO, length: int) -> bytes:
    """Read up to `length` bytes in parts, so that a malicious length allocates no more than the file holds."""
    parts = []
    while length and (part := file.read(min(length, 1 << 24))):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
