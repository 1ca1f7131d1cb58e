"""Figures of matplotlib: made without a display, and written to a file that the user named."""

import io
import os
from typing import Any

from jstep.stores.files import write_named


def figure() -> Any:
    """Create an empty matplotlib figure without pyplot, which has global state and may need a display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install jstep[plot]") from error
    return Figure(layout="constrained")


def save_figure(drawn: Any, file: str | os.PathLike[str], dpi: int) -> None:
    """Write a figure to a file, whose suffix selects the format, through links, FIFOs and devices."""
    path = os.fspath(file)
    kind = os.path.splitext(path)[1][1:].lower()
    if not kind:
        kind = drawn.canvas.get_default_filetype()
        path += "" if os.path.exists(path) and not os.path.isfile(path) else f".{kind}"
    picture = io.BytesIO()
    drawn.savefig(picture, format=kind, dpi=dpi)
    os.stat(os.path.dirname(path) or ".")  # no folder is created for it
    write_named(path, picture.getvalue())
