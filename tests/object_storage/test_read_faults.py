"""Reads with a fault at each request return the expected values or raise; unusual prefixes and kinds of leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from object_states import state_at

import jstep

pytestmark = pytest.mark.usefixtures("one_retry")


def read(url):
    """Return the results of all read operations."""
    reader = jstep.Saver(url)
    back = reader.restore(state_at(0))
    return (
        jstep.latest_checkpoint(url),
        reader.latest_step(),
        reader.all_steps(),
        reader.extra(),
        int(back.global_step),
        np.asarray(back.params["w"]).tolist(),
    )


@pytest.mark.thorough(except_for=["gs-503-True", "s3-403-False"])
@pytest.mark.parametrize("lasts", [True, False])
@pytest.mark.parametrize("status", [503, 403, 401, 404, 0])
def test_a_fault_at_each_request(store, status, lasts):
    store.page = 1000
    with jstep.Saver(store.run) as saver:
        for step in (1, 2):
            saver.save(state_at(step), extra=step)
    before = len(store.seen)
    expected = read(store.run)
    assert expected[1:5] == (2, [1, 2], 2, 2)
    count = len(store.seen) - before
    wrong = []
    for n in range(count):
        store.fail = [("", "", None, n), ("", "", status, 10**6 if lasts else 1)]
        try:
            result = read(store.run)
        except (OSError, jstep.CheckpointError) as error:
            assert "bkt" in str(error)  # noqa: PT017
            assert "secret" not in str(error)  # noqa: PT017
            assert lasts or status in (403, 401, 404)
        else:
            wrong += [n] if result != expected else []
    store.fail = []
    # A single 404 is taken as a missing object, except for lists.
    assert status == 404 or not wrong


@pytest.mark.parametrize("prefix", ["my model%25", "a+b&c=d;?#", "модель", "~~", "model-1"])
def test_unusual_prefixes(store, prefix):
    """A prefix that sorts after the marker object has a marker of its own."""
    store.page = 1000
    with jstep.Saver(store.run, prefix=prefix, max_to_keep=2) as saver:
        for step in (1, 2, 3):
            path = saver.save(state_at(step))
        assert saver.all_steps() == [2, 3]
        assert path == f"{store.run}/{prefix}-3"
        assert saver.restore(state_at(0)).params["w"][0, 0] == 3
    with jstep.Saver(store.run) as saver:
        saver.save(state_at(1))
    assert jstep.latest_checkpoint(store.run) == path
    assert jstep.latest_checkpoint(store.run, "model") == f"{store.run}/model-1"
    assert jstep.Saver(store.run, prefix=prefix).all_steps() == [2, 3]


def test_a_bucket_as_directory(store):
    url = store.run.removesuffix("/run")
    with jstep.Saver(url) as saver:
        assert saver.save(state_at(1)) == f"{url}/model-1"
    assert jstep.latest_checkpoint(url) == f"{url}/model-1"
    with jstep.Saver(store.run) as saver:
        saver.save(state_at(5))
    assert jstep.Saver(url).all_steps() == [1]


def test_dtypes_on_a_mesh(store):
    sharding = NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
    kinds = ["bfloat16", "float8_e4m3fn", "int4", "uint4", "bool", "int8", "complex64", "float16"]
    params = {kind: jax.device_put(np.arange(16).astype(jnp.dtype(kind)), sharding) for kind in kinds}
    params["key"] = jax.device_put(jax.random.split(jax.random.key(0), 8), sharding)
    params["scalar"] = jax.device_put(jnp.float32(2.0), NamedSharding(sharding.mesh, P()))
    state = jstep.TrainState(params, {}, jnp.int32(1))
    with jstep.Saver(store.run) as saver:
        saver.save(state)
        back = saver.restore(state)
    for kind in [*kinds, "scalar"]:
        assert back.params[kind].dtype == params[kind].dtype
        assert back.params[kind].sharding == params[kind].sharding
        assert jnp.array_equal(back.params[kind], params[kind])
    assert jnp.array_equal(jax.random.key_data(back.params["key"]), jax.random.key_data(params["key"]))
