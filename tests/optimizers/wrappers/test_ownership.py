"""A slot belongs to the optimizer that created it, whatever its name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep
from jstep.slots.compact_numbers import join_halves

PARAMS = {"decoder": {"attn": jnp.ones(2), "mlp": jnp.ones(2)}, "head": jnp.ones(2)}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)


def update(state, optimizer, grads=GRADS):
    return jax.jit(lambda s, g: jstep.apply_gradients(s, g, optimizer))(state, grads)


def test_custom_optimizers_may_return_the_slots_they_got():
    """A custom optimizer gets only its own slots, so that it cannot overwrite others."""
    seen = []

    def custom_update(updates, slots, params, step):
        seen.append(sorted(slots))
        return updates, {**slots, "calls": slots["calls"] + 1}

    custom = jstep.Optimizer(
        lambda params, global_step=0: {"calls": jnp.zeros((), jnp.int32)},
        custom_update,
        lambda step: {},
    )
    optimizer = jstep.chain(jstep.adam(0.1), jstep.scope(custom, "mine"), custom)
    state = update(jstep.TrainState.create(PARAMS, optimizer), optimizer)
    assert seen == [["calls"], ["calls"]]
    assert int(state.slots["calls"]) == int(state.slots["mine/calls"]) == 1
    assert float(state.slots["m"]["head"][0]) > 0


def test_two_finished_updates_in_a_chain_warn():
    first, second = jstep.scope(jstep.adam(1.0), "a"), jstep.gradient_descent(0.1)
    with pytest.warns(
        UserWarning,
        match=r"optimizers\[0\] makes finished updates, .*gradient ascent",
    ):
        optimizer = jstep.chain(first, second)
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    state = jstep.apply_gradients(state, {"w": jnp.float32(3.0)}, optimizer)
    np.testing.assert_allclose(state.params["w"], 0.1, rtol=1e-6)  # gradient ascent
    with pytest.raises(ValueError, match="'learning_rate'") as caught:
        jstep.chain(jstep.adam(1.0), second)
    assert "gradient ascent" in str(caught.value.__notes__)
    held = jstep.scope(jstep.gradient_descent(jstep.held("rate", 0.1)), "b")
    with pytest.warns(UserWarning, match="gradient ascent"):
        jstep.chain(jstep.skip_nonfinite(first), held)
    custom = jstep.Optimizer(
        lambda p, global_step=0: {}, lambda u, s, p, n: (u, s), lambda n: {"x/learning_rate": 0.1}
    )
    with pytest.warns(UserWarning, match="gradient ascent"):
        jstep.chain(first, custom)
    jstep.chain(
        first,
        jstep.clip_gradients(by_norm=1.0),
        jstep.decay_weights(0.1),
        jstep.scale_updates({"*": 0.5}),
    )


def test_masks_inside_partition_match_against_all_params():
    mask, bools = ["decoder/*", "head"], {"decoder": True, "head": False}
    optimizer = jstep.partition(
        {
            "decoder": jstep.chain(jstep.gradient_descent(0.0), jstep.decay_weights(0.5, mask)),
            "head": jstep.chain(jstep.gradient_descent(0.0), jstep.decay_weights(0.5, bools)),
        },
        lambda path, leaf: path.split("/")[0],
    )
    new = update(jstep.TrainState.create(PARAMS, optimizer), optimizer).params
    np.testing.assert_allclose(new["decoder"]["attn"], 0.5)
    np.testing.assert_allclose(new["head"], 1.0)
    wrong = jstep.partition(
        {"all": jstep.decay_weights(0.5, ["decoder/atn"])}, lambda path, leaf: "all"
    )
    with pytest.raises(
        ValueError,
        match=r"mask: 'decoder/atn' matches no parameter; nearest: 'decoder/attn'",
    ):
        update(jstep.TrainState.create(PARAMS, wrong), wrong)


# `repack`: states and checkpoints between float32 slots, `compact` and `master_weights`.

PLAIN = jstep.with_moving_average(jstep.adamw(1e-2), jstep.ExponentialMovingAverage(0.9))
COMPACT = jstep.compact(PLAIN)
MASTERS = jstep.master_weights(PLAIN)


@functools.cache
def step_of(optimizer):
    return jax.jit(lambda state, grads: jstep.apply_gradients(state, grads, optimizer))


def trained(optimizer, dtype=jnp.bfloat16, steps=3, model_state=None):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(64, 128)), dtype), "b": jnp.ones((8,), dtype)}
    state = jstep.TrainState.create(params, optimizer, model_state=model_state)
    for _ in range(steps):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), dtype), params)
        state = step_of(optimizer)(state, grads)
    return state


def form(state):
    return jax.tree.map(lambda x: (x.shape, x.dtype), state)


def near(one, other, within=0.01):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.float32(a), np.float32(b)
        assert np.max(np.abs(a - b)) <= within * max(np.max(np.abs(b)), 1e-30)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("old", "new"), [(PLAIN, COMPACT), (COMPACT, PLAIN), (MASTERS, COMPACT), (COMPACT, MASTERS)]
)
def test_a_state_is_converted_both_ways(dtype, old, new):
    before = trained(old, dtype, model_state={"seen": 3})
    made = jstep.repack(before, old, new)
    assert form(made) == form(jstep.TrainState.create(before.params, new, model_state={"seen": 3}))
    assert jax.tree.structure(made) == jax.tree.structure(
        trained(new, dtype, 1, model_state={"seen": 3})
    )
    assert int(made.global_step) == 3
    for name in ("m", "v", "ExponentialMovingAverage"):
        near(jstep.get_slot(made, name), jstep.get_slot(before, name))
    assert made.slots["start_step"] == before.slots["start_step"]
    assert made.model_state == before.model_state
    near(made.params, before.params, 2**-7)
    assert int(step_of(new)(made, jax.tree.map(jnp.ones_like, made.params)).global_step) == 4


def test_the_master_goes_into_parameter_and_remainder_and_back():
    before = trained(MASTERS)
    made = jstep.repack(before, MASTERS, COMPACT)
    master = join_halves(made.params["w"], made.slots["remainder"]["w"])
    assert (
        np.max(np.abs(master - before.slots["master"]["w"]) / np.abs(before.slots["master"]["w"]))
        < 2**-16
    )
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
    new = jstep.partition(
        {"a": COMPACT, "b": jstep.compact(jstep.sgd(0.1, 0.9), min_size=0)}, labels
    )
    before = trained(old)
    made = jstep.repack(before, old, new)
    assert {"a/remainder", "b/remainder", "a/m/scale", "b/momentum/scale"} <= set(made.slots)
    near(
        join_halves(made.params["w"], made.slots["a/remainder"]["w"]),
        before.slots["a/master"]["w"],
        2**-16,
    )


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
        with pytest.raises(
            ValueError,
            match=r"jstep.repack\(state, old_optimizer, new_optimizer\)",
        ):
            saver.restore(trained(new, dtype, 0))
        restored = saver.restore(trained(old, dtype, 0))
    assert restored == trained(old, dtype)
    assert int(jstep.repack(restored, old, new).global_step) == 3
