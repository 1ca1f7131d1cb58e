"""Checkpoints of states that `compact` stores: averages are read with both halves, and formats are never mixed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jstep

EMA = jstep.ExponentialMovingAverage(0.9)
AVERAGE = "ExponentialMovingAverage"
INNER = jstep.adamw(1e-2)
AVERAGED = jstep.compact(jstep.with_moving_average(INNER, EMA))
both_dtypes = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])


def trained(optimizer, dtype, steps=3, mesh=None, scope="remainder"):
    rng = np.random.default_rng(0)
    # Slots of a parameter `remainder/w` have the paths of the halves of `w`: nothing is found by its spelling.
    params = {scope: {"w": jnp.asarray(rng.normal(size=(64, 128)), dtype)}, "w": jnp.ones((64, 128), dtype)}
    params["b"] = jnp.ones(8, dtype)
    state = jstep.TrainState.create(params, optimizer, mesh=mesh, param_specs=None if mesh is None else P("data"))
    for _ in range(steps):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), dtype), params)
        state = jstep.apply_gradients(state, grads, optimizer)
    return state


def is_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.thorough(except_for=["bfloat16"])
@both_dtypes
def test_averages_are_restored_with_their_remainder(dtype, tmp_path):
    state = trained(AVERAGED, dtype)
    wanted = jstep.averaged_params(state)
    on_host = jax.tree.map(np.asarray, state)
    with jstep.Saver(tmp_path) as saver:
        path = saver.save(state)
        is_same(saver.restore(state, use_averages=True).params, wanted)
        is_same(saver.restore(on_host, use_averages=True).params, wanted)
        is_same(saver.restore(jax.eval_shape(lambda: state), use_averages=True).slots, state.slots)
        is_same(saver.restore_params(state.params, use_averages=True), wanted)
        is_same(saver.restore(None, use_averages=True)["params"], wanted)
    names = lambda name: f"slots/{AVERAGE}/{name}"  # noqa: E731
    is_same(jstep.load_weights(path, state.params, names=names, dtype=dtype), wanted)
    moments = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), state.params)
    loaded = jstep.load_weights(path, moments, names=lambda name: f"slots/v/{name}", dtype=jnp.float32)
    is_same(loaded, jax.tree.map(lambda x: x.astype(jnp.float32), jstep.get_slot(state, "v")))


@pytest.mark.thorough(except_for=["other0-bfloat16"])
@both_dtypes
@pytest.mark.parametrize("other", [INNER, jstep.compact(INNER, block=32), jstep.master_weights(INNER)])
def test_a_partial_restore_into_another_format_shows_repack(dtype, other, tmp_path):
    compact = jstep.compact(INNER)
    for number, (old, new) in enumerate([(compact, other), (other, compact)]):
        with jstep.Saver(tmp_path / str(number)) as saver:
            saver.save(trained(old, dtype))
            for partial in (False, True):
                with pytest.raises(ValueError, match=r"state = jstep.repack\(state, old_optimizer, new_optimizer\)"):
                    saver.restore(trained(new, dtype, 0), partial=partial)
            is_same(saver.restore_params(trained(new, dtype, 0).params), trained(old, dtype).params)
            target = {"params": trained(new, dtype, 0).params}
            is_same(saver.restore(target, partial=True)["params"], trained(old, dtype).params)
