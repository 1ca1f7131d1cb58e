"""Iteration over the events of a file."""

import os
from collections.abc import Iterator
from typing import Any

from jstep.stores import location, opened
from jstep.summary.proto import decode_error, proto
from jstep.summary.read.files import check_file
from jstep.summary.records import FOOTER, HEADER, DataLossError, read_records


def summary_iterator(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Iterate over the events of an event file.

    The checksum of each record is verified. An incomplete record at the end of the file, as left by a run that was
    killed, ends the iteration after the complete events.

    Args:
        path: An event file, or the URL of one in an object store.

    Returns:
        An iterator over `Event` protos (of `tensorboard.compat.proto.event_pb2`).

    Raises:
        FileNotFoundError: The file does not exist.
        IsADirectoryError: The path is a directory; the message lists the event files in it.
        OSError: The path is not a regular file.
        DataLossError: While iterating: a record is corrupted; the message has the path and the offset.
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
    check_file(path)

    def events() -> Iterator[Any]:
        offset = 0
        with opened(path) as file:
            for data in read_records(file, path):
                try:
                    decoded = event.FromString(data)
                except decode_error() as error:
                    raise DataLossError(path, offset, f"it is not an Event: {error}") from error
                yield decoded
                offset += HEADER + len(data) + FOOTER

    return events()
