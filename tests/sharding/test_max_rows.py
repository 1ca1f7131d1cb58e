"""`max_rows_per_device`: the number of microbatches depends on the batch and its devices."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jstep

OPTIMIZER = jstep.adam(0.05)
RANDOM = np.random.default_rng(0)
DATA = RANDOM.normal(size=(256, 4)).astype(np.float32)
TYPES = [AxisType.Auto, AxisType.Explicit]


def init():
    return {
        "a": jnp.linspace(-1.0, 1.0, 32).reshape(4, 8),
        "b": jnp.linspace(1.0, -1.0, 32).reshape(8, 4),
    }


class Loss:
    """A loss that records the number of rows of each trace."""

    def __init__(self, spec=None):
        self.rows = []
        self.spec = spec

    def __call__(self, params, x, **kwargs):
        self.rows.append(x.shape[0])
        out = {} if self.spec is None else {"out_sharding": self.spec}
        hidden = jnp.tanh(jnp.einsum("bi,ij->bj", x, params["a"], **out))
        return jnp.mean((jnp.einsum("bi,ij->bj", hidden, params["b"], **out) - x) ** 2)

    @property
    def seen(self):
        """The number of rows, which all traces share."""
        (rows,) = set(self.rows)
        return rows


def mesh_over(devices, types=AxisType.Auto):
    return jax.make_mesh(
        (devices,), ("data",), axis_types=(types,), devices=jax.devices()[:devices]
    )


def fresh(mesh=None, **kwargs):
    return jstep.TrainState.create(init(), OPTIMIZER, mesh=mesh, **kwargs)


def shard(mesh, x, spec=None):
    return jax.device_put(x, NamedSharding(mesh, P("data") if spec is None else spec))


@pytest.mark.thorough(except_for=["8-64-100-1-64-True-AxisType.Auto"])
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("annotated", [True, False])
@pytest.mark.parametrize(
    ("devices", "size", "max_rows", "at_least", "want"),
    [
        (8, 64, 8, 1, 64),
        (1, 64, 8, 1, 8),
        (8, 64, 100, 1, 64),
        (8, 64, 8, 4, 16),  # no fewer than num_microbatches
        (8, 64, 3, 1, 16),  # 3 microbatches do not divide 64 rows
        (4, 24, 5, 1, 12),
        (4, 24, 6, 5, 4),  # 5 microbatches do not divide 24 rows
        (8, 24, 2, 1, 8),  # microbatches of 12 rows cannot be sharded over 8 devices
        (8, 8, 8, 2, 4),  # fewer rows than devices, as with num_microbatches
        (1, 7, 2, 1, 1),
    ],
)
def test_rows_of_a_microbatch(types, annotated, devices, size, max_rows, at_least, want):
    mesh = mesh_over(devices, types)
    loss = Loss(
        P("data") if annotated and types is AxisType.Explicit and want % devices == 0 else None
    )
    step = jstep.minimize(loss, OPTIMIZER, max_rows_per_device=max_rows, num_microbatches=at_least)
    for _ in range(2):
        step(fresh(mesh), shard(mesh, DATA[:size]))
    assert loss.seen == want


@pytest.mark.thorough
def test_the_number_of_microbatches_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    step = jstep.minimize(Loss(), OPTIMIZER, max_rows_per_device=5)
    state = jstep.TrainState.create(init(), OPTIMIZER)
    jstep.train(step, state, lambda n: DATA[:34], 3, progress=False, steps_per_call=2)
    found = [
        record.getMessage()
        for record in caplog.records
        if "max_rows_per_device" in record.getMessage()
    ]
    assert found == ["max_rows_per_device=5: batches of 34 rows are split into 17 microbatches"]
