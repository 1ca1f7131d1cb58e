"""Hyperparameter transfer from a small model to a wide one: μP factors and the coordinate check."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.transfer.coord_check import CoordCheck, coord_check
from jstep.transfer.mup import MupFactors, mup

__all__ = ["CoordCheck", "MupFactors", "coord_check", "mup"]

_set_public_module(globals())
