"""The record format of event files (TFRecord), and the messages that records hold.

    uint64 length | uint32 masked CRC-32C of the length | length bytes | uint32 masked CRC-32C of them

all little-endian. Checksums are masked (rotated and shifted by a constant), since a checksum of checksums is weak.

TensorBoard's protos, the CRC-32C in C, and Pillow are imported on first use. Writing imports only
`tensorboard.compat.proto`, which contains message classes: tensorboard's own writer uses `tensorboard.compat.tf`, which
imports TensorFlow if it is installed.
"""

import functools
import importlib
import struct
import types
from collections.abc import Iterator
from typing import Any, BinaryIO

_HOME = {
    "AttrValue": "attr_value_pb2",
    "Event": "event_pb2",
    "GraphDef": "graph_pb2",
    "HistogramProto": "summary_pb2",
    "NodeDef": "node_def_pb2",
    "SessionLog": "event_pb2",
    "Summary": "summary_pb2",
    "SummaryMetadata": "summary_pb2",
    "TensorProto": "tensor_pb2",
    "TensorShapeProto": "tensor_shape_pb2",
    "types": "types_pb2",
}


def _import(module: str, what: str) -> types.ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{what} needs {module.split('.')[0]}, which could not be imported ({error}): pip install jstep[summaries]"
        ) from error


@functools.cache
def proto(name: str) -> Any:
    """Return a message class by name, such as `proto("Event")`; for "types", the module of enums."""
    module = _import(f"tensorboard.compat.proto.{_HOME[name]}", "an event file")
    return module if name == "types" else getattr(module, name)


@functools.cache
def decode_error() -> type[Exception]:
    """Return the exception that protobuf raises for bytes that are not a message."""
    error: type[Exception] = _import("google.protobuf.message", "an event file").DecodeError
    return error


@functools.cache
def hparams_protos() -> tuple[Any, Any]:
    """Return the modules of TensorBoard's HParams messages: `api_pb2` and `plugin_data_pb2`."""
    home = "tensorboard.plugins.hparams."
    what = "add_hparams"
    return _import(home + "api_pb2", what), _import(home + "plugin_data_pb2", what)


@functools.cache
def crc32c() -> Any:
    """Return a function from bytes to their CRC-32C as an int, computed in C."""
    return _import("google_crc32c", "an event file").value


@functools.cache
def pillow_image() -> Any:
    """Return Pillow's `Image` module; Pillow is a dependency of tensorboard."""
    return _import("PIL.Image", "an image summary")


def is_message(x: Any, name: str) -> bool:
    """Whether x is a proto message of this name, from tensorboard or from TensorFlow."""
    descriptor = getattr(x, "DESCRIPTOR", None)
    return getattr(descriptor, "full_name", "").rpartition(".")[2] == name and hasattr(x, "SerializeToString")


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
