"""The warning for a run whose devices all compute the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jstep

ROWS = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    return jax.make_mesh((8,), ("examples",), axis_types=(request.param,))


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def warnings(caplog, mesh, spec=None, loss_fn=loss_fn, batches=None, params=None, **options):
    spec = P() if spec is None else spec
    optimizer = jstep.adam(0.1)
    params = {"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, spec))} if params is None else params
    state = jstep.TrainState.create(params, optimizer)
    batches = jstep.batches(ROWS, 16, seed=0) if batches is None else batches
    jstep.train(jstep.minimize(loss_fn, optimizer), state, batches, 4, progress=False, **options)
    return [record.getMessage() for record in caplog.records if "computes all rows" in record.getMessage()]


@pytest.mark.thorough(except_for=["explicit-2"])
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_replicated_parameters_and_batches_give_one_warning(caplog, mesh, steps_per_call):
    (message,) = warnings(caplog, mesh, steps_per_call=steps_per_call)
    assert "each of the 8 devices" in message
    assert "batch_sharding='examples'" in message


@pytest.mark.thorough(except_for=["explicit"])
def test_the_remedy_of_the_warning_works(caplog, mesh):
    assert not warnings(caplog, mesh, batch_sharding=NamedSharding(mesh, P("examples")))


def test_split_parameters_give_no_warning(caplog):
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    assert not warnings(caplog, mesh, P(None, "model"))


@pytest.mark.thorough(except_for=["auto"])
def test_a_loss_that_shards_its_activations_gives_no_warning(caplog, mesh):
    def sharded(params, x):
        if AxisType.Explicit in mesh.axis_types:
            return loss_fn(params, jax.reshard(x, P("examples")))
        return loss_fn(params, jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("examples"))))

    def mapped(params, x):
        def local(w, x):
            return jax.lax.pmean(loss_fn({"w": w}, x), "examples")

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("examples")), out_specs=P())(params["w"], x)

    assert not warnings(caplog, mesh, loss_fn=sharded)
    if AxisType.Auto in mesh.axis_types:  # on Explicit axes JAX refuses an unsharded batch here
        assert not warnings(caplog, mesh, loss_fn=mapped)
