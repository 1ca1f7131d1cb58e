"""Gradient clipping by value, norm, average norm and global norm."""

from jstep.clipping.clip import clip_by_average_norm, clip_by_global_norm, clip_by_norm, clip_by_value, global_norm
from jstep.core.public import set_public_module as _set_public_module

__all__ = [
    "clip_by_average_norm",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "global_norm",
]

_set_public_module(globals())
