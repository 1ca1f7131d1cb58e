"""Fingerprints (64-bit hashes) of trees of arrays, and logs of fingerprints."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.fingerprints.fingerprint import fingerprint

__all__ = ["fingerprint"]

_set_public_module(globals())
