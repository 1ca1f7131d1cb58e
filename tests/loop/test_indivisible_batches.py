"""Batch sizes that microbatches or devices do not divide: the error names the batch, early if
shapes are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jstep

OPTIMIZER = jstep.adam(1e-2)
ROWS = np.ones((26, 4), np.float32)
LAST_OF_EPOCH = "if it is the smaller last batch of an epoch, drop_remainder=True leaves it out"


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def message_of(data, step=None, **options):
    state = jstep.TrainState.create({"w": jnp.ones((4, 1))}, OPTIMIZER)
    step = jstep.minimize(loss, OPTIMIZER) if step is None else step
    with pytest.raises(ValueError, match=r"multiple of|evenly divide") as caught:
        jstep.train(step, state, data, 9, progress=False, **options)
    return "\n".join([str(caught.value), *caught.value.__notes__])


@pytest.mark.thorough(except_for=["2"])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_microbatches_that_do_not_divide_the_last_batch(steps_per_call):
    data = jstep.batches(ROWS, 8, drop_remainder=False)
    found = message_of(
        data, jstep.minimize(loss, OPTIMIZER, num_microbatches=4), steps_per_call=steps_per_call
    )
    assert (
        "train_step: it cannot take step 3, whose batch has other shapes than the one before"
    ) in found
    assert (
        "has 2 rows; use a batch of a multiple of 4, "
        "or max_rows_per_device instead of num_microbatches"
    ) in found
    assert LAST_OF_EPOCH in found
    assert "at step 0" in found


def over_devices():
    return NamedSharding(jax.make_mesh((4,), ("data",)), PartitionSpec("data"))


def test_devices_that_do_not_divide_a_batch_of_a_loader():
    found = message_of([ROWS[:8], ROWS[:8], ROWS[:2], ROWS[:8]], batch_sharding=over_devices())
    assert "at step 2, after the update with batch 1, while batch 2 was fetched" in found
