"""`summary_iterator`: the events of a file, one by one."""

import os
from collections.abc import Iterator
from typing import Any

from jstep.stores import is_directory, location, names_in, opened
from jstep.summary.proto import decode_error, proto
from jstep.summary.records import DataLossError, read_records

__all__ = ["DataLossError", "is_event_file", "summary_iterator"]


def is_event_file(name: str) -> bool:
    """Whether a file of that name is one that TensorBoard reads."""
    return "tfevents" in os.path.basename(name)


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
    if is_directory(path):
        files = list(filter(is_event_file, names_in(path)))
        found = f"; it holds {', '.join(files[:5])}" if files else "; it holds no event files"
        raise IsADirectoryError(f"summary_iterator reads one event file, and {path!r} is a directory{found}")
    with opened(path):
        pass  # a missing file is an error here, not at the first event

    def events() -> Iterator[Any]:
        offset = 0
        with opened(path) as file:
            for data in read_records(file, path):
                try:
                    decoded = event.FromString(data)
                except decode_error() as error:
                    raise DataLossError(path, offset, f"it is no Event: {error}") from error
                yield decoded
                offset = file.tell()

    return events()
