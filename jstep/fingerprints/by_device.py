"""Fingerprints as each device computed them: replicas are looked at one by one."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.core.contexts import internal_transfers
from jstep.fingerprints.fingerprint import named_leaves, stacked

_ABSENT = -1
"""Stands where a device holds nothing of a leaf: no word of a fingerprint is negative."""


class ByDevice(NamedTuple):
    """The fingerprints of a tree's leaves, computed by each device from what it holds.

    Of an array that is replicated, each device reads its own copy; of one that is split, all of its devices together
    compute one sum. Those of devices of other processes are not here.

    Attributes:
        paths: The paths of the leaves.
        parts: Which leaves, and their fingerprints `[n, 2]` on each device that holds them.
    """

    paths: list[str]
    parts: list[tuple[list[int], Any]]

    def words(self) -> dict[Any, np.ndarray[Any, Any]]:
        """Device → int64 `[leaves, 2]`, −1 where it holds nothing of a leaf; waits. The host's are under None."""
        found: dict[Any, np.ndarray[Any, Any]] = {}
        with internal_transfers():
            for numbers, part in self.parts:
                for device, words in _on_each(part):
                    mine = found.setdefault(device, np.full((len(self.paths), 2), _ABSENT, np.int64))
                    mine[numbers] = np.asarray(words)
        return found


def by_device(tree: Any) -> ByDevice:
    """Start the fingerprints of a tree's leaves, without waiting for them.

    Raises:
        RuntimeError: A leaf was donated.
        TypeError: A leaf is not an array.
        ValueError: Two leaves have one path.
    """
    paths, leaves, keys = named_leaves(tree)
    return ByDevice(paths, stacked(leaves, keys))


def _on_each(part: Any) -> list[tuple[Any, Any]]:
    if not isinstance(part, jax.Array):
        return [(None, part)]
    return [(shard.device, shard.data) for shard in part.addressable_shards]
