"""Stand-ins that tests of several rooms use."""

from typing import Any, NamedTuple


class Pair(NamedTuple):
    """A batch or a tree of two parts."""

    x: Any
    y: Any
