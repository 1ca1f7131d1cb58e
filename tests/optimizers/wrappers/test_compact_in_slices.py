"""The loops in which TPUs update what `compact` stores make the values of the update by whole leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jstep
from jstep.optimizers import by_slices
from jstep.state.slots import master_params

LR = 1e-2
EMA = jstep.ExponentialMovingAverage(0.9)
SHAPES = {"w": (64, 512), "layers": (4, 64, 3, 128), "row": (8192,), "odd": (96, 100), "b": (128,)}


def labels(path, leaf):
    return "b" if path == "w" else "a"


OPTIMIZERS = {
    "adamw": jstep.adamw(LR),
    "clip": jstep.chain(jstep.clip_gradients(by_global_norm=1.0), jstep.with_moving_average(jstep.ademamix(LR), EMA)),
    "adan": jstep.adan(LR),  # a slot of float32
    "prodigy": jstep.prodigy(),  # a slot that is only read, and sums over all leaves
    "lamb": jstep.lamb(LR),  # norms of leaves
    "labels": jstep.partition({"a": jstep.adamw(LR), "b": jstep.muon(LR)}, labels),
    "guard": jstep.skip_nonfinite(jstep.adamw(LR)),
    "projection": jstep.with_projection(jstep.lion(LR), lambda p: jax.tree.map(lambda x: jnp.clip(x, -1, 1), p)),
    "keep": None,
}


@pytest.fixture
def in_slices(monkeypatch):
    """Compile for the CPU what is meant for TPUs, with small slices."""
    monkeypatch.setattr(by_slices, "LARGE", 4096)
    monkeypatch.setattr(by_slices, "SLICE", 8192)
    used = []

    def only_tpu(*args, tpu=None, default=None, **others):
        used.append(tpu)
        return (tpu or default)(*args)

    def use():
        monkeypatch.setattr(jax.lax, "platform_dependent", only_tpu)
        return used

    return use


def create(name, dtype):
    optimizer = OPTIMIZERS[name]
    optimizer = jstep.compact(jstep.adamw(LR), keep=["w"]) if optimizer is None else jstep.compact(optimizer)
    rng = np.random.default_rng(0)
    params = {key: jnp.asarray(rng.normal(size=shape), dtype) for key, shape in SHAPES.items()}
    return optimizer, jstep.TrainState.create(params, optimizer)


def trained(optimizer, state):
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))
    for i in range(3):
        rng = np.random.default_rng(i)
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), state.params)  # noqa: B023
        grads["b"] = None if i == 1 else grads["b"]
        grads["odd"] = None if i == 1 else grads["odd"]
        state = step(state, grads)
    return state


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_make_the_same_values(name, dtype, in_slices):
    most = 0.02 if name == "labels" else 0.002  # Muon's products of matrices amplify what differs
    optimizer, start = create(name, dtype)
    whole = trained(optimizer, start)
    used = in_slices()
    sliced = trained(optimizer, start)
    assert any(used)
    assert jax.tree.structure(sliced) == jax.tree.structure(whole)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(sliced), jax.tree.leaves(whole), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        # Kernels may differ in the last bits of a value, and so in a code that is at the border of two.
        is_float = one.dtype == jnp.float32
        close = np.isclose(one, other, rtol=1e-6, atol=0) if is_float else np.asarray(one == other)
        if one.ndim:
            assert np.mean(~close) < (0.01 if is_float else most), jax.tree_util.keystr(path)
    for one, other in zip(jax.tree.leaves(values(sliced)), jax.tree.leaves(values(whole)), strict=True):
        np.testing.assert_allclose(one, other, atol=0.02 * np.max(np.abs(other)), rtol=1e-2)


def values(state):
    return master_params(state), {name: jstep.get_slot(state, name) for name in jstep.get_slot_names(state)}


def test_axes_that_a_mesh_splits_are_not_cut(monkeypatch):
    """With the layout unknown on several TPUs, no axis is."""
    from jstep.core.exceptions import setting
    from jstep.core.placement import LAYOUTS

    mesh = jax.make_mesh((4, 2), ("x", "y"))
    for spec, expected in {
        (): (1, 128, 4096), ("x",): (64, 32, 256), (None, "y"): (1, 4096, 128), ("x", "y"): (64, 4096, 128),
    }.items():  # fmt: skip
        layouts = {"w": NamedSharding(mesh, PartitionSpec(*spec))}
        with setting(LAYOUTS, layouts):
            assert by_slices.slice_shape("w", (64, 4096, 4096), None) == expected, spec
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert by_slices.slice_shape("w", (64, 4096, 4096), None) == (64, 4096, 4096)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert by_slices.slice_shape("w", (64, 4096, 4096), None) == (1, 128, 4096)


@pytest.mark.thorough(except_for=["default"])
@pytest.mark.parametrize("platform", ["tpu", "cuda", "default"])
def test_conditions_of_an_update_reach_the_wrappers_around_it(platform, monkeypatch):
    """A projection leaves a parameter alone whose update is not due, whatever the platform."""
    monkeypatch.setattr(by_slices, "LARGE", 4096)
    optimizer = jstep.with_projection(
        jstep.compact(jstep.update_every(2, jstep.lion(LR))), lambda p: jax.tree.map(lambda x: jnp.clip(x, 0, 0.5), p)
    )
    state = jstep.TrainState.create({"w": jnp.ones((64, 128), jnp.bfloat16)}, optimizer)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, **ways: ways.get(platform, ways["default"])(*args))
    step = jax.jit(lambda state: jstep.apply_gradients(state, state.params, optimizer))
    for expected in (1.0, 0.5):
        state = step(state)
        np.testing.assert_array_equal(state.params["w"], np.full((64, 128), expected, jnp.bfloat16))


def test_gpus_compute_a_leaf_twice_and_tpus_once(monkeypatch):
    """On GPUs the second kernel computes the values again, which are nowhere stored in float32."""
    monkeypatch.setattr(by_slices, "LARGE", 8192)
    programs = {}

    def traced(*args, default, **others):
        programs.update({name: jax.make_jaxpr(others[name])(*args) for name in others})
        return default(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", traced)
    optimizer = jstep.compact(jstep.adamw(LR))
    state = jstep.TrainState.create({"w": jnp.ones((64, 128), jnp.bfloat16)}, optimizer)
    jstep.apply_gradients(state, state.params, optimizer)
    roots = {name: str(program).count(" sqrt ") for name, program in programs.items()}
    assert roots["cuda"] > roots["tpu"] > 0  # each also has those of its codes
