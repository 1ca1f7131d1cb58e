"""Functions of trees on Explicit axes: what they return is sharded like what they were given."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jstep

SPECS = {"a": P("data", None), "b": P(None, "data"), "c": P(None, None)}
EMA = jstep.ExponentialMovingAverage(0.5, num_updates=True)
DEBIASED = jstep.ExponentialMovingAverage(0.5, zero_debias=True)


@pytest.fixture(scope="module")
def mesh() -> Any:
    return jax.make_mesh((4,), ("data",))  # Explicit axes


@pytest.fixture
def params(mesh: Any) -> Any:
    def placed(spec: P) -> jax.Array:
        return jax.device_put(jnp.full((8, 8), 2.0, jnp.float32), NamedSharding(mesh, spec))

    return {name: placed(spec) for name, spec in SPECS.items()}


def specs(tree: Any) -> Any:
    """Return the specs with one entry for each dimension, as JAX writes those of a program."""
    return jax.tree.map(lambda leaf: P(*leaf.sharding.spec, *[None] * (leaf.ndim - len(leaf.sharding.spec))), tree)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "clip_by_value": lambda tree: jstep.clip_by_value(tree, -1, 1),
    "clip_by_norm": lambda tree: jstep.clip_by_norm(clip_norm=1.0, t=tree),
    "clip_by_average_norm": lambda tree: jstep.clip_by_average_norm(clip_norm=0.1, t=tree),
    "clip_by_global_norm": lambda tree: jstep.clip_by_global_norm(clip_norm=1.0, tree=tree)[0],
    "apply_updates": lambda tree: jstep.apply_updates(updates=tree, params=tree),
    "init": lambda tree: EMA.init(tree),
    "init_from_zeros": lambda tree: DEBIASED.init(params=tree),
    "apply": lambda tree: EMA.apply(tree, tree, 3),
    "apply_to_averages_of_the_host": lambda tree: EMA.apply(jax.device_get(tree), tree, 3),
    "apply_to_averages_elsewhere": lambda tree: EMA.apply(jax.tree.map(jnp.asarray, jax.device_get(tree)), tree, 3),
    "apply_by_names": lambda tree: DEBIASED.apply(num_updates=3, params=tree, averages=tree),
    "apply_updates_of_the_host": lambda tree: jstep.apply_updates(tree, jax.device_get(tree)),
}


@pytest.mark.thorough(except_for=["clip_by_global_norm", "apply_by_names"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_sharded_like_the_tree(name: str, params: Any) -> None:
    assert specs(FUNCTIONS[name](params)) == SPECS


@pytest.mark.thorough(except_for=["clip_by_global_norm", "apply"])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "host" not in name and "elsewhere" not in name])
def test_results_of_programs_are_sharded_like_the_tree(name: str, mesh: Any, params: Any) -> None:
    with jax.set_mesh(mesh):  # JAX requires one of a program that reads shapes only
        assert specs(jax.jit(FUNCTIONS[name])(params)) == SPECS


def test_a_path_of_a_tree_is_not_one_of_its_result(params: Any) -> None:
    """The clipped tree is the first of two results, whose paths are those of other leaves of this tree."""
    tree = ((params["a"], params["b"]), params["c"])
    assert specs(jstep.clip_by_global_norm(tree, 1.0)[0]) == ((SPECS["a"], SPECS["b"]), SPECS["c"])
    assert specs(jstep.clip_by_value(tree, -1, 1)) == ((SPECS["a"], SPECS["b"]), SPECS["c"])


def test_averages_keep_their_own_sharding(params: Any) -> None:
    moved = {"a": params["b"], "b": params["a"], "c": params["c"]}
    assert specs(EMA.apply(moved, params, 3)) == specs(moved)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (jstep.schedule_free_adamw(0.1), None),
        (jstep.scope("x", jstep.schedule_free_sgd(0.1)), "x/z"),
        (jstep.compact(jstep.schedule_free_adamw(0.1), min_size=1), None),
        (jstep.master_weights(jstep.schedule_free_adamw(0.1)), None),
    ],
    ids=["plain", "scope", "compact", "master"],
)
@pytest.mark.parametrize("jit", [False, True])
def test_schedule_free_params(optimizer: Any, name: str | None, jit: bool, params: Any) -> None:
    state = jstep.TrainState.create(params, optimizer)
    found = jax.jit(lambda state: jstep.schedule_free_params(state, name)) if jit else jstep.schedule_free_params
    assert specs(found(state) if jit else found(state, name=name)) == SPECS
    with pytest.raises(TypeError, match="must be a TrainState"):
        jstep.schedule_free_params(params)


PLAIN = jstep.with_moving_average(jstep.adamw(0.1), EMA)
COMPACT, MASTERS = jstep.compact(PLAIN, min_size=1), jstep.master_weights(PLAIN)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [False, True], ids=["plain", "zero"])
@pytest.mark.parametrize(
    ("old", "new"),
    [(PLAIN, COMPACT), (COMPACT, PLAIN), (MASTERS, COMPACT), (COMPACT, MASTERS)],
    ids=["PLAIN-COMPACT", "COMPACT-PLAIN", "MASTERS-COMPACT", "COMPACT-MASTERS"],
)
def test_a_converted_state_is_sharded_like_a_new_one(old: Any, new: Any, zero: bool, mesh: Any, params: Any) -> None:
    low = jax.tree.map(lambda p: jax.device_put(p.astype(jnp.bfloat16), p.sharding), params)

    def create(optimizer: Any) -> Any:
        if not zero:
            return jstep.TrainState.create(low, optimizer, model_state={"seen": 3})
        whole = jax.device_get(low)
        return jstep.TrainState.create(whole, optimizer, model_state={"seen": 3}, mesh=mesh, slot_axis="data")

    made, want = jstep.repack(create(old), old, new), create(new)
    assert specs(made.params) == specs(want.params)
    for name in want.slots:
        if name != "model_state":
            assert specs(made.slots[name]) == specs(want.slots[name]), name
