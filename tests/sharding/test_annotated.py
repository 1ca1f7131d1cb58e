"""Models annotated for Explicit axes: every optimizer trains as on one device."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_text import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import LAYOUTS, assert_close, create, data, init, run, shardings
from optimizer_table import TABLE

import jstep


def annotated(layout):
    """The model of `layouts.loss_fn`, with an `out_sharding` for each ambiguous result."""
    hidden = P("data", "model" if layout == "model" else None)

    def dot(x, w, out):
        if layout == "fsdp":
            w = jax.sharding.reshard(w, P())  # gathered where it is used
        return jnp.einsum("bi,ij->bj", x, w, out_sharding=out)

    def loss_fn(params, x, y):
        mesh = jax.typeof(x).sharding.mesh
        assert mesh.empty or set(mesh.axis_types) == {AxisType.Explicit}
        if mesh.empty:  # on one device
            h = jnp.tanh(x @ params["a"] + params["bias"][None])
            out = jnp.tanh(h @ params["deep"]["x"]) @ params["deep"]["y"]
            return jnp.mean((params["scale"] * out - y) ** 2)
        bias = jax.sharding.reshard(params["bias"], P(hidden[1]))
        h = jnp.tanh(dot(x, params["a"], hidden) + bias[None])
        out = dot(jnp.tanh(dot(h, params["deep"]["x"], P("data"))), params["deep"]["y"], P("data"))
        return jnp.mean((params["scale"] * out - y) ** 2)

    return loss_fn


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "layout"), list(itertools.product(TABLE, LAYOUTS)))
def test_annotated_training_matches_one_device(name, layout, compilations, caplog):
    entry = TABLE[name]
    optimizer, steps = entry.make(entry.rate), min(entry.matching_steps or 6, 6)
    reference_step = jstep.minimize(annotated(layout), optimizer, metrics=("grad_norm", "param_norm"))
    step = jstep.minimize(annotated(layout), optimizer, metrics=("grad_norm", "param_norm"))
    state = create(layout, optimizer)
    before, mesh = shardings(state), LAYOUTS[layout][0]
    with compilations() as seen, caplog.at_level("INFO", "jstep"):
        state, got = run(step, state, lambda batch: jstep.shard_batch(batch, mesh), steps)
    assert len(seen) == 1
    assert shardings(state) == before
    assert not [line for line in caplog.messages if "Auto axes" in line]
    if entry.matching_steps == 0:  # rounding errors change the eigenbases of SOAP
        assert np.isfinite(got["loss"])
        return
    want, metrics = run(reference_step, jstep.TrainState.create(init(), optimizer), steps=steps)
    assert_close((state.params, state.slots), (want.params, want.slots))
    assert_close({key: got[key] for key in ("loss", "grad_norm")}, {key: metrics[key] for key in ("loss", "grad_norm")})


def test_one_reduction_for_all_microbatches():
    """Gradients of products are reduced once per step, except with `weight_fn`."""
    mesh = LAYOUTS["data"][0]
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), data())
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P("data"))), batch
    )

    def loss_fn(params, x, y):
        h = jnp.tanh(jnp.einsum("bi,ij->bj", x, params["a"], out_sharding=P("data")))
        h = jnp.tanh(jnp.einsum("bi,ij->bj", h, params["deep"]["x"], out_sharding=P("data")))
        return jnp.mean((jnp.einsum("bi,ji->bj", h, params["deep"]["y"].T, out_sharding=P("data")) - y) ** 2)

    optimizer = jstep.gradient_descent(0.1)

    def reduced_bytes(n, loss=loss_fn, **kwargs):
        step = jstep.minimize(loss, optimizer, num_microbatches=n, **kwargs)
        return collectives(step.lower(create("data", optimizer), *batch).compile().as_text())["all-reduce"].bytes

    once = reduced_bytes(1)
    assert reduced_bytes(8) <= 1.1 * once
    weighted = reduced_bytes(8, weight_fn=lambda x, y: jnp.float32(1))
    assert 1.1 * once < weighted <= 9 * once
