"""Series of scalars from events: those that TensorFlow 2 writes as tensors, and points that a restart replaces."""

import math
from typing import Any

import numpy as np
import pytest

from jstep.stores import event_files
from jstep.stores.event_files import Point, Series, proto

TYPES = proto("DataType")


def tensor(plugin: str = "scalars", **fields: Any) -> Any:
    metadata = proto("SummaryMetadata")(plugin_data={"plugin_name": plugin})
    return proto("Summary").Value(tag="loss", metadata=metadata, tensor=proto("TensorProto")(**fields))


def content(dtype: str, *numbers: float) -> bytes:
    return np.array(numbers, dtype).tobytes()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (proto("Summary").Value(tag="loss", simple_value=0.5), 0.5),
        (tensor(dtype=TYPES.DT_FLOAT, float_val=[2.5, 3.0]), 2.5),
        (tensor(dtype=TYPES.DT_DOUBLE, double_val=[0.1]), 0.1),
        (tensor(dtype=TYPES.DT_FLOAT, tensor_content=content("<f4", 0.25, 7)), 0.25),
        (tensor(dtype=TYPES.DT_DOUBLE, tensor_content=content("<f8", 0.1)), 0.1),
        (tensor(dtype=TYPES.DT_FLOAT, tensor_content=content("<f4", 0.25) + b"\0"), 0.25),
        (tensor(dtype=TYPES.DT_FLOAT, tensor_content=b"\0"), None),
        (tensor(dtype=TYPES.DT_FLOAT), None),
        (tensor(dtype=TYPES.DT_INT32, int_val=[3], tensor_content=b"\3\0\0\0"), None),
        (tensor("text", dtype=TYPES.DT_FLOAT, float_val=[2.5]), None),
        (proto("Summary").Value(tag="h", histo=proto("HistogramProto")()), None),
        (proto("Summary").Value(tag="nothing"), None),
    ],
)
def test_the_number_in_a_value(value: Any, expected: float | None) -> None:
    assert event_files._number(value) == expected


def test_later_events_and_starts_replace_points() -> None:
    start, stop = proto("SessionLog").START, proto("SessionLog").STOP
    series: dict[str, Series] = {}

    def points() -> dict[str, list[Point]]:
        return {tag: one.points() for tag, one in series.items()}

    def add(step: int, tag: str = "", number: float = 0.0, status: Any = None) -> None:
        event = proto("Event")(step=step, wall_time=10.0 * step)
        if status is not None:
            event.session_log.status = status
        if tag:
            event.summary.value.add(tag=tag, simple_value=number)
        event_files._add(series, event)

    for step in (1, 2, 3, 4):
        add(step, "b", step)
    add(2, "a", 5)
    add(3, status=stop)
    assert points() == {"b": [Point(n, 10.0 * n, n) for n in (1, 2, 3, 4)], "a": [Point(2, 20.0, 5)]}
    add(3, status=start)
    assert {tag: list(one.steps) for tag, one in series.items()} == {"b": [1, 2], "a": [2]}
    assert [(list(steps), list(values)) for steps, values in series["b"].rewound] == [([3, 4], [3.0, 4.0])]
    add(2, "b", 7)
    add(5, "b", math.inf)
    assert points()["b"] == [Point(1, 10.0, 1), Point(2, 20.0, 7), Point(5, 50.0, math.inf)]
    add(0, status=start)
    assert points() == {"b": [], "a": []}
