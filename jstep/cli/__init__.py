"""`python -m jstep …`."""

from jstep.cli.main import main
from jstep.core.public import publish as _publish

__all__ = [
    "main",
]

_publish(globals())
