"""The examples of a batch: how many there are, and where they go, whatever their number."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from jstep.core.contexts import internal_transfers
from jstep.data.placement import copied, placement
from jstep.distributed import agreement
from jstep.evaluating import synchronized_batches
from jstep.evaluating.num_examples import num_examples
from jstep.sharding.of_batches import fitting, named


class PlacedBatch(NamedTuple):
    """The arguments of a batch where they are computed with, and the number of examples, or why it is not known."""

    args: tuple[Any, ...]
    rows: int | str


def make_placer(batch_sharding: Any) -> Callable[[Iterable[Any]], Iterator[PlacedBatch]]:
    """The function that lays batches where they are computed with.

    Rows that do not divide over the devices are laid on all of them: their metrics are those of the batch as it is,
    with nothing padded, at the cost of computing that one batch everywhere.

    Raises:
        TypeError: `batch_sharding` holds something else than shardings.
        ValueError: It holds a PartitionSpec, and no mesh is set.
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
            with internal_transfers():  # and out of it again: what is done with them is not jstep's own
                placed_args = _placed(args, shardings)
            yield PlacedBatch(placed_args, rows)

    return placed


def leaf_shardings(shardings: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A sharding for each leaf of the arguments; a tree of them is a prefix of the batch."""
    batch = args if isinstance(shardings, tuple) or len(args) != 1 else args[0]
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
    """A tuple is the arguments, anything else one; copied, as a loader may fill its buffer anew meanwhile."""
    own = copied(batch)
    return own if isinstance(own, tuple) else (own,)
