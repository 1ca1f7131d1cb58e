"""Several processes: who they are, and how they agree."""

from jstep.core.public import publish as _publish
from jstep.distributed.initialize import initialize

__all__ = [
    "initialize",
]

_publish(globals())
