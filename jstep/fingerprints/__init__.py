"""Fingerprints: two words that stand for every bit of a tree, and logs of them."""

from jstep.core.public import publish as _publish
from jstep.fingerprints.fingerprint import fingerprint

__all__ = ["fingerprint"]

_publish(globals())
