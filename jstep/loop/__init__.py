"""The training loop."""

from jstep.core.public import publish as _publish
from jstep.loop.signals import Preempted
from jstep.loop.train import train

__all__ = [
    "Preempted",
    "train",
]

_publish(globals())
