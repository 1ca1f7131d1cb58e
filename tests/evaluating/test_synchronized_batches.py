"""What processes agree on before each batch of an evaluation, with the numbers that another process would send."""

import jax
import numpy as np
import pytest
from fellows import Fellows
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jstep.evaluating import evaluation_batches
from jstep.evaluating.evaluation_batches import _ENDED, _FAILED, _synchronized, place_batches

ROWS = np.arange(6.0, dtype=np.float32).reshape(3, 2)


def taken(monkeypatch, mine, others):
    """Return the batches of this process, which are on another device, while another one sends its counts."""
    sent = iter(others)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda one: np.stack([one, [next(sent)]]))
    sharding = SingleDeviceSharding(jax.devices()[1])
    found = [batch for (batch,) in _synchronized(iter([(one,) for one in mine]), sharding)]
    assert all(one.sharding == sharding for one in found)
    assert not list(sent)
    return [one.tolist() for one in found]


def test_batches_end_when_those_of_all_have_ended(monkeypatch):
    both = [ROWS[:2].tolist(), ROWS[2:].tolist()]
    assert taken(monkeypatch, [ROWS[:2], ROWS[2:]], [2, 2, _ENDED]) == both
    assert taken(monkeypatch, [ROWS[:2], ROWS[2:]], [2, _ENDED, _ENDED]) == both
    assert taken(monkeypatch, [ROWS[:2]], [2, 2, _ENDED]) == [ROWS[:2].tolist(), []]


@pytest.mark.parametrize(
    ("mine", "others", "error", "message"),
    [
        ([ROWS], [_FAILED], RuntimeError, "another process failed while it fetched a batch"),
        ([], [3], ValueError, "this process has no batch, and others have"),
        ([ROWS], [_ENDED], ValueError, "another process has no batch at all"),
    ],
)
def test_what_another_process_lacks_is_an_error_here(mine, others, error, message, monkeypatch):
    with pytest.raises(error, match=message):
        taken(monkeypatch, mine, others)


def test_an_error_of_this_process_is_sent_before_it_is_raised(monkeypatch):
    sent = []
    monkeypatch.setattr(
        multihost_utils, "process_allgather", lambda one: sent.append(int(one[0])) or np.stack([one, one])
    )

    def broken():
        raise OSError("a file is gone")
        yield

    with pytest.raises(OSError, match="a file is gone"):
        next(_synchronized(broken(), None))
    assert sent == [_FAILED]


def test_only_batches_with_a_sharding_are_those_of_all_processes(monkeypatch):
    three, place = Fellows(monkeypatch, 3), SingleDeviceSharding(jax.devices()[1])
    row = ROWS[:1].tolist()
    found = three.each(lambda i: [batch.tolist() for (batch,) in place_batches([ROWS[:1]] * (i + 1), place)])
    assert found == [[row, [], []], [row, row, []], [row, row, row]]
    ((alone,),) = place_batches([ROWS], None)  # the same on all processes: the program places it
    assert (type(alone), alone.tolist()) == (np.ndarray, ROWS.tolist())


# Batches of an evaluation whose rows several processes hold, with threads in their place.


class Spread(NamedSharding):
    """A sharding over devices of several processes."""

    is_fully_addressable = False


@pytest.mark.parametrize(
    ("sizes", "owners"), [([2, 1, 3], [2, 0, 1]), ([0, 3, 2], [0, 1, 2]), ([2, 2, 2], [0, 1]), ([-1, 1, 1], [1, 2])]
)
@pytest.mark.parametrize("dtype", ["float32", "int8", "bool"])
def test_rows_are_joined_in_the_order_of_the_owners(sizes, owners, dtype, monkeypatch):
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


def test_equal_rows_that_divide_are_placed_by_each_process(monkeypatch):
    mesh = jax.make_mesh((8,), ("data",))
    monkeypatch.setattr(evaluation_batches, "part_owners", lambda sharding: [0, 1])
    monkeypatch.setattr(evaluation_batches, "place_rows", lambda rows, sharding: ("placed", len(rows)))
    sharding = Spread(mesh, PartitionSpec("data"))
    found = evaluation_batches._global(np.array([4, 4]), np.ones((4, 2)), sharding)
    assert found == ("placed", 4)
    scalar = evaluation_batches._global(np.array([4, 4]), np.float32(3), Spread(mesh, PartitionSpec()))
    assert (scalar.shape, scalar.tolist()) == ((), 3.0)
