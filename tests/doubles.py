"""Stand-ins that tests of several rooms use."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Pair(NamedTuple):
    """A batch or a tree of two parts."""

    x: Any
    y: Any


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """Return a function that raises an error, whatever it is called with."""

    def raise_it(*args: Any, **kwargs: Any) -> Any:
        raise error

    return raise_it


class ImmutableError(Exception):
    """An exception that takes no attributes, like a frozen dataclass."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError("immutable")
