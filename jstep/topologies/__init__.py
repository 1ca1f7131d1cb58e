"""Meshes of devices that only compile: TPU slices and GPU clusters, on a machine that has neither."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.topologies.topology import topology

__all__ = ["topology"]

_set_public_module(globals())
