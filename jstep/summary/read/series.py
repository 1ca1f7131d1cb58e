"""Reading scalars as series, as TensorBoard shows them."""

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jstep.stores import location
from jstep.summary.proto import proto
from jstep.summary.read.files import event_files
from jstep.summary.read.iterator import summary_iterator
from jstep.summary.records import DataLossError


class Point(NamedTuple):
    """A scalar at a step, with `wall_time` in seconds since 1970."""

    step: int
    wall_time: float
    value: float


def read_scalars(
    path: str | os.PathLike[str], on_corrupted: Callable[[DataLossError], None] | None = None
) -> dict[str, list[Point]]:
    """Return tag → points, in the order of the tags' first events.

    Steps increase within a series: a session that starts at step N replaces the earlier points from N on, and so does a
    point at a step that was written before.

    Args:
        path: An event file or the directory of a run, as a path or a URL.
        on_corrupted: Called with the error of each corrupted file; the events before the corrupted record are kept. By
            default, the error is raised.

    Raises:
        DataLossError: A file is corrupted.
    """
    series: dict[str, list[Point]] = {}
    for file in event_files(location(path, "path")):
        try:
            for event in summary_iterator(file):
                _add(series, event)
        except DataLossError as error:
            if on_corrupted is None:
                raise
            on_corrupted(error)
    return series


def _add(series: dict[str, list[Point]], event: Any) -> None:
    if event.session_log.status == proto("SessionLog").START:
        for points in series.values():
            _drop_from(points, event.step)
    for value in event.summary.value:
        number = _number(value)
        if number is not None:
            points = series.setdefault(value.tag, [])
            _drop_from(points, event.step)
            points.append(Point(event.step, event.wall_time, number))


def _drop_from(points: list[Point], step: int) -> None:
    while points and points[-1].step >= step:
        points.pop()


def _number(value: Any) -> float | None:
    """Return the scalar in a value, or None if it is not one; TensorFlow 2 writes scalars as tensors."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind == "tensor" and value.metadata.plugin_data.plugin_name == "scalars":
        return next(_floats(value.tensor), None)
    return None


def _floats(tensor: Any) -> Iterator[float]:
    types = proto("types")
    kinds = {types.DT_FLOAT: ("<f4", tensor.float_val), types.DT_DOUBLE: ("<f8", tensor.double_val)}
    if tensor.dtype in kinds:
        dtype, values = kinds[tensor.dtype]
        whole = len(tensor.tensor_content) // np.dtype(dtype).itemsize
        yield from np.frombuffer(tensor.tensor_content, dtype, whole).tolist() if tensor.tensor_content else values
