"""The training loop."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.loop.signals import Preempted
from jstep.loop.train import train

__all__ = [
    "Preempted",
    "train",
]

_set_public_module(globals())
