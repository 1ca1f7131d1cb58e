"""The scalars of event files, as a reader of them sees them."""

import os
from collections.abc import Callable
from typing import Any

from jstep.stores.event_files import Point, event_files, read_series


def raise_error(error: Exception) -> None:
    raise error


def read_scalars(
    path: Any, on_corrupted: Callable[[Any], None] | None = None
) -> dict[str, list[Point]]:
    """Return tag → points of a file, or of all files of a directory."""
    series = read_series(event_files(os.fspath(path)), on_corrupted or raise_error)
    return {tag: one.points() for tag, one in series.items()}
