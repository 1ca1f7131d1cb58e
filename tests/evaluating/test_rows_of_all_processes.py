"""Batches of an evaluation whose rows several processes hold, with threads in their place."""

from typing import Any

import jax
import numpy as np
import pytest
from fellows import Fellows
from jax.sharding import NamedSharding, PartitionSpec

from jstep.evaluating import evaluation_batches


class Spread(NamedSharding):
    """A sharding over devices of several processes."""

    is_fully_addressable = False


@pytest.mark.parametrize(
    ("sizes", "owners"),
    [([2, 1, 3], [2, 0, 1]), ([0, 3, 2], [0, 1, 2]), ([2, 2, 2], [0, 1]), ([-1, 1, 1], [1, 2])],
)
@pytest.mark.parametrize("dtype", ["float32", "int8", "bool"])
def test_rows_are_joined_in_the_order_of_the_owners(
    sizes: list[int], owners: list[int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever each process has of them, bit by bit, and replicated where they do not divide over the mesh."""
    mesh = jax.make_mesh((8,), ("data",))
    three = Fellows(monkeypatch, 3)
    monkeypatch.setattr(evaluation_batches, "part_owners", lambda sharding: owners)
    monkeypatch.setattr(evaluation_batches, "place_rows", lambda rows, sharding: ("placed", len(rows)))
    whole = (np.arange(24).reshape(3, 4, 2) % 3).astype(dtype)
    own = [whole[i][: max(0, size)] for i, size in enumerate(sizes)]
    sharding = Spread(mesh, PartitionSpec("data"))
    found = three.each(lambda i: evaluation_batches._global(np.array(sizes), own[i], sharding))
    expected = np.concatenate([own[i] for i in owners])
    for one in found:
        assert one.dtype == dtype
        assert one.tolist() == expected.tolist()
        assert one.sharding.spec == PartitionSpec(None)


def test_equal_rows_that_divide_are_placed_by_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.make_mesh((8,), ("data",))
    monkeypatch.setattr(evaluation_batches, "part_owners", lambda sharding: [0, 1])
    monkeypatch.setattr(evaluation_batches, "place_rows", lambda rows, sharding: ("placed", len(rows)))
    sharding = Spread(mesh, PartitionSpec("data"))
    found: Any = evaluation_batches._global(np.array([4, 4]), np.ones((4, 2)), sharding)
    assert found == ("placed", 4)
    scalar = evaluation_batches._global(np.array([4, 4]), np.float32(3), Spread(mesh, PartitionSpec()))
    assert (scalar.shape, scalar.tolist()) == ((), 3.0)
