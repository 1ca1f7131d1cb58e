"""Fingerprints: two words that stand for every bit of a tree, and logs of them."""

from jstep.core.public import set_public_module as _set_public_module
from jstep.fingerprints.fingerprint import fingerprint

__all__ = ["fingerprint"]

_set_public_module(globals())
