"""Evaluation batches on several processes, whose numbers of rows and of batches may differ."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jstep.core.contexts import internal_transfers
from jstep.evaluating.num_examples import num_examples
from jstep.sharding.of_batches import fitting

_ENDED, _FAILED, _GLOBAL = -1, -2, -3


def synchronized_batches(
    batches: Iterator[tuple[Any, ...]], leaf_shardings: Callable[[tuple[Any, ...]], tuple[Any, ...]]
) -> Iterator[tuple[Any, ...]]:
    """Yield global arrays made of the rows of all processes, batch by batch, until all processes have ended.

    All processes exchange their numbers of rows, so nothing is assumed about them.

    Args:
        batches: The arguments of this process.
        leaf_shardings: Returns a sharding for each leaf of the arguments.

    Raises:
        RuntimeError: Another process failed.
        ValueError: A process has no batches.
    """
    last: tuple[Any, ...] | None = None
    while True:
        failure: Exception | None = None
        args: tuple[Any, ...] | None = None
        try:
            args = next(batches, None)
            mine = _ENDED if args is None else _rows(args)
        except Exception as error:
            failure, mine = error, _FAILED
        counts = _gather_count(mine)
        if failure is not None:
            raise failure
        if (counts == _FAILED).any():
            raise RuntimeError("batches: another process failed while it fetched a batch to evaluate; see its error")
        if (counts == _ENDED).all():
            return
        if args is None:
            if last is None:
                raise ValueError("batches: this process has no batch, and others have; give each process a part")
            args = jax.tree.map(lambda leaf: leaf[:0] if np.ndim(leaf) else leaf, last)
        elif last is None and (counts == _ENDED).any():
            raise ValueError("batches: another process has no batch at all; give each process a part")
        last = args
        if not (counts == _GLOBAL).any():
            with internal_transfers():
                args = _place_rows(args, np.maximum(counts, 0), leaf_shardings(args))
        yield args


def _rows(args: tuple[Any, ...]) -> int:
    leaves = jax.tree.leaves(args)
    if any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves):
        return _GLOBAL
    rows = num_examples(args) if any(map(np.ndim, leaves)) else 0
    if isinstance(rows, str):
        raise ValueError(f"batches: {rows}")
    return rows


def _gather_count(number: int) -> np.ndarray[Any, Any]:
    with internal_transfers():
        return np.asarray(multihost_utils.process_allgather(np.array([number], np.int32))).reshape(-1)


def _place_rows(args: tuple[Any, ...], counts: np.ndarray[Any, Any], each: tuple[Any, ...]) -> tuple[Any, ...]:
    def leaf(rows: Any, sharding: Any) -> Any:
        if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
            return jax.device_put(rows, sharding)
        rows = np.asarray(rows)
        owners = _owners(sharding)
        if np.ndim(rows) and len(set(counts.tolist())) == 1:
            shape = (int(counts[0]) * len(owners), *rows.shape[1:])
            if fitting(sharding, shape).spec == sharding.spec and counts[0]:
                return jax.make_array_from_process_local_data(sharding, rows)
        whole = _gather_rows(rows, counts, owners) if np.ndim(rows) else rows
        place = fitting(sharding, whole.shape)
        return jax.make_array_from_callback(whole.shape, place, lambda index: whole[index])

    return jax.tree.map(leaf, args, each)


def _owners(sharding: NamedSharding) -> list[int]:
    """Return one process for each part of the rows, in order; processes that hold the same rows count once."""
    size = int(sharding.mesh.devices.size)
    parts: dict[int, set[int]] = {}
    rows = NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[:1]))
    places: Any = rows.devices_indices_map((size,))
    for device, index in places.items():
        parts.setdefault(device.process_index, set()).add(index[0].start or 0)
    first_of: dict[tuple[int, ...], int] = {}
    for process in sorted(parts):
        first_of.setdefault(tuple(sorted(parts[process])), process)
    return [first_of[starts] for starts in sorted(first_of)]


def _gather_rows(rows: np.ndarray[Any, Any], counts: np.ndarray[Any, Any], owners: list[int]) -> np.ndarray[Any, Any]:
    """Gather the rows of all processes as bytes, so that no conversion changes them."""
    rows = np.ascontiguousarray(rows, jax.dtypes.canonicalize_dtype(rows.dtype))
    most, tail = int(counts.max()), rows.shape[1:]
    padded = np.zeros((most, *tail), rows.dtype)
    padded[: len(rows)] = rows
    everyone = np.asarray(multihost_utils.process_allgather(padded.reshape(-1).view(np.uint8)), np.uint8)
    everyone = everyone.reshape(len(counts), -1)
    parts = [everyone[p].copy().view(rows.dtype).reshape(most, *tail)[: counts[p]] for p in owners]
    return np.concatenate(parts)
