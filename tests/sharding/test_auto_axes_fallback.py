"""Losses that JAX rejects on Explicit axes fall back to Auto axes, with one log line or JAX's error."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

import jstep

EXPLICIT = jax.make_mesh((4, 2), ("data", "model"))
MIXED = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
AUTO = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)
IDS = np.arange(16, dtype=np.int32) % 5
OPTIMIZER = jstep.adam(0.01)


def create(mesh=None):
    params = {"table": jnp.linspace(0.0, 1.0, 40).reshape(5, 8), "w": jnp.ones((8, 4))}
    state = jstep.TrainState.create(params, OPTIMIZER)
    return state if mesh is None else jstep.shard_state(state, mesh)


def gather(params, x, ids):
    return jnp.mean(((params["table"][ids] + x) @ params["w"]) ** 2)


@pytest.mark.thorough(except_for=["1-explicit"])
@pytest.mark.parametrize("mesh", [EXPLICIT, MIXED], ids=["explicit", "mixed"])
@pytest.mark.parametrize("n", [1, 2])
def test_fallback_to_auto_axes(mesh, n, caplog):
    calls, prints = [], []

    def loss(params, x, ids):
        calls.append(1)
        jax.debug.callback(lambda _: prints.append(1), jnp.sum(params["w"]))
        return gather(params, x, ids)

    caplog.set_level(logging.INFO, "jstep")
    step = jstep.minimize(loss, OPTIMIZER, num_microbatches=n)
    state, want = create(mesh), create()
    for _ in range(2):
        state, metrics = step(state, *jstep.shard_batch((X, IDS), mesh))
        want, want_metrics = jstep.minimize(gather, OPTIMIZER)(want, X, IDS)
    jax.effects_barrier()
    np.testing.assert_allclose(metrics["loss"], want_metrics["loss"], rtol=1e-5)
    assert len(calls) == 2
    assert len(prints) == 2 * n
    (line,) = [line for line in caplog.messages if "Auto axes" in line]
    assert "loss is computed on Auto axes" in line
    assert "ShardingTypeError" in line


def branches(params, x, ids):
    return jnp.sum(params["w"]) if jnp.sum(x) > 0 else jnp.sum(params["table"])


def asserts(params, x, ids):
    assert x.shape == (3,), f"{x}"


def converts(params, x, ids):
    return jnp.sum(np.asarray(x) @ params["w"])


@pytest.mark.parametrize("loss", [branches, asserts, converts])
@pytest.mark.parametrize("n", [1, 2])
def test_other_errors_do_not_mention_axes(loss, n):
    kinds = []
    for mesh in (EXPLICIT, AUTO):
        with pytest.raises(Exception) as caught:
            jstep.minimize(loss, OPTIMIZER, num_microbatches=n)(create(mesh), *jstep.shard_batch((X, IDS), mesh))
        kinds.append(caught.type)
        assert not [note for note in getattr(caught.value, "__notes__", []) if "axes" in note]
    assert kinds[0] is kinds[1]


def test_errors_on_both_axis_types_raise_the_first():
    def half_annotated(params, x, ids):
        rows = params["table"].at[ids].get(out_sharding=P("data"))
        return gather(params, rows, ids)

    batch = jstep.shard_batch((X, IDS), EXPLICIT)
    with pytest.raises(Exception, match="out_sharding=") as caught:
        jstep.minimize(half_annotated, OPTIMIZER)(create(EXPLICIT), *batch)
    assert type(caught.value).__name__ == "ShardingTypeError"
    assert [note for note in caught.value.__notes__ if "axis_types=" in note]


@pytest.mark.parametrize("gradients", [False, True], ids=["step", "gradients"])
def test_what_is_computed_on_auto_axes_is_sharded_like_the_state(gradients):
    """Replicated parameters, slots or gradients would not fit where the state is sharded."""
    specs = {"table": P(None, "model"), "w": P("data", None)}
    state = create()
    state = jstep.shard_state(state, EXPLICIT, specs)
    if gradients:
        _, grads = jstep.compute_gradients(gather)(state.params, X, IDS)
        found = [grads]
    else:
        step = jstep.minimize(gather, OPTIMIZER, donate=False, jit=False)
        new, _ = step(state, X, IDS)
        found = [new.params, new.slots["m"], new.slots["v"]]
    for tree in found:
        assert {name: P(*(*leaf.sharding.spec, None)[:2]) for name, leaf in tree.items()} == specs
