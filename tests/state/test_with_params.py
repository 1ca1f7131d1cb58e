"""Parameters put into a state: the slots that are copies of them come along, or a warning says that
they do not."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optimizer_table import TABLE

import jstep
from jstep.slots.roles import LIKE_PARAMETERS, Role, roles_in
from jstep.state.slots import master_params, slot_values

WITH_COPIES = {
    "master_weights": lambda: jstep.master_weights(jstep.adamw(1e-3)),
    "average": lambda: jstep.with_moving_average(
        jstep.adamw(1e-3), jstep.ExponentialMovingAverage(0.999)
    ),
    "zero_debias": lambda: jstep.with_moving_average(
        jstep.adamw(1e-3), jstep.ExponentialMovingAverage(0.999, zero_debias=True)
    ),
    "schedule_free": lambda: jstep.schedule_free_adamw(1e-3),
    "lookahead": lambda: jstep.lookahead(jstep.adamw(1e-3)),
    "compact schedule_free": lambda: jstep.compact(jstep.schedule_free_adamw(1e-3), min_size=0),
    "masters of schedule_free": lambda: jstep.master_weights(jstep.schedule_free_adamw(1e-3)),
    "partition": lambda: jstep.partition(
        {"a": jstep.schedule_free_adamw(1e-3), "b": jstep.master_weights(jstep.sgd(1e-3))},
        lambda path, leaf: "a" if path == "w" else "b",
    ),
    "optax": lambda: __import__("optax").contrib.schedule_free_adamw(1e-3),
}


def params_of(value: float, dtype: Any = jnp.float32) -> Any:
    return {
        "b": jnp.full((8,), value, dtype),
        "n": jnp.int32(3),
        "w": jnp.full((8, 4), value, dtype),
    }


def trained(optimizer: Any, state: jstep.TrainState, steps: int = 12) -> jstep.TrainState:
    def loss_fn(params: Any) -> jax.Array:
        return 1e-3 * sum(jnp.mean(params[name].astype(jnp.float32)) for name in ("w", "b"))

    step = jstep.minimize(loss_fn, optimizer, donate=False)
    for _ in range(steps):
        state, _ = step(state)
    return state


def names_of_copies(state: jstep.TrainState) -> list[str]:
    return [name for name in roles_in(state).names_with(*LIKE_PARAMETERS) if name in state.slots]


@pytest.mark.thorough
@pytest.mark.parametrize("name", WITH_COPIES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_loaded_stays(name: str, dtype: Any) -> None:
    optimizer = WITH_COPIES[name]()
    state = trained(optimizer, jstep.TrainState.create(params_of(1.0, dtype), optimizer))
    loaded = state.with_params(params_of(100.0, dtype))
    assert names_of_copies(loaded)
    for slot in names_of_copies(loaded):
        for leaf in jax.tree.leaves(slot_values(loaded, slot)):
            np.testing.assert_array_equal(leaf, 100.0)
    kept = (
        state.slots.keys()
        - set(names_of_copies(state))
        - set(roles_in(state).names_with(Role.REMAINDER))
    )
    assert all(
        jax.tree.leaves(loaded.slots[slot]) == jax.tree.leaves(state.slots[slot]) for slot in kept
    )
    assert loaded.global_step is state.global_step
    after = trained(optimizer, loaded)
    np.testing.assert_allclose(after.params["w"].astype(jnp.float32), 100.0, rtol=1e-2)
    if "average" in name or name == "zero_debias":
        np.testing.assert_allclose(
            jstep.averaged_params(after)["w"].astype(jnp.float32), 100.0, rtol=1e-2
        )


@pytest.mark.thorough(except_for=["ftrl", "partition", "schedule_free_adamw"])
@pytest.mark.parametrize("name", TABLE)
def test_a_new_state_is_as_if_created_with_them(name: str) -> None:
    optimizer = TABLE[name].make(0.1)
    random = np.random.default_rng(0)
    first, second = (
        {"w": np.float32(random.normal(size=(6, 4))), "b": np.full(4, i, np.float32)}
        for i in (1, 2)
    )
    made, wanted = (jstep.TrainState.create(p, optimizer) for p in (first, second))
    if roles_in(made).computing:
        with pytest.raises(ValueError, match="computes the parameters from its slots"):
            made.with_params(second)
        return
    made = made.with_params(second)
    for slot, tree in wanted.slots.items():
        if roles_in(wanted).get(slot) is Role.AVERAGE:  # begins at zeros, or at values of its own
            tree = second
        equal = jax.tree.leaves(jax.tree.map(jnp.array_equal, made.slots[slot], tree))
        assert equal == [True] * len(jax.tree.leaves(tree)), slot
    assert jax.tree.structure(made) == jax.tree.structure(wanted)


def test_the_same_array_stays_with_its_slots() -> None:
    optimizer = WITH_COPIES["average"]()
    state = trained(optimizer, jstep.TrainState.create(params_of(1.0), optimizer))
    loaded = state.with_params({**state.params, "w": np.full((8, 4), 7.0, np.float32)})
    before, after = (one.slots["ExponentialMovingAverage"] for one in (state, loaded))
    assert loaded.params["b"] is state.params["b"]
    assert after["b"] is before["b"]
    np.testing.assert_array_equal(after["w"], 7.0)


def test_nothing_is_shared_with_what_was_given() -> None:
    optimizer = WITH_COPIES["average"]()
    given = params_of(5.0)
    state = jstep.TrainState.create(params_of(1.0), optimizer).with_params(given)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((state, given))]
    assert len(set(pointers)) == len(pointers)
    state, _ = jstep.minimize(lambda p: jnp.sum(p["w"]), optimizer)(state)
    assert not given["w"].is_deleted()


@pytest.mark.thorough(except_for=["<lambda>"])
@pytest.mark.parametrize(
    "wrap", [jstep.master_weights, lambda inner: jstep.compact(inner, min_size=0)]
)
def test_a_low_precision_leaf_takes_float32(wrap: Any) -> None:
    optimizer = wrap(jstep.schedule_free_adamw(1e-3))
    exact = np.float32(np.random.default_rng(1).normal(size=(8, 4)))
    state = trained(optimizer, jstep.TrainState.create(params_of(1.0, jnp.bfloat16), optimizer))
    loaded = state.with_params({**state.params, "w": exact})
    assert loaded.params["w"].dtype == jnp.bfloat16
    wanted = jstep.TrainState.create(params_of(1.0, jnp.bfloat16), optimizer)
    assert jax.tree.structure(loaded) == jax.tree.structure(wanted)
    (masters,) = [state.slots[name]["w"] for name in ("master",) if name in state.slots] or [
        master_params(loaded)["w"]
    ]
    precise = loaded.slots["master"]["w"] if "master" in loaded.slots else masters
    np.testing.assert_allclose(precise, exact, rtol=2.0**-16)
    np.testing.assert_array_equal(slot_values(loaded, "z")["w"], precise)
    np.testing.assert_allclose(loaded.params["w"].astype(jnp.float32), exact, rtol=2.0**-8)


def test_a_state_made_by_hand_is_refused() -> None:
    state = jstep.TrainState.create(params_of(1.0), jstep.schedule_free_adamw(1e-3))
    with pytest.raises(ValueError, match="got one by hand"):
        jstep.TrainState(state.params, state.slots, state.global_step).with_params(params_of(2.0))
    bare = jstep.TrainState(state.params, {}, state.global_step).with_params(params_of(2.0))
    np.testing.assert_array_equal(bare.params["w"], 2.0)


@pytest.mark.thorough(except_for=["data-AxisType.Explicit"])
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("slot_axis", [None, "data"])
def test_on_a_mesh_each_leaf_is_placed_as_before(axes: AxisType, slot_axis: str | None) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axes, axes))
    optimizer = WITH_COPIES["masters of schedule_free"]()
    specs = [("w", PartitionSpec(None, "model"))]
    state = jstep.TrainState.create(
        params_of(1.0, jnp.bfloat16), optimizer, mesh=mesh, param_specs=specs, slot_axis=slot_axis
    )
    for given in (
        params_of(2.0, jnp.bfloat16),
        jax.tree.map(np.asarray, params_of(2.0, jnp.bfloat16)),
    ):
        loaded = state.with_params(given)
        assert jax.tree.map(lambda x: x.sharding, loaded) == jax.tree.map(
            lambda x: x.sharding, state
        )
        for name in names_of_copies(loaded):
            assert all(np.all(np.asarray(x) == 2.0) for x in jax.tree.leaves(loaded.slots[name]))
    with jax.set_mesh(jax.make_mesh((8,), ("other",))):
        assert (
            state.with_params(params_of(3.0, jnp.bfloat16)).params["w"].sharding
            == state.params["w"].sharding
        )


# The warning of a replacement that slots undo.


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if "with_params" in record.getMessage()
    ]


@pytest.mark.thorough(except_for=["partition"])
@pytest.mark.parametrize("name", WITH_COPIES)
def test_replaced_parameters_are_one_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = WITH_COPIES[name]()
    state = jstep.TrainState.create(params_of(1.0), optimizer)
    for _ in range(3):
        changed = state.replace(params=params_of(2.0))
        changed, _ = jstep.minimize(lambda p: jnp.sum(p["w"]), optimizer, donate=False)(changed)
        changed.replace(params=params_of(3.0))
    (text,) = warnings_of(caplog)
    assert all(repr(slot) in text for slot in names_of_copies(state))
    assert caplog.records[0].levelno == logging.WARNING


def test_nothing_is_said_where_nothing_is_undone(caplog: pytest.LogCaptureFixture) -> None:
    with_copies = jstep.TrainState.create(params_of(1.0), jstep.schedule_free_adamw(1e-3))
    plain = jstep.TrainState.create(params_of(1.0), jstep.adamw(1e-3))
    plain.replace(params=params_of(2.0))
    with_copies.replace(params=params_of(2.0), slots=with_copies.slots)
    with_copies.replace(params=with_copies.params)
    with_copies.replace(params=jax.tree.map(jnp.copy, with_copies.params))
    with_copies.replace(global_step=3)
    with_copies.with_params(params_of(2.0))
    jax.jit(lambda s: s.replace(params=jax.tree.map(lambda p: p + 1, s.params)))(with_copies)
    jax.eval_shape(lambda: with_copies).replace(params=jax.eval_shape(lambda: params_of(2.0)))
    mesh = jax.make_mesh((1,), ("data",))
    with_copies.replace(params=NamedSharding(mesh, PartitionSpec()))
    jstep.shard_state(with_copies, mesh)
    assert not warnings_of(caplog)


def hooked(hook: Any, optimizer: Any = None, **options: Any) -> jstep.TrainState:
    optimizer = optimizer or jstep.schedule_free_adamw(1e-3)
    step = jstep.minimize(lambda p, x: jnp.mean(p["w"] * x), optimizer)
    state = jstep.TrainState.create(params_of(1.0), optimizer)
    return jstep.train(
        step, state, lambda n: np.float32(1), 6, hooks=[hook], progress=False, **options
    )


def by_hand(step: int, state: jstep.TrainState, metrics: Any) -> jstep.TrainState:
    return jstep.TrainState(params_of(float(step)), state.slots, state.global_step)


def test_a_state_that_a_hook_returns_is_one_warning_in_a_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for runs, returned in enumerate(
        (by_hand, lambda n, state, m: state.replace(params=params_of(float(n)))), 1
    ):
        hooked(jstep.every(1, returned))
        assert len(warnings_of(caplog)) == runs
