"""Placement of evaluation batches with any number of examples."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from jstep.core import trees
from jstep.core.contexts import internal_transfers
from jstep.data.placement import copied, placement
from jstep.distributed import agreement
from jstep.evaluating import synchronized_batches
from jstep.evaluating.num_examples import num_examples
from jstep.sharding.of_batches import fitting, named


class PlacedBatch(NamedTuple):
    """The placed arguments of a batch, and its number of examples or a string that explains why it is unknown."""

    args: tuple[Any, ...]
    rows: int | str


def make_placer(batch_sharding: Any) -> Callable[[Iterable[Any]], Iterator[PlacedBatch]]:
    """Return a function that places batches for the computation of metrics.

    Rows that do not divide over the devices are replicated on all of them. The metrics are then exact, without
    padding, at the cost of computing that batch on every device.

    Raises:
        TypeError: `batch_sharding` contains something other than shardings.
        ValueError: `batch_sharding` contains a PartitionSpec and no mesh is set.
    """
    shardings = None
    if batch_sharding is not None:
        try:
            placement(batch_sharding)
        except (TypeError, ValueError) as error:
            raise type(error)(f"batch_{error}") from None
        shardings = named(batch_sharding)

    def placed(batches: Iterable[Any]) -> Iterator[PlacedBatch]:
        if shardings is not None and not agreement.is_single_process():
            for args in synchronized_batches.synchronized_batches(
                map(_as_args, batches), lambda args: leaf_shardings(shardings, args)
            ):
                yield PlacedBatch(args, num_examples(args))
            return
        for batch in batches:
            args = _as_args(batch)
            rows = num_examples(args)
            with internal_transfers():  # left before the yield, because the caller's transfers are not internal
                placed_args = _placed(args, shardings)
            yield PlacedBatch(placed_args, rows)

    return placed


def leaf_shardings(shardings: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a sharding for each leaf of the arguments; a tree of shardings is a prefix of the batch."""
    batch = args if trees.is_plain_tuple(shardings) or len(args) != 1 else args[0]
    each = jax.tree.broadcast(shardings, batch, is_leaf=lambda x: isinstance(x, Sharding))
    return each if batch is args else (each,)


def _placed(args: tuple[Any, ...], shardings: Any) -> tuple[Any, ...]:
    if shardings is not None:
        return jax.tree.map(
            lambda leaf, sharding: jax.device_put(leaf, fitting(sharding, np.shape(leaf))),
            args,
            leaf_shardings(shardings, args),
        )
    if not agreement.is_single_process():
        return args  # the same on all processes, or global already
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf), args)


def _as_args(batch: Any) -> tuple[Any, ...]:
    """Return a copy of the batch as a tuple of arguments; the loader may overwrite its buffers meanwhile."""
    return trees.arguments_of(copied(batch))
