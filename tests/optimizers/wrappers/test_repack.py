"""`repack`: states and checkpoints between float32 slots, `compact` and `master_weights`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.slots.compact_numbers import join_halves

PLAIN = jstep.with_moving_average(jstep.adamw(1e-2), jstep.ExponentialMovingAverage(0.9))
COMPACT = jstep.compact(PLAIN)
MASTERS = jstep.master_weights(PLAIN)


def trained(optimizer, dtype=jnp.bfloat16, steps=3, model_state=None):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(64, 128)), dtype), "b": jnp.ones((8,), dtype)}
    state = jstep.TrainState.create(params, optimizer, model_state=model_state)
    for _ in range(steps):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), dtype), params)
        state = jstep.apply_gradients(state, grads, optimizer)
    return state


def form(state):
    return jax.tree.map(lambda x: (x.shape, x.dtype), state)


def near(one, other, within=0.01):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.float32(a), np.float32(b)
        assert np.max(np.abs(a - b)) <= within * max(np.max(np.abs(b)), 1e-30)


@pytest.mark.thorough(except_for=["old2-new2-bfloat16"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("old", "new"), [(PLAIN, COMPACT), (COMPACT, PLAIN), (MASTERS, COMPACT), (COMPACT, MASTERS)])
def test_a_state_is_converted_both_ways(dtype, old, new):
    before = trained(old, dtype, model_state={"seen": 3})
    made = jstep.repack(before, old, new)
    assert form(made) == form(jstep.TrainState.create(before.params, new, model_state={"seen": 3}))
    assert jax.tree.structure(made) == jax.tree.structure(trained(new, dtype, 1, model_state={"seen": 3}))
    assert int(made.global_step) == 3
    for name in ("m", "v", "ExponentialMovingAverage"):
        near(jstep.get_slot(made, name), jstep.get_slot(before, name))
    assert made.slots["start_step"] == before.slots["start_step"]
    assert made.model_state == before.model_state
    near(made.params, before.params, 2**-7)
    step = jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, new), donate_argnums=0)
    assert int(step(made, jax.tree.map(jnp.ones_like, made.params)).global_step) == 4


def test_the_master_goes_into_parameter_and_remainder_and_back():
    before = trained(MASTERS)
    made = jstep.repack(before, MASTERS, COMPACT)
    master = join_halves(made.params["w"], made.slots["remainder"]["w"])
    assert np.max(np.abs(master - before.slots["master"]["w"]) / np.abs(before.slots["master"]["w"])) < 2**-16
    again = jstep.repack(made, COMPACT, MASTERS)
    assert np.array_equal(again.slots["master"]["w"], master)
    assert np.array_equal(again.params["w"], master.astype(jnp.bfloat16))
    assert again.slots["master"]["b"] is not again.params["b"]


def test_a_compact_state_survives_a_round_trip():
    state = trained(COMPACT)
    again = jstep.repack(jstep.repack(state, COMPACT, MASTERS), MASTERS, COMPACT)
    for name in ("m", "v", "remainder", "ExponentialMovingAverage"):
        assert np.array_equal(again.slots[name]["w"], state.slots[name]["w"]), name
    assert np.array_equal(again.params["w"], state.params["w"])


def test_labels():
    def labels(path, leaf):
        return "a" if path == "w" else "b"

    old = jstep.partition({"a": MASTERS, "b": jstep.sgd(0.1, 0.9)}, labels)
    new = jstep.partition({"a": COMPACT, "b": jstep.compact(jstep.sgd(0.1, 0.9), min_size=0)}, labels)
    before = trained(old)
    made = jstep.repack(before, old, new)
    assert {"a/remainder", "b/remainder", "a/m/scale", "b/momentum/scale"} <= set(made.slots)
    near(join_halves(made.params["w"], made.slots["a/remainder"]["w"]), before.slots["a/master"]["w"], 2**-16)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (jstep.adam(), COMPACT, "old_optimizer: must be the optimizer of the state"),
        (COMPACT, PLAIN, "old_optimizer"),
        (PLAIN, jstep.compact(jstep.adamw(1e-2)), "new_optimizer: must be the optimizer of the state"),
        (PLAIN, jstep.compact(jstep.with_moving_average(jstep.lion(1e-2), jstep.ExponentialMovingAverage(0.9))),
         "new_optimizer"),
    ],
)  # fmt: skip
def test_a_wrong_optimizer_is_refused(old, new, match):
    with pytest.raises(ValueError, match=match):
        jstep.repack(trained(PLAIN), old, new)


@pytest.mark.thorough(except_for=["old0-new0-bfloat16"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (PLAIN, COMPACT),
        (COMPACT, PLAIN),
        (COMPACT, MASTERS),
        (COMPACT, jstep.compact(PLAIN, block=32)),
    ],
)
def test_a_checkpoint_of_another_format_is_an_error_that_shows_repack(dtype, old, new, tmp_path):
    with jstep.Saver(tmp_path) as saver:
        saver.save(trained(old, dtype))
        with pytest.raises(ValueError, match=r"jstep.repack\(state, old_optimizer, new_optimizer\)"):
            saver.restore(trained(new, dtype, 0))
        restored = saver.restore(trained(old, dtype, 0))
    assert restored == trained(old, dtype)
    assert int(jstep.repack(restored, old, new).global_step) == 3
