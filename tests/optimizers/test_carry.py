"""`carry`: slots that come along to parameters of other shapes."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jstep

OPTIMIZERS = {
    "adam": jstep.adam(0.1),
    "adafactor": jstep.adafactor(0.1),
    "muon": jstep.muon(0.1),
    "soap": jstep.soap(0.1),
    "lookahead": jstep.lookahead(jstep.adam(0.1), 3, 0.5),
    "averages": jstep.with_moving_average(jstep.adam(0.1), jstep.ExponentialMovingAverage(0.9)),
    "compact": jstep.compact(jstep.adam(0.1)),
    "guarded": jstep.skip_nonfinite(jstep.dynamic_loss_scale(jstep.adam(0.1))),
    "prodigy": jstep.prodigy(),
}


def params_of(rows=12, columns=8, key=0):
    keys = jax.random.split(jax.random.key(key), 2)
    return {"table": jax.random.normal(keys[0], (rows, columns)), "out": jax.random.normal(keys[1], (columns, 4))}


def loss_fn(params, numbers):
    return jnp.mean((params["table"][numbers] @ params["out"]) ** 2)


NUMBERS = jnp.arange(6)


@functools.cache
def step_of(optimizer):
    return jstep.minimize(loss_fn, optimizer)


def trained(optimizer, params=None, steps=5):
    step = step_of(optimizer)
    state = jstep.TrainState.create(params_of() if params is None else params, optimizer)
    for _ in range(steps):
        state, _ = step(state, NUMBERS)
    return state


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_parameters_are_the_same_state(name, caplog):
    state = trained(OPTIMIZERS[name])
    with caplog.at_level(logging.INFO, "jstep"):
        found = jstep.carry(state, state.params, OPTIMIZERS[name])
    assert found == state
    assert "carried" not in caplog.text
    addresses = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) if leaf.size}
    assert not addresses & {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(found) if leaf.size}


CHANGES = {
    "grown": (lambda table: jnp.concatenate([table, jnp.ones((3, 8))]), None),
    "shrunk": (lambda table: table[:9], None),
    "by index": (lambda table: table[jnp.array([3, 1, 0, 5])], {"table": [3, 1, 0, 5]}),
    "with new ones": (lambda table: jnp.concatenate([table[2:4], jnp.ones((2, 8))]), {"table": [2, 3, -1]}),
    "columns": (lambda table: table[:, :6], None),
}


@pytest.mark.thorough(except_for=["soap-with new ones"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_on(name, change):
    moved, index = CHANGES[change]
    optimizer = OPTIMIZERS[name]
    state = trained(optimizer)
    table = moved(state.params["table"])
    params = {"table": table, "out": state.params["out"][: table.shape[1]]}
    found = jstep.carry(state, params, optimizer, index=index)
    assert int(found.global_step) == 5
    fresh = jstep.TrainState.create(params, optimizer)
    assert jax.tree.map(jnp.shape, found.slots) == jax.tree.map(jnp.shape, fresh.slots)
    step = step_of(optimizer)
    for _ in range(20):
        found, metrics = step(found, jnp.arange(3))
    assert np.isfinite(float(metrics["loss"]))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adam", "averages", "lookahead"])
def test_a_table_that_grows_has_the_bits_of_one_that_was_always_so(name):
    optimizer = OPTIMIZERS[name]
    large = params_of(16)
    small = {**large, "table": large["table"][:12]}
    always, state = trained(optimizer, large), trained(optimizer, small)
    rest = always.params["table"][12:]  # what they would have had
    found = jstep.carry(state, {**state.params, "table": jnp.concatenate([state.params["table"], rest])}, optimizer)
    step = step_of(optimizer)
    for _ in range(5):
        found, _ = step(found, NUMBERS + 8)
        always, _ = step(always, NUMBERS + 8)
    assert jnp.array_equal(found.params["table"], always.params["table"])


def test_rows_by_index():
    state = trained(OPTIMIZERS["adam"])
    rows = [3, -1, 0]
    table = jnp.concatenate([state.params["table"][:4], jnp.zeros((1, 8))])
    found = jstep.carry(state, {**state.params, "table": table}, OPTIMIZERS["adam"], index={"table": rows})
    before, after = jstep.get_slot(state, "m", "table"), jstep.get_slot(found, "m", "table")
    assert (after[0] == before[3]).all()
    assert (after[2] == before[0]).all()
    assert (after[jnp.array([1, 3, 4])] == 0).all()
    both = {"table": ([1, 0], [2, 5])}
    params = {"table": state.params["table"][:2, :2], "out": state.params["out"][:2]}
    found = jstep.carry(state, params, OPTIMIZERS["adam"], index=both)
    assert (jstep.get_slot(found, "m", "table") == before[jnp.array([1, 0])][:, jnp.array([2, 5])]).all()


def test_factored_slots_keep_what_overlaps():
    state = trained(OPTIMIZERS["adafactor"])
    grown = {**state.params, "table": jnp.concatenate([state.params["table"], jnp.ones((3, 8))])}
    found = jstep.carry(state, grown, OPTIMIZERS["adafactor"])
    for name, slot in state.slots.items():
        if isinstance(slot, dict) and getattr(slot.get("table"), "shape", None) == (12,):
            assert (found.slots[name]["table"][:12] == slot["table"]).all()


@pytest.mark.thorough
def test_masters_stay_where_they_round_to_the_parameter():
    optimizer = jstep.master_weights(jstep.adam(0.1))
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params_of())
    state = trained(optimizer, low)
    changed = state.params["table"].at[0, 0].set(7.0)
    grown = {**state.params, "table": jnp.concatenate([changed, jnp.full((1, 8), 3.0, jnp.bfloat16)])}
    found = jstep.carry(state, grown, optimizer)
    before, after = jstep.get_slot(state, "master", "table"), jstep.get_slot(found, "master", "table")
    assert after[0, 0] == 7
    assert (after[12] == 3).all()
    assert (after[1:12] == before[1:]).all()


def test_averages_of_new_rows_are_the_rows():
    optimizer = OPTIMIZERS["averages"]
    state = trained(optimizer)
    grown = {**state.params, "table": jnp.concatenate([state.params["table"], jnp.full((1, 8), 3.0)])}
    found = jstep.averaged_params(jstep.carry(state, grown, optimizer))["table"]
    assert (found[12] == 3).all()
    assert (found[:12] == jstep.averaged_params(state)["table"]).all()


def test_in_jit_and_on_shapes():
    optimizer = OPTIMIZERS["adam"]
    state = trained(optimizer)
    grown = {**state.params, "table": jnp.ones((15, 8))}
    expected = jstep.carry(state, grown, optimizer)
    assert jax.jit(lambda state, params: jstep.carry(state, params, optimizer))(state, grown) == expected
    shapes = jstep.carry(jax.eval_shape(lambda: state), grown, optimizer)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), expected
    )


def test_it_says_what_is_new(caplog):
    state = trained(OPTIMIZERS["adam"])
    grown = {"table": jnp.ones((15, 8)), "head": jnp.ones(3)}
    with caplog.at_level(logging.INFO, "jstep"):
        jstep.carry(state, grown, OPTIMIZERS["adam"])
    (record,) = [one for one in caplog.records if "carried" in one.getMessage()]
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert all(word in message for word in ("'m/table'", "'m/head'", "'params/out'", "old age"))


@pytest.mark.parametrize(
    ("index", "error", "said"),
    [
        ([1], TypeError, "must be a mapping"),
        ({"tabel": [1]}, ValueError, "'table'"),
        ({"table": [1.5]}, TypeError, "row numbers"),
        ({"table": [12]}, ValueError, "below 12, got 12"),
        ({"table": [0] * 13}, ValueError, "at most the 12 rows"),
        ({"table": ([0], None, [1])}, ValueError, "at most 2 entries"),
    ],
)
def test_an_index_that_is_refused(index, error, said):
    state = trained(OPTIMIZERS["adam"], steps=1)
    with pytest.raises(error, match=said):
        jstep.carry(state, state.params, OPTIMIZERS["adam"], index=index)
