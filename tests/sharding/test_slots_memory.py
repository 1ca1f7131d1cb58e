"""Slots in the memory of the host: the same bits as in that of the devices, whatever is done with them."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import data, loss_fn, shardings

import jstep

MESHES = {
    "explicit": jax.make_mesh((8,), ("data",)),
    "auto": jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)),
}
EMA = jstep.ExponentialMovingAverage(0.9)
OPTIMIZERS = {
    "held": jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.adam(jstep.held("learning_rate", 0.01))),
    "averaged": jstep.with_moving_average(jstep.skip_nonfinite(jstep.adamw(0.01)), EMA),
    "masters": jstep.master_weights(jstep.lookahead(jstep.lion(1e-3))),
    "factored": jstep.adafactor(0.01, min_dim_size_to_factor=4),
    "schedule free": jstep.schedule_free_adamw(0.01),
    "labels": jstep.partition(
        {"m": jstep.muon(0.01), "a": jstep.adam(0.01)},
        lambda path, leaf: "m" if leaf.ndim == 2 else "a",
    ),
}


def params():
    r = np.random.default_rng(0)
    shapes = {"a": (16, 32), "bias": (32,), "deep": {"x": (32, 16), "y": (16, 3)}, "scale": ()}
    return jax.tree.map(
        lambda shape: r.normal(size=shape).astype(np.float32) / 4, shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def make(mesh, name, **how):
    return jstep.TrainState.create(params(), OPTIMIZERS[name], mesh=mesh, slot_axis="data", **how)


def assert_same_bits(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, want)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits(name, mesh, compilations):
    step = jstep.minimize(loss_fn, OPTIMIZERS[name])
    batch = jstep.shard_batch(data(), mesh)
    stacked = jax.device_put([np.stack([leaf, leaf]) for leaf in data()], NamedSharding(mesh, P(None, "data")))

    def trained(state):
        before, given = shardings(state), state
        state, _ = step(state, *batch)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        state, _ = jstep.scan_steps(step)(state, *stacked)
        with compilations() as seen:
            state, _ = step(state, *batch)
        assert not seen
        assert shardings(state) == before
        _, grads = jstep.compute_gradients(loss_fn)(state.params, *batch)
        by_hand = jstep.apply_gradients(state, grads, OPTIMIZERS[name])
        assert shardings(by_hand) == before
        return state, by_hand

    on_host = trained(make(mesh, name, slots_memory="pinned_host"))
    for state in on_host:
        for leaf in jax.tree.leaves(state.slots):
            assert leaf.sharding.memory_kind == ("pinned_host" if leaf.ndim else "device")
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)} == {"device"}
    assert_same_bits(on_host, trained(make(mesh, name, slots_memory="device")))
    assert_same_bits(jstep.fingerprint(on_host[0]), jstep.fingerprint(jax.device_get(on_host[0])))


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_what_reads_slots_reads_them(mesh, tmp_path):
    step = jstep.minimize(loss_fn, OPTIMIZERS["averaged"])
    batches, where = jstep.batches(data(), 16, seed=1), NamedSharding(mesh, P("data"))
    how = {"checkpoint_dir": tmp_path, "save_checkpoint_steps": 2, "batch_sharding": where, "progress": False}
    jstep.train(step, make(mesh, "averaged", slots_memory="pinned_host"), batches, 3, **how)
    state = jstep.train(step, make(mesh, "averaged", slots_memory="pinned_host"), batches, 5, **how)
    want = jstep.train(step, make(mesh, "averaged"), batches, 5, batch_sharding=where, progress=False)
    assert_same_bits(state, want)
    assert state.slots["m"]["a"].sharding.memory_kind == "pinned_host"
    assert_same_bits(jstep.averaged_params(state), jstep.averaged_params(want))
    evaluate = jstep.evaluator(lambda p, x, y: {"loss": loss_fn(p, x, y)}, [data()], use_averages=True)
    assert evaluate(state) == evaluate(want)
    back = jstep.Saver(tmp_path).restore(make(mesh, "averaged"))
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(back)} == {"device"}
    assert jstep.find_nonfinite(step, state, *data()) is None
    moved = jstep.shard_state(want, mesh, slot_axis="data", slots_memory="pinned_host")
    assert shardings(moved) == shardings(state)
    shapes = jstep.shard_state(jax.eval_shape(lambda: want), mesh, slot_axis="data", slots_memory="pinned_host")
    assert shardings(shapes) == shardings(state)


def test_bad_memories():
    state = jstep.TrainState.create(params(), jstep.adam())
    with pytest.raises(ValueError, match=r"slots_memory='pined_host'.*pinned_host"):
        jstep.shard_state(state, MESHES["auto"], slots_memory="pined_host")
    with pytest.raises(TypeError, match="slots_memory=3"):
        jstep.shard_state(state, MESHES["auto"], slots_memory=3)
    with pytest.raises(ValueError, match=r"slots_memory.*give mesh"):
        jstep.TrainState.create(params(), jstep.adam(), slots_memory="pinned_host")
