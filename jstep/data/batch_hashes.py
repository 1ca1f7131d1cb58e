"""Hashes of batches, by which a later start notices that it reads other data."""

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jstep.core import trees
from jstep.core.meshes import internal_transfers
from jstep.core.trees import Tree


class BatchHash(NamedTuple):
    """The hash of a batch on this process.

    Attributes:
        layout: A hash of its paths, dtypes, shapes and placement.
        content: A hash of its bytes.
    """

    layout: str
    content: str


def hash_batch(batch: Tree, *, is_stacked: bool = False) -> BatchHash:
    """Hash all bytes of a batch that this process holds, or of the first one of a stack.

    Example:
        >>> hash_batch({"x": np.ones(2)}) == hash_batch({"x": np.ones((3, 2))}, is_stacked=True)
        True
    """
    layout, content = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    with internal_transfers():
        for path, leaf in trees.leaves_with_paths(batch):
            for place, whole in _own_parts(leaf):
                array = whole[0] if is_stacked else whole
                array = np.ascontiguousarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
                layout.update(f"{path} {place} {array.dtype}{list(array.shape)}\n".encode())
                content.update(array.reshape(-1).view(np.uint8).data)
    return BatchHash(layout.hexdigest(), content.hexdigest())


def _own_parts(leaf: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    leaf = trees.key_data(leaf)
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        yield "", np.asarray(leaf)
        return
    parts = {str(shard.index): shard.data for shard in leaf.addressable_shards}
    for place, data in sorted(parts.items()):
        yield place, np.asarray(data)
