"""Several updates in one step draw different random numbers, as many steps of one update do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optimizer_table import TABLE

import jstep
from jstep.slots.roles import Role, roles_of
from jstep.state.slots import master_params

KEY = jax.random.key(7)
ROWS = 4096
ROUND = 2.0**-11
"""The move of an update: a bfloat16 near 1 has steps of 2⁻⁸ below it."""
NOISE = jstep.add_noise(ROUND**2, 0.0, KEY)
ROUNDING = jstep.stochastic_rounding(jstep.sgd(ROUND), KEY)


def compact(*elements):
    return jstep.compact(jstep.chain(*elements, jstep.sgd(2.0**-18)), min_size=1)


NOISY = jstep.chain(NOISE, jstep.sgd(1.0))
WRAPPED = {
    "cautious": jstep.cautious(NOISY),
    "dynamic_loss_scale": jstep.dynamic_loss_scale(NOISY),
    "lookahead": jstep.lookahead(NOISY, 100),
    "master_weights": jstep.master_weights(NOISY),
    "update_every": jstep.update_every(NOISY, 1),
    "accumulating": jstep.update_every(NOISY, 1, accumulate=True),
    "with_moving_average": jstep.with_moving_average(NOISY, jstep.ExponentialMovingAverage(0.9)),
    "with_noise_scale": jstep.with_noise_scale(NOISY),
    "with_projection": jstep.with_projection(NOISY, lambda params: params),
    "all of them": jstep.dynamic_loss_scale(
        jstep.skip_nonfinite(
            jstep.cautious(jstep.partition({"all": NOISY}, lambda path, leaf: "all"))
        )
    ),
}
"""Wrappers around an element that draws, all of float32 parameters."""
DRAWING = WRAPPED | {
    "add_noise": jstep.chain(NOISE, jstep.sgd(1.0)),
    "stochastic_rounding": ROUNDING,
    "compact": compact(),
    "scope": jstep.scope(jstep.scope(ROUNDING, "inner"), "outer"),
    "partition": jstep.partition({"a": ROUNDING, "a/b": jstep.sgd(1.0)}, lambda path, leaf: "a"),
    "skip_nonfinite": jstep.skip_nonfinite(jstep.chain(NOISE, jstep.sgd(1.0))),
    "chain of two": jstep.chain(jstep.add_noise(0.0, 0.0, KEY), ROUNDING),
    "compact with noise": compact(jstep.add_noise(0.0, 0.0, KEY)),
    "rounding of noise": jstep.stochastic_rounding(
        jstep.chain(jstep.add_noise(0.0, 0.0, KEY), jstep.sgd(ROUND)), KEY
    ),
    "beside what is not due": jstep.chain(
        jstep.add_noise(ROUND**2, 0.0, KEY),
        jstep.sgd(1.0),
        jstep.update_every(jstep.stochastic_rounding(jstep.stateless(lambda u, p, s: u), KEY), 1),
    ),
}


def fresh(name):
    dtype = jnp.float32 if name in ("add_noise", "skip_nonfinite", *WRAPPED) else jnp.bfloat16
    return jstep.TrainState.create(
        {"w": jnp.ones(ROWS, dtype), "b": jnp.ones(ROWS, dtype)}, DRAWING[name]
    )


def moves(name, updates, steps):
    """Return how far each of the updates moved `w` in excess of the first element's mean, [updates
    · steps, ROWS]."""
    optimizer = DRAWING[name]
    ones = jax.tree.map(jnp.ones_like, fresh(name).params)

    def update(state, _):
        # Always from the same values: an update is compared with the others, not with what they led
        # to.
        start = fresh(name)
        slots = {k: x if "drawn" in k else start.slots[k] for k, x in state.slots.items()}
        start = start.replace(slots=slots, global_step=state.global_step)
        gradients = jax.tree.map(
            lambda leaf: leaf * jstep.loss_scale(start).astype(leaf.dtype), ones
        )
        new = jstep.apply_gradients(
            start, gradients, optimizer, increment_global_step=False, scaled=True
        )
        value = master_params(new)["w"] if name.startswith("compact") else new.params["w"]
        return new, value.astype(jnp.float32) - 1

    def step(state, _):
        state, moved = jax.lax.scan(update, state, length=updates)
        return jstep.increment_global_step(state), moved

    _, moved = jax.jit(lambda state: jax.lax.scan(step, state, length=steps))(fresh(name))
    return np.asarray(moved, np.float64).reshape(updates * steps, ROWS)


@pytest.mark.thorough(
    except_for=["add_noise", "stochastic_rounding", "compact", "partition", "all of them"]
)
@pytest.mark.parametrize("name", DRAWING)
def test_updates_of_one_step_draw_as_steps_of_one_update(name):
    within = moves(name, 6, 1)
    across = moves(name, 1, 6)
    np.testing.assert_array_equal(within[0], across[0])  # the first update draws as it always did
    assert across.std() > 0
    # Independent draws: the sum of six varies as much within a step as over steps, and no two are
    # correlated.
    spread = within.sum(0).std()
    assert spread == pytest.approx(np.sqrt(6) * within.std(), rel=0.1)
    correlations = np.corrcoef(within) - np.eye(6)
    assert np.abs(correlations).max() < 5 / np.sqrt(ROWS)
    assert within.mean() == pytest.approx(across.mean(), abs=5 * across.std() / np.sqrt(6 * ROWS))


def test_each_optimizer_of_the_table_that_draws_counts_its_draws():
    params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
    drawing = {
        name
        for name, entry in TABLE.items()
        if roles_of(entry.make(0.1), params).names_with(Role.DRAWN)
    }
    assert {"stochastic_rounding", "add_noise"} <= drawing
    for name in drawing:
        optimizer = TABLE[name].make(0.1)
        state = jstep.TrainState.create(params, optimizer)
        counts = []
        for advances in (False, False, True, False):
            state = jstep.apply_gradients(state, params, optimizer, increment_global_step=advances)
            names = [
                slot for slot in state.roles.names_with(Role.DRAWN) if slot.endswith("drawn/count")
            ]
            counts.append({int(state.slots[slot]) for slot in names})
        assert counts == [{1}, {2}, {3}, {1}], name


def test_the_first_update_of_a_step_draws_from_key_step_and_leaf():
    optimizer = DRAWING["add_noise"]
    state = fresh("add_noise").replace(global_step=5)
    new = jstep.apply_gradients(state, jax.tree.map(jnp.zeros_like, state.params), optimizer)
    noise = [
        jax.random.normal(jax.random.fold_in(jax.random.fold_in(KEY, 5), leaf), (ROWS,))
        for leaf in (0, 1)
    ]
    np.testing.assert_array_equal(new.params["b"], 1 - np.float32(ROUND) * noise[0])
    np.testing.assert_array_equal(new.params["w"], 1 - np.float32(ROUND) * noise[1])


def test_a_skipped_update_and_an_idle_label_draw_nothing():
    optimizer = jstep.partition(
        {"a": jstep.skip_nonfinite(ROUNDING), "b": ROUNDING},
        lambda path, leaf: "a" if path == "b" else "b",
    )
    params = {"w": jnp.ones(8, jnp.bfloat16), "b": jnp.ones(8, jnp.bfloat16)}
    state = jstep.TrainState.create(params, optimizer)
    bad = {"w": None, "b": jnp.full(8, jnp.nan, jnp.bfloat16)}
    state = jstep.apply_gradients(state, bad, optimizer, increment_global_step=False)
    assert (int(state.slots["a/drawn/count"]), int(state.slots["b/drawn/count"])) == (0, 0)
    state = jstep.apply_gradients(state, params, optimizer, increment_global_step=False)
    assert (int(state.slots["a/drawn/count"]), int(state.slots["b/drawn/count"])) == (1, 1)


@pytest.mark.parametrize("name", ["add_noise", "stochastic_rounding", "compact", "partition"])
def test_a_checkpoint_from_before_draws_were_counted_is_restored(name, tmp_path):
    state = fresh(name)
    ones = jax.tree.map(jnp.ones_like, state.params)
    for _ in range(3):
        state = jstep.apply_gradients(state, ones, DRAWING[name], increment_global_step=False)
    state = state.replace(global_step=4)
    roles = state.roles
    roles = dataclasses.replace(
        roles, roles={slot: role for slot, role in roles.items() if role is not Role.DRAWN}
    )
    slots = {slot: x for slot, x in state.slots.items() if slot in roles}
    old = jstep.TrainState(state.params, slots, state.global_step, roles=roles)
    with jstep.Saver(tmp_path) as saver:
        saver.save(old)
        restored = saver.restore(state)  # whose count is 3
    names = restored.roles.names_with(Role.DRAWN)
    assert len(names) == 2
    assert all(int(restored.slots[slot]) == 0 for slot in names)


def test_labels_cannot_count_draws_together():
    with pytest.raises(ValueError, match=r"both have a slot named 'a/b/drawn"):
        jstep.partition({"a": jstep.scope(ROUNDING, "b"), "a/b": ROUNDING}, lambda path, leaf: "a")


def test_the_draws_of_a_custom_slot_of_this_name_are_its_own():
    custom = jstep.leafwise(
        lambda g, p, s, h: (-g, {}),
        hyper={},
        scalars={"drawn/count": 3.0},
        sparse=False,
        finished=True,
    )
    with pytest.raises(ValueError, match="drawn/count"):
        jstep.chain(NOISE, custom)


def test_repack_adds_and_removes_the_count():
    plain, stored = jstep.adam(0.1), jstep.compact(jstep.adam(0.1), min_size=1)
    state = jstep.TrainState.create({"w": jnp.ones((64, 64))}, plain)
    packed = jstep.repack(state, plain, stored)
    assert int(packed.slots["drawn/count"]) == 0
    assert jstep.repack(packed, stored, plain).slots.keys() == state.slots.keys()
