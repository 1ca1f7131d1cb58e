"""Every optimizer in combination: skipped steps, restarts, partitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import (
    FEW,
    PARAMS,
    assert_same,
    avals,
    bitwise_equal,
    compile_step,
    compiled_step,
    for_each,
    gradients,
    make_optimizer,
    mixed_gradients,
    mixed_params,
)
from optimizer_table import TABLE

import jstep

STEP_INDEPENDENT = [name for name, entry in TABLE.items() if not entry.by_step]


@for_each([name for name in STEP_INDEPENDENT if "last_finite_step" not in TABLE[name].scalars], FEW)
def test_a_skipped_step_changes_only_counters(name):
    optimizer = jstep.skip_nonfinite(make_optimizer(name))
    step = compile_step(optimizer)
    a = b = jstep.TrainState.create(PARAMS, optimizer)
    for scale in (1.0, np.nan, -0.5, 0.75):
        a = step(a, gradients(scale * a.slots.get("loss_scale", 1.0))) if np.isfinite(scale) else a
        b = step(b, gradients(scale * b.slots.get("loss_scale", 1.0)))
    assert_same(a.params, b.params)
    assert int(b.slots["last_finite_step"]) == int(b.global_step) == 4
    for slot, tree in a.slots.items():
        last = slot.rsplit("/", 1)[-1]
        if last == "start_step":
            assert int(b.slots[slot]) == 1
        elif last not in ("loss_scale", "scale_since", "last_finite_step"):
            assert_same(tree, b.slots[slot])


@for_each(TABLE, FEW)
def test_resume_is_bitwise(name, tmp_path):
    optimizer, step = make_optimizer(name), compiled_step(name)
    state = jstep.TrainState.create(PARAMS, optimizer)
    uninterrupted = state
    for scale in (1.0, -0.5):
        state = step(state, gradients(scale))
    with jstep.Saver(tmp_path) as saver:
        saver.save(state)
        resumed = saver.restore(jstep.TrainState.create(PARAMS, optimizer))
    for scale in (1.0, -0.5, 0.75, 0.25):
        uninterrupted = step(uninterrupted, gradients(scale))
    for scale in (0.75, 0.25):
        resumed = step(resumed, gradients(scale))
    assert_same(uninterrupted, resumed)


@for_each(TABLE, ["adam"])
def test_partition_with_labels_that_share_a_prefix(name):
    def by_path(path, leaf):
        return None if path == "b/scalar" else "net" if path == "a" else "net/deep"

    optimizer = jstep.partition(
        {"net": make_optimizer(name), "net/deep": make_optimizer(name)}, by_path
    )
    before = jstep.TrainState.create(mixed_params(), optimizer)
    step, after = compile_step(optimizer), before
    rejected = {  # they concern the whole loss and must be outermost
        "dynamic_loss_scale": r"must be outermost, got .*'net/loss_scale', 'net/deep/loss_scale'",
        "with_noise_scale": r"must be outermost, got .*'net/noise/gradient_noise'",
    }
    if name in rejected:
        with pytest.raises(ValueError, match=rejected[name]):
            step(after, mixed_gradients())
        return
    for _ in range(TABLE[name].idle + 1):
        after = step(after, mixed_gradients())
    assert avals(before) == avals(after)
    assert bitwise_equal(before.params["b"]["scalar"], after.params["b"]["scalar"])
    assert not bitwise_equal(before.params["a"], after.params["a"]) or name == "frozen"
    assert sorted(jstep.get_slot_names(after)) == sorted(
        f"{label}/{slot}" for label in ("net", "net/deep") for slot in TABLE[name].slots
    )


# A partial restore of parameters alone is a new state with these parameters.

STEP = 7


@for_each(TABLE, ["adam"])
def test_a_partial_restore_of_parameters_is_a_state_made_of_them(name, tmp_path):
    trained = jax.tree.map(
        lambda p: p * 3 + 1 if jnp.issubdtype(p.dtype, jnp.floating) else p, mixed_params()
    )
    optimizer = make_optimizer(name)
    want = jstep.TrainState.create(trained, optimizer, global_step=STEP)
    with jstep.Saver(tmp_path) as saver:
        saver.save(jstep.TrainState.create(trained, jstep.gradient_descent(0.1), global_step=STEP))
        got = saver.restore(
            jstep.TrainState.create(mixed_params(), optimizer, global_step=STEP), partial=True
        )
    assert_same(got, want)
    zeros = mixed_gradients(0.0)
    assert_same(
        jstep.apply_gradients(got, zeros, optimizer, scaled=True),
        jstep.apply_gradients(want, zeros, optimizer, scaled=True),
    )
