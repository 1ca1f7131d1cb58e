"""Batches and prefetching under JAX contexts: meshes and transfer guards."""

import jax
import numpy as np
import pytest

from jstep.data.batches import batches
from jstep.data.prefetch import prefetch_to_device

MESHES = [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit]


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("sharding", [None, jax.P("data")])
def test_prefetch_under_a_mesh(kind, sharding):
    rows = np.arange(32.0).reshape(16, 2)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(kind,))):
        with prefetch_to_device(batches(rows, 8, shuffle=False, num_epochs=1), sharding=sharding) as items:
            found = list(items)
        assert len(found[0].sharding.device_set) == (1 if sharding is None else 8)
        assert float(jax.jit(lambda x: (2 * x).sum())(found[1])) == 2 * rows[8:].sum()


@pytest.mark.parametrize("sharding", [None, jax.sharding.SingleDeviceSharding(jax.devices()[1])])
@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
def test_transfer_guard_applies_only_to_the_source(sharding, level):
    def source():
        seen.append(jax.config.jax_transfer_guard_host_to_device)
        yield {"x": np.arange(3), "scale": 2.0}

    seen = []
    with jax.transfer_guard(level), prefetch_to_device(source(), sharding=sharding) as items:
        (item,) = items
    assert seen == [level]
    np.testing.assert_array_equal(item["x"], np.arange(3))
