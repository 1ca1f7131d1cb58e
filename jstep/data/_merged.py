"""Merging rows of several sources into one batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.contexts import internal_transfers
from jstep.core.trees import flatten, leaves_with_paths, quoted, structure


def check_same_structure(samples: Mapping[str, Any]) -> None:
    """Check that the rows of all sources fit into one batch.

    Args:
        samples: A batch of each source, by name.

    Raises:
        ValueError: The sources differ in structure, or a leaf in dtype or row shape.
    """
    (name, sample), *others = samples.items()
    first = dict(leaves_with_paths(sample))
    for other, batch in others:
        leaves = dict(leaves_with_paths(batch))
        for path in [*leaves, *first]:
            if path not in first or path not in leaves:
                has, lacks = (other, name) if path in leaves else (name, other)
                raise ValueError(
                    f"sources: expected batches of one structure, got a leaf at {quoted(path)} from {has!r} and none "
                    f"from {lacks!r}"
                )
            a, b = _described(leaves[path]), _described(first[path])
            if a != b:
                raise ValueError(
                    f"sources: expected batches of one dtype and shape, got {a} for a row of {quoted(path)} from "
                    f"{other!r} and {b} from {name!r}; cast, pad or crop them first"
                )
        if structure(batch) != structure(sample):
            raise ValueError(
                f"sources: expected batches of one structure, got {structure(batch)} from {other!r} and "
                f"{structure(sample)} from {name!r}"
            )


def _described(leaf: Any) -> str:
    dtype = "text" if getattr(leaf.dtype, "kind", "V") in "SU" else str(leaf.dtype)  # strings may differ in length
    return f"{dtype}{list(leaf.shape[1:])}"


def merge(parts: Sequence[Any], indices: Sequence[Any]) -> Any:
    """Merge the rows of several sources into one batch.

    Args:
        parts: Trees of arrays with the same structure.
        indices: The indices of the rows of each part in the batch; together they cover the batch.
    """
    if len(parts) == 1:
        return parts[0]
    columns = [flatten(part)[0] for part in parts]
    return structure(parts[0]).unflatten([_merge_leaves(leaves, indices) for leaves in zip(*columns, strict=True)])


def _merge_leaves(leaves: Sequence[Any], indices: Sequence[Any]) -> Any:
    with internal_transfers():
        if all(isinstance(leaf, jax.Array) for leaf in leaves):
            return jnp.concatenate(leaves)[np.argsort(np.concatenate(indices))]
        arrays = [np.asarray(leaf) for leaf in leaves]
    dtype = max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)  # the longest strings
    merged = np.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), dtype)
    for array, targets in zip(arrays, indices, strict=True):
        merged[targets] = array
    return merged
