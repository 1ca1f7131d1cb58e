"""Reading of event files: the record format (TFRecord) and the messages that records hold."""

import bisect
import functools
import importlib
import os
import re
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jstep.core.tables import printable
from jstep.stores.files import is_directory, names_in, open_for_reading, walk
from jstep.stores.untrusted import is_below_or_beside
from jstep.stores.urls import is_url, join_path, location

# A record of an event file is
#
#     uint64 length | uint32 masked CRC-32C of length | length bytes | uint32 masked CRC-32C of them
#
# all little-endian. Checksums are masked (rotated and shifted by a constant), since a checksum of
# checksums is weak.
#
# TensorBoard's protos, the CRC-32C in C, and Pillow are imported on first use. Writing imports only
# `tensorboard.compat.proto`, which contains message classes: tensorboard's own writer uses
# `tensorboard.compat.tf`, which imports TensorFlow if it is installed.

_PROTOS = ("event_pb2", "summary_pb2", "tensor_pb2", "tensor_shape_pb2", "types_pb2", "graph_pb2")


@functools.cache
def import_extra(module: str, what: str = "an event file") -> Any:
    """Import a module of the extra `summaries`; the error names `what`, which needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{what} needs {module.split('.')[0]}, which could not be imported ({error}): pip "
            "install jstep[summaries]"
        ) from error


@functools.cache
def proto(name: str) -> Any:
    """Return a message class, or an enumeration, of TensorBoard's protos."""
    for module_name in _PROTOS:
        module = import_extra(f"tensorboard.compat.proto.{module_name}")
        if hasattr(module, name):
            return getattr(module, name)
    raise LookupError(f"{name} is in none of TensorBoard's {_PROTOS}")


def decode_error() -> type[Exception]:
    return import_extra("google.protobuf.message").DecodeError


def parse_message(data: bytes, name: str, what: str) -> Any:
    """Return a message of bytes that a user gave; `what` is for the error."""
    try:
        return proto(name).FromString(data)
    except decode_error() as error:
        raise TypeError(
            f"{what}: {len(data)} bytes that are not a serialized {name}: {error}"
        ) from error


def is_message(x: object, name: str) -> bool:
    """Return whether a value is a message of this name, of any package: TensorFlow has its own."""
    descriptor = getattr(x, "DESCRIPTOR", None)
    full_name = getattr(descriptor, "full_name", "")
    return full_name.rpartition(".")[2] == name and hasattr(x, "SerializeToString")


CHECKSUMS = "google_crc32c"
"""The module that computes CRC-32Cs in C."""
HEADER = 12
"""The bytes of a record before its data."""
FOOTER = 4
"""The bytes after them."""
_MASK_DELTA = 0xA282EAD8
MAX_LENGTH = 2**31
"""The size limit of a protobuf message; messages are smaller."""
_PART = 2**20
"""The bytes of a record that are read at once."""


class DataLossError(Exception):
    """A record of an event file is corrupted.

    Attributes:
        path: The file.
        offset: The start of the record, in bytes from the beginning of the file.
    """

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(path, offset, reason)  # pickle calls it with these arguments
        self.path = path
        self.offset = offset
        self._reason = reason

    def __str__(self) -> str:
        return f"{printable(self.path)}: corrupted record at offset {self.offset}: {self._reason}"


