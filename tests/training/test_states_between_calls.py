"""A state between two calls of a step: what travels with it, by hand, in runs, and from one step to another."""

import pickle
from copy import deepcopy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

import jstep
from jstep.slots.roles import roles_in
from jstep.training.step import returned_layout

OPTIMIZER = jstep.adam(0.1)


def loss(params: Any, x: Any) -> Any:
    return jnp.sum((params["dense"]["kernel"] * x + params["bias"]) ** 2)


def fresh(**options: Any) -> jstep.TrainState:
    params = {"dense": {"kernel": jnp.arange(3.0)}, "bias": jnp.ones(3)}
    return jstep.TrainState.create(params, OPTIMIZER, **options)


def by_hand(step: Any, state: Any, count: int) -> Any:
    for n in range(count):
        state, _ = step(state, batch(n))
    return state


def run(step: Any, state: Any, last_step: int, **options: Any) -> Any:
    return jstep.train(step, state, batch, last_step, log_steps=None, progress=False, **options)


def batch(step: int) -> Any:
    return np.full(3, step, np.float32)


@pytest.mark.parametrize("order", ["run, hand", "hand, run, hand"])
def test_by_hand_and_in_runs_the_bits_are_the_same_and_a_step_is_compiled_once(order: str) -> None:
    expected = by_hand(jstep.minimize(loss, OPTIMIZER), fresh(), 3 * len(order.split(", ")))
    step, state, done = jstep.minimize(loss, OPTIMIZER), fresh(), 0
    for how in order.split(", "):
        if how == "run":
            state = run(step, state, done + 3)
        else:
            for n in range(done, done + 3):
                state, _ = step(state, batch(n))
        done += 3
        assert type(state) is jstep.TrainState
    assert state == expected
    assert step._cache_size() == 1


@pytest.mark.parametrize("kind", ["one device", "a mesh"])
def test_copies_of_a_state_are_inspected(kind: str) -> None:
    """A layout does not belong to the value of a state: a copy may be elsewhere, or in another process."""
    state = fresh(mesh=jax.make_mesh((2,), ("data",))) if kind == "a mesh" else fresh()
    state, _ = jstep.minimize(loss, OPTIMIZER)(state, batch(0))
    assert returned_layout(state) is not None
    step = jstep.minimize(loss, OPTIMIZER, donate=False)
    for copy in (pickle.loads(pickle.dumps(state)), deepcopy(state), state.replace(), jax.tree.map(jnp.copy, state)):
        assert returned_layout(copy) is None
        assert step(copy, batch(1))[0] == step(state, batch(1))[0]


def test_a_leaf_that_was_put_in_twice_is_refused() -> None:
    """On a mesh, XLA would end the process."""
    state, step = fresh(mesh=jax.make_mesh((2,), ("data",))), jstep.minimize(loss, OPTIMIZER)
    state, _ = step(state, batch(0))
    state.slots["m"]["bias"] = state.params["bias"]
    with pytest.raises(ValueError, match="'params/bias' and 'slots/m/bias' share one buffer"):
        step(state, batch(1))


@pytest.mark.parametrize("kind", ["one device", "a mesh"])
def test_a_traced_state_knows_nothing(kind: str) -> None:
    step, seen = jstep.minimize(loss, OPTIMIZER), []

    @jax.jit
    def twice(state: Any) -> Any:
        for n in range(2):
            state, _ = step(state, batch(n))
            seen.append(returned_layout(state))
        return state

    state = fresh(mesh=jax.make_mesh((2,), ("data",))) if kind == "a mesh" else fresh()
    assert jstep.global_step(twice(state)) == 2
    assert seen == [None, None]


@pytest.mark.parametrize("first", ["with roles", "without"])
def test_a_state_made_by_hand_has_the_roles_in_a_run_that_it_has_by_hand(first: str) -> None:
    made = fresh()
    without = jstep.TrainState(made.params, made.slots, made.global_step)
    states = [fresh(), without] if first == "with roles" else [without, fresh()]
    seen = []
    for call in (run, by_hand):
        step = jstep.minimize(loss, OPTIMIZER)
        ends = [call(step, jax.tree.map(jnp.copy, state), 3) for state in states]
        seen.append([dict(roles_in(end)) for end in ends])
        assert ends[0] == ends[1]
        assert step._cache_size() == 1
    assert seen[0] == seen[1]


@pytest.mark.thorough(except_for=["1-2"])
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("stage", [1, 4])
def test_a_run_whose_batches_come_to_be_on_a_mesh_stays_there(first: int, stage: int) -> None:
    where = NamedSharding(jax.make_mesh((len(jax.devices()),), ("data",)), PartitionSpec())

    def batches(n: int) -> Any:
        return batch(n) if n < first else jax.device_put(batch(n), where)

    stages = {0: jstep.minimize(loss, OPTIMIZER), stage: jstep.minimize(loss, OPTIMIZER)}
    state = jstep.train(stages, fresh(), batches, 6, log_steps=None, progress=False)
    assert state.params["bias"].sharding.is_equivalent_to(where, 1)
    alone = by_hand(jstep.minimize(loss, OPTIMIZER), fresh(), 6)
    assert all(map(np.allclose, jax.tree.leaves(state), jax.tree.leaves(alone)))


def test_a_batch_that_is_a_buffer_of_a_state_that_came_to_a_mesh_is_refused() -> None:
    where = NamedSharding(jax.make_mesh((len(jax.devices()),), ("data",)), PartitionSpec())

    def batches(n: int, state: Any) -> Any:
        return state.params["bias"] if n == 5 else batch(n) if n < 2 else jax.device_put(batch(n), where)

    step = jstep.minimize(loss, OPTIMIZER)
    with pytest.raises(ValueError, match="share one buffer"):
        jstep.train(step, fresh(), jstep.from_state(batches), 8, log_steps=None, progress=False)


def test_a_step_of_symbolic_shapes_can_be_exported() -> None:
    (n,) = export.symbolic_shape("n")
    step = jstep.minimize(lambda params, x: jnp.sum(params["w"] ** 2), jstep.gradient_descent(0.1))
    shapes = jstep.TrainState({"w": jax.ShapeDtypeStruct((n,), jnp.float32)}, {}, jax.ShapeDtypeStruct((), jnp.int32))
    flat = jax.ShapeDtypeStruct((3,), jnp.float32)
    exported = export.export(
        jax.jit(lambda leaves, x: jax.tree.leaves(step(jax.tree.unflatten(treedef, leaves), x)[0]))
    )
    treedef = jax.tree.structure(shapes)
    made = exported(jax.tree.leaves(shapes), flat)
    assert made.call([jnp.ones(5), jnp.int32(0)], jnp.ones(3))[1] == 1


def test_a_step_that_was_called_by_hand_is_not_compiled_again_as_a_later_stage() -> None:
    first, later = jstep.minimize(loss, OPTIMIZER), jstep.minimize(loss, OPTIMIZER)
    later(fresh(), batch(0))
    run({0: first, 3: later}, fresh(), 6)
    assert (first._cache_size(), later._cache_size()) == (1, 1)


@pytest.mark.thorough
def test_stages_of_which_one_does_not_donate() -> None:
    kept = jstep.minimize(loss, OPTIMIZER, donate=False)
    stages = {0: jstep.minimize(loss, OPTIMIZER), 2: kept, 4: lambda state, x: kept(state, x), 6: kept}
    assert run(stages, fresh(), 8) == by_hand(kept, fresh(), 8)
