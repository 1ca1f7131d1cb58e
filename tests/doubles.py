"""Stand-ins that tests of several rooms use."""

from typing import Any, NamedTuple


class Pair(NamedTuple):
    """A batch or a tree of two parts."""

    x: Any
    y: Any


def raising(error):
    """Return a function that raises an error, whatever it is called with."""

    def raise_it(*args, **kwargs):
        raise error

    return raise_it
