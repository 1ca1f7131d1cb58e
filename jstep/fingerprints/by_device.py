"""Fingerprints computed separately by each device, to compare replicas."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.core.contexts import internal_transfers
from jstep.fingerprints.fingerprint import named_leaves, stacked

_ABSENT = -1
"""Placeholder for a leaf that a device does not hold; words of fingerprints are never negative."""


class ByDevice(NamedTuple):
    """Fingerprints of a tree's leaves, computed by each device from its own data.

    For a replicated array each device reads its own copy; for a split array its devices compute one sum together.
    Results of devices of other processes are not included.

    Attributes:
        paths: The paths of the leaves.
        parts: Indices of leaves, and their fingerprints `[n, 2]` on each device that holds them.
    """

    paths: list[str]
    parts: list[tuple[list[int], Any]]

    def words(self) -> dict[Any, np.ndarray[Any, Any]]:
        """Return device (None: host) → int64 `[leaves, 2]`, −1 for leaves that the device does not hold. Blocks."""
        found: dict[Any, np.ndarray[Any, Any]] = {}
        with internal_transfers():
            for numbers, part in self.parts:
                for device, words in _on_each(part):
                    mine = found.setdefault(device, np.full((len(self.paths), 2), _ABSENT, np.int64))
                    mine[numbers] = np.asarray(words)
        return found


def by_device(tree: Any) -> ByDevice:
    """Start computing the fingerprints of a tree's leaves, without blocking.

    Raises:
        RuntimeError: A leaf was donated.
        TypeError: A leaf is not an array.
        ValueError: Two leaves have the same path.
    """
    paths, leaves, keys = named_leaves(tree)
    return ByDevice(paths, stacked(leaves, keys))


def _on_each(part: Any) -> list[tuple[Any, Any]]:
    if not isinstance(part, jax.Array):
        return [(None, part)]
    return [(shard.device, shard.data) for shard in part.addressable_shards]
