"""Compile-only meshes: TPU slices and GPU clusters that the machine does not have."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.topologies.topology import topology

__all__ = ["topology"]

_set_public_module(globals())
