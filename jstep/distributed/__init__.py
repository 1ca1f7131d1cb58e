"""Several processes: who they are, and how they agree."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.distributed.initialize import initialize

__all__ = [
    "initialize",
]

_set_public_module(globals())
