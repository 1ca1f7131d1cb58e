"""`summary_iterator`: the events of a file, one by one."""

import os
from collections.abc import Iterator
from typing import Any

from jstep.stores import location, opened
from jstep.summary.proto import decode_error, proto
from jstep.summary.read.files import check_file
from jstep.summary.records import FOOTER, HEADER, DataLossError, read_records


def summary_iterator(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Iterates over the events of an event file.

    The checksum of each record is checked. A record that the file ends inside of, which is what a run that
    was killed leaves, ends the iteration; the events before it are all there.

    Args:
        path: An event file, or the URL of one in an object store.

    Returns:
        An iterator over `Event` protos (of `tensorboard.compat.proto.event_pb2`).

    Raises:
        FileNotFoundError: There is no such file.
        IsADirectoryError: The path is a directory; names the event files in it.
        OSError: It is no regular file.
        DataLossError: While iterating: a record is damaged; names the path and the offset.
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
                    raise DataLossError(path, offset, f"it is no Event: {error}") from error
                yield decoded
                offset += HEADER + len(data) + FOOTER

    return events()
