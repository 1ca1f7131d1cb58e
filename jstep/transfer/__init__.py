"""From a small model to a wide one: factors by which hyperparameters transfer, and a check that they do."""

from jstep.core.public import publish as _publish
from jstep.transfer.coord_check import CoordCheck, coord_check
from jstep.transfer.mup import MupFactors, mup

__all__ = ["CoordCheck", "MupFactors", "coord_check", "mup"]

_publish(globals())
