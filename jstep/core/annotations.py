"""Type variables and aliases that signatures share."""

import typing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeVar
else:

    def TypeVar(name, default=None):  # noqa: N802  (before Python 3.13 type variables have no defaults)
        return typing.TypeVar(name)


P = TypeVar("P", default=Any)
"""The type of the parameters."""
T = TypeVar("T")
"""The type of an argument that is returned with the same structure."""
