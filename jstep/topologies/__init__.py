"""Meshes of devices that only compile: TPU slices and GPU clusters, on a machine that has neither."""

from jstep.core.public import publish as _publish
from jstep.topologies.topology import topology

__all__ = ["topology"]

_publish(globals())
