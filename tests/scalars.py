"""The scalars of event files, as points by tag."""

import os
from collections.abc import Callable

from jstep.stores.event_files import DataLossError, Point, event_files, read_series


def read_scalars(
    path: str | os.PathLike[str], on_corrupted: Callable[[DataLossError], None] | None = None
) -> dict[str, list[Point]]:
    """Return tag → points, in the order of the tags' first events; `on_corrupted` as in `read_series`."""
    series = read_series(event_files(os.fspath(path)), on_corrupted)
    return {tag: one.points() for tag, one in series.items()}