def masked_crc(data: bytes) -> int:
    crc = import_extra(CHECKSUMS).value(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """Return a record."""
    length = struct.pack("<Q", len(data))
    length_crc = struct.pack("<I", masked_crc(length))
    data_crc = struct.pack("<I", masked_crc(data))
    return b"".join((length, length_crc, data, data_crc))


def read_records(file: BinaryIO, path: str) -> Iterator[tuple[int, bytes]]:
    """Iterate over offsets and data of records, up to an incomplete one at the end of the file."""
    offset = 0
    while True:
        header = file.read(HEADER)
        if len(header) < HEADER:
            return
        length, crc = struct.unpack("<QI", header)
        if crc != masked_crc(header[:8]):
            raise DataLossError(path, offset, "the checksum of its length does not match")
        if length >= MAX_LENGTH:
            raise DataLossError(
                path, offset, f"it claims {length} bytes, more than an event can have"
            )
        data = _read_data(file, length)
        if len(data) < length:
            return
        footer = file.read(FOOTER)
        if len(footer) < FOOTER:
            return
        if struct.unpack("<I", footer)[0] != masked_crc(data):
            raise DataLossError(path, offset, f"the checksum of its {length} bytes does not match")
        yield offset, data
        offset += HEADER + length + FOOTER


def _read_data(file: BinaryIO, length: int) -> bytes:
    """Read the data of a record, which may be truncated."""
    # In parts: one read would first allocate memory for as many bytes as the record claims.
    parts: list[bytes] = []
    left = length
    while left:
        part = file.read(min(left, _PART))
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


# Reading of event files: finding them, their events, and their scalars.


def is_event_file(name: str) -> bool:
    return "tfevents" in os.path.basename(name)


_RUN_SUFFIX = re.compile(r"(?:\.(?P<directory>[0-9a-f]{8}))?\.(?P<run>[0-9a-f]{8})\Z")


class Writer(NamedTuple):
    """The writer of an event file, according to the name of the file.

    Attributes:
        run: The ID of the run; None for a user's writer.
        directory: A hash of the path of the run's directory, relative to the logdir.
    """

    run: str | None
    directory: str | None

    @classmethod
    def parse(cls, name: str) -> "Writer":
        """Return the writer that the name of a file names."""
        suffix = _RUN_SUFFIX.search(name)
        if suffix is None:
            return cls(None, None)
        return cls(suffix["run"], suffix["directory"])


def event_files(path: str) -> list[str]:
    """Return event files of a directory (or URL) in the order of writing, or a single file itself.

    Directories and pipes are skipped.
    """
    if not is_directory(path):
        return [path]
    return _event_files_among(path, names_in(path))


def find_runs(logdir: str) -> list[str]:
    return [path for path, names in walk(logdir) if _event_files_among(path, names)]


def _event_files_among(path: str, names: list[str]) -> list[str]:
    files = [join_path(path, name) for name in filter(is_event_file, names)]
    if is_url(path):
        return files
    found = []
    for file in files:
        if not os.path.isfile(file):
            continue
        # The links in a directory were made by its author, who may be somebody else.
        if os.path.islink(file) and not is_below_or_beside(file, os.path.dirname(file)):
            continue
        found.append(file)
    return found


def summary_iterator(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Iterate over the events of an event file.

    The checksum of each record is verified. An incomplete record at the end of the file, as left by
    a run that was killed, ends the iteration after the complete events.

    Args:
        path: An event file, or the URL of one in an object store.

    Returns:
        An iterator over `Event` protos (of `tensorboard.compat.proto.event_pb2`).

    Raises:
        FileNotFoundError: The file does not exist.
        IsADirectoryError: The path is a directory.
        OSError: The path is not a regular file.
        DataLossError: While iterating: a record is corrupted; the message has the path and the
            offset.
        ImportError: tensorboard is not installed.

    Example:
        >>> import tempfile, jstep.summary
        >>> with jstep.summary.SummaryWriter(tempfile.mkdtemp()) as writer:
        ...     writer.add_summary(jstep.summary.scalar("loss", 0.5), global_step=1)
        >>> for event in jstep.summary.summary_iterator(writer.path):
        ...     for value in event.summary.value:
        ...         print(event.step, value.tag, value.simple_value)
        1 loss 0.5

    Source: TensorFlow's `tf.train.summary_iterator`.
    """
    path = location(path, "path")
    event = proto("Event")
    file = open_for_reading(path)  # a missing file is an error here, not at the first event

    def events() -> Iterator[Any]:
        with file:
            for offset, data in read_records(file, path):
                try:
                    decoded = event.FromString(data)
                except decode_error() as error:
                    raise DataLossError(path, offset, f"it is not an Event: {error}") from error
                yield decoded

    return events()


class Point(NamedTuple):
    """A scalar at a step, with `wall_time` in seconds since 1970."""

    step: int
    wall_time: float
    value: float


class Series:
    """The points of a tag, in arrays.

    `rewound` has the points that later ones have replaced, for the last 100 replacements.
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self.times = array("d")
        self.values = array("d")
        self.rewound: deque[tuple[array[int], array[float]]] = deque(maxlen=100)

    def points(self) -> list[Point]:
        return list(map(Point, self.steps, self.times, self.values))

    def append(self, step: int, time: float, value: float) -> None:
        """Add a point, which replaces the points from its step on."""
        steps = self.steps
        if steps and steps[-1] >= step:
            self.drop_from(step)
        steps.append(step)
        self.times.append(time)
        self.values.append(value)

    def drop_from(self, step: int) -> None:
        if self.steps and self.steps[-1] >= step:
            first = bisect.bisect_left(self.steps, step)
            self.rewound.append((self.steps[first:], self.values[first:]))
            del self.steps[first:], self.times[first:], self.values[first:]


def read_series(
    files: Iterable[str], on_corrupted: Callable[[DataLossError], None]
) -> dict[str, Series]:
    """Return tag → points of some files, in the order of the tags' first events.

    Steps increase within a series: a session that starts at step N replaces the earlier points from
    N on, and so does a repeated step. `on_corrupted` receives the error of each corrupted file,
    whose earlier events are kept.
    """
    series: dict[str, Series] = {}
    for file in files:
        try:
            for event in summary_iterator(file):
                _add(series, event)
        except DataLossError as error:
            on_corrupted(error)
    return series


def _add(series: dict[str, Series], event: Any) -> None:
    if event.session_log.status == proto("SessionLog").START:
        for points in series.values():
            points.drop_from(event.step)
    step = event.step
    time = event.wall_time
    for value in event.summary.value:
        number = _number(value)
        if number is None:
            continue
        tag = value.tag
        if tag not in series:
            series[tag] = Series()
        series[tag].append(step, time, number)


def _number(value: Any) -> float | None:
    """Return the scalar in a value, or None; TensorFlow 2 writes scalars as tensors."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        number: float = value.simple_value
        return number
    if kind == "tensor" and value.metadata.plugin_data.plugin_name == "scalars":
        tensor = value.tensor
        if tensor.dtype == proto("DataType").DT_FLOAT:  # the only one that it writes
            content = tensor.tensor_content
            numbers = np.frombuffer(content, "<f4", len(content) // 4).tolist() or tensor.float_val
            return next(iter(numbers), None)
    return None
