"""Scalars read back as series, as TensorBoard would show them."""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jstep.stores import is_directory, join, location, names_in, walked
from jstep.summary.proto import proto
from jstep.summary.read.iterator import is_event_file, summary_iterator


class Point(NamedTuple):
    """A scalar at a step; `wall_time` in seconds since 1970."""

    step: int
    wall_time: float
    value: float


def event_files(path: str | os.PathLike[str]) -> list[str]:
    """The event files of a directory in the order they were written, or the file itself; URLs likewise."""
    path = location(path, "path")
    if not is_directory(path):
        return [path]
    return [join(path, name) for name in filter(is_event_file, names_in(path))]


def find_runs(logdir: str | os.PathLike[str]) -> list[str]:
    """The directories at and below `logdir` that hold event files, sorted."""
    return [path for path, names in walked(location(logdir, "logdir")) if any(map(is_event_file, names))]


def read_scalars(path: str | os.PathLike[str]) -> dict[str, list[Point]]:
    """Tag → points, in the order of the tags' first events.

    Steps only grow: a session that starts at step N replaces what earlier ones wrote from N on, and so does a
    point at a step that was written before.

    Args:
        path: An event file, or the directory of a run.

    Raises:
        DataLossError: A file is damaged.
    """
    series: dict[str, list[Point]] = {}
    for file in event_files(path):
        for event in summary_iterator(file):
            if event.session_log.status == proto("SessionLog").START:
                for points in series.values():
                    _drop_from(points, event.step)
            for value in event.summary.value:
                number = _number(value)
                if number is not None:
                    points = series.setdefault(value.tag, [])
                    _drop_from(points, event.step)
                    points.append(Point(event.step, event.wall_time, number))
    return series


def _drop_from(points: list[Point], step: int) -> None:
    while points and points[-1].step >= step:
        points.pop()


def _number(value: Any) -> float | None:
    """The scalar in a value, None where it holds something else; TensorFlow 2 writes scalars as tensors."""
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
        yield from np.frombuffer(tensor.tensor_content, dtype).tolist() if tensor.tensor_content else values
