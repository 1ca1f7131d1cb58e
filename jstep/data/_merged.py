"""Rows of several sources as one batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jstep.core.contexts import internal_transfers
from jstep.core.trees import flatten, leaves_with_paths, quoted, structure
from jstep.data._permutation import Rows


def check_same_structure(samples: Mapping[str, Any]) -> None:
    """Refuses sources whose batches cannot be one.

    Args:
        samples: A batch of each source, by name.

    Raises:
        ValueError: They differ in structure, or a leaf in dtype or in the shape of a row.
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
    dtype = "text" if getattr(leaf.dtype, "kind", "V") in "SU" else str(leaf.dtype)  # texts may have several lengths
    return f"{dtype}{list(leaf.shape[1:])}"


def merge(parts: Sequence[Any], indices: Sequence[Rows]) -> Any:
    """One batch of the rows of several.

    Args:
        parts: Trees of arrays, all of one structure.
        indices: For each the places of its rows in the batch; together they are all of them.
    """
    if len(parts) == 1:
        return parts[0]
    columns = [flatten(part)[0] for part in parts]
    return structure(parts[0]).unflatten([_merge_leaves(leaves, indices) for leaves in zip(*columns, strict=True)])


def _merge_leaves(leaves: Sequence[Any], indices: Sequence[Rows]) -> Any:
    with internal_transfers():
        if all(isinstance(leaf, jax.Array) for leaf in leaves):
            return jnp.concatenate(leaves)[np.argsort(np.concatenate(indices))]
        arrays = [np.asarray(leaf) for leaf in leaves]
    dtype = max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)  # that of the longest texts
    merged = np.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), dtype)
    for array, where in zip(arrays, indices, strict=True):
        merged[where] = array
    return merged
